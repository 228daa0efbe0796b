"""A trainer that publishes a checkpoint once, retains it, and lives until its standard input ends.

python -m tests.catch_up.retaining_trainer ADDRESS GROUP CHECKPOINT
"""

from __future__ import annotations

import sys

from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources_safetensors import SafetensorsSource


def main(address: str, group: str, checkpoint: str) -> None:
    publisher = Publisher(address, group, SafetensorsSource(checkpoint), heartbeat="helper", retain="memory")
    result = publisher.publish(1)
    print(f"published {result.version}", flush=True)
    sys.stdin.read()
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
