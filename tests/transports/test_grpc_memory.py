"""What ``grpc`` keeps of freed memory it keeps once in a process, not for each thread that makes a channel."""

from __future__ import annotations

import subprocess
import sys

MAKES_CHANNELS = """
import threading
from pathlib import Path
from weightplane.transports.base import ChannelSpec
from weightplane.transports.grpc_stream import GrpcSendChannel

THREADS = 6
together = threading.Barrier(THREADS)

def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("RssAnon"))

def make(i):
    together.wait()  # all live at once: each has a heap of its own
    spec = ChannelSpec(f"c-{i}", "g", "grpc", bytes(32), ("rank/0",), ("r0/0",), 1 << 20, {})
    channel = GrpcSendChannel(spec, "rank/0")
    together.wait()
    channel.close()

def all_threads():
    threads = [threading.Thread(target=make, args=(i,)) for i in range(THREADS)]
    for t in threads: t.start()
    for t in threads: t.join()

before = anonymous_kib()
all_threads()
all_threads()
print(anonymous_kib() - before)
"""


def test_channels_made_in_several_threads_hold_no_memory_for_each() -> None:
    done = subprocess.run([sys.executable, "-c", MAKES_CHANNELS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 << 10, f"{done.stdout.strip()} KiB more than before"
