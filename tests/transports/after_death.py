"""What becomes of memory that is mapped by CUDA IPC when its exporter is killed: found out in a process of its own.

``python -m tests.transports.after_death SENDER RECEIVER``: prints one line of JSON. Reading such memory may end a
process's use of its GPU for ever, so no test does it itself. ``cpu``: the card that the host plays.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.transports.cuda_pair import Pair, Place, paired, value
from weightplane.transports.cuda_abi import Batch


def closes(pair: Pair) -> bool:
    pair.channel.close()
    return not pair.importer._mapped


def main(sender: str, receiver: str) -> None:
    said: dict[str, Any] = {}

    def note(what: str, call: Callable[[], Any]) -> None:
        try:
            said[what] = call()
        except Exception as e:
            said[what] = f"{type(e).__name__}: {e}"

    with paired(Place("host" if sender == "cpu" else "cards", sender, receiver)) as pair:
        pair.update(1)
        importer, device = pair.importer, torch.device(receiver)
        plan = next(iter(next(iter(importer._sources.values())).plans.values()))
        region = plan.entry.regions[0]
        source = importer._address("s", importer._sources["s"], device.index or 0, region) + plan.entry.offsets[0]
        n = min(4096, plan.entry.sizes[0])
        target = torch.zeros(n, dtype=torch.uint8, device=device)
        pid = pair.child.process.pid
        pair.child.end()
        cuda = importer._cuda
        index = device.index or 0

        def read() -> bool:
            with cuda.on(index):
                stream = cuda.new_stream()
                batch = Batch([target.data_ptr()], [source], [n])
                (cuda.copy_batch if cuda.batches else cuda.copy_each)(batch, stream)
                cuda.synchronize(stream)
            return True

        note("a copy from it succeeds", read)
        note("its bytes are as they were", lambda: bool((target == value(1, 0)).all()))
        note("the channel closes", partial(closes, pair))
        note("the GPU is usable", lambda: int(torch.ones(1000, device=device).sum()) == 1000)
        home = os.environ["WEIGHTPLANE_SHM_DIR"]
        for name in os.listdir(home):  # the socket of the one that was killed
            if f"-{pid}-" in name:
                os.unlink(os.path.join(home, name))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        os.environ["WEIGHTPLANE_SHM_DIR"] = made
        main(*sys.argv[1:])
