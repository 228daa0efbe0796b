"""What becomes of memory that is mapped by CUDA IPC when its exporter is killed: found out in a process of its own.

``python -m tests.transports.after_death SENDER RECEIVER WHAT``: prints a line of JSON for each thing it finds. ``cpu``:
the card that the host plays. ``WHAT``: ``close`` lets go of the memory, as a channel does; ``read`` copies from it
first, which no channel does and which may end the process, or its use of its GPU for ever.
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

_BYTES = 1 << 20  # more than a driver copies with the processor


def note(what: str, call: Callable[[], Any]) -> None:
    try:
        found = call()
    except Exception as e:
        found = f"{type(e).__name__}: {e}"
    print(json.dumps({what: found}), flush=True)


def closes(pair: Pair) -> bool:
    pair.channel.close()
    return not pair.importer._mapped


def main(sender: str, receiver: str, what: str) -> None:
    with paired(Place("host" if sender == "cpu" else "cards", sender, receiver)) as pair:
        pair.update(1)
        importer, device = pair.importer, torch.device(receiver)
        plan = next(iter(next(iter(importer._sources.values())).plans.values()))
        region = plan.entry.regions[0]
        source = importer._address("s", importer._sources["s"], device.index or 0, region) + plan.entry.offsets[0]
        n = min(_BYTES, plan.entry.sizes[0])
        target = torch.zeros(n, dtype=torch.uint8, device=device)
        pid = pair.child.process.pid
        cuda, index = importer._cuda, device.index or 0

        def knows() -> bool:
            with cuda.on(index):
                return bool(cuda.serial(source))

        def read() -> bool:
            with cuda.on(index):
                stream = cuda.new_stream()
                batch = Batch([target.data_ptr()], [source], [n])
                (cuda.copy_batch if cuda.batches else cuda.copy_each)(batch, stream)
                cuda.synchronize(stream)
            return True

        with pair.channel._busy:  # or the channel lets go of the memory as soon as it hears of the death
            pair.child.end()
            note("its exporter is dead", lambda: not pair.child.process.is_alive())
            if sender != "cpu":
                note("the driver knows the mapping still", knows)
            if what == "read":
                note("a copy from it succeeds", read)
                note("its bytes are as they were", lambda: bool((target == value(1, 0)).all()))
        note("the channel closes", partial(closes, pair))
        note("the GPU is usable", lambda: int(torch.ones(1000, device=device).sum()) == 1000)
        home = os.environ["WEIGHTPLANE_SHM_DIR"]
        for name in os.listdir(home):  # the socket of the one that was killed
            if f"-{pid}-" in name:
                os.unlink(os.path.join(home, name))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        os.environ["WEIGHTPLANE_SHM_DIR"] = made
        main(*sys.argv[1:])
