"""The Python trainer of ``languages.py``: publishes one file, once, as ``clients/cpp``'s ``publish_checkpoint`` does.

``python benchmarks/_language_trainer.py ADDRESS GROUP FILE TRANSPORT DEVICE``; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weightplane.trainer_agent import Publisher, SafetensorsSource, Source, StateDictSource


def source_of(file: Path, device: str) -> Source:
    """The file's tensors, where the transport reads them."""
    found = SafetensorsSource(file)
    if device == "cpu":
        return found
    return StateDictSource({meta.name: found.tensor(i)[0].to(device) for i, meta in enumerate(found.manifest())})


def main(address: str, group: str, file: str, transport: str, device: str) -> None:
    """Publish and say what it took."""
    with Publisher(address, group, source_of(Path(file), device), transport=transport) as publisher:
        receipt = publisher.publish(step=1)
    print(json.dumps({"seconds": receipt.total_s, "wire_s": receipt.wire_s, "bytes": receipt.bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
