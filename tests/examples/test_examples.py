"""The examples run as they stand, and the README shows the one that it prints."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, timeout: float = 100) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_minimal_example_computes_with_the_published_weights() -> None:
    said = run("minimal.py")
    assert said.strip() == "version 1 on ('replica-a',): computed by version 1, same outputs: True"


def test_the_readme_shows_the_minimal_example() -> None:
    code = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_transport_of_the_docs_moves_a_model_and_is_verified() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from my_transport import TcpTransport  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    from weightplane.controlplane.core.manifest import Manifest, TensorMeta
    from weightplane.controlplane.core.placement import full_placement
    from weightplane.controlplane.core.planner import make_plan
    from weightplane.transports.base import ArmToken, ChannelSpec, PeerLost
    from weightplane.transports.buckets import SinkSpans, SourceSpans
    from weightplane.transports.digest import digest_tensor

    manifest = Manifest.of([TensorMeta("a", "float32", (300, 7)), TensorMeta("b", "bfloat16", (5,))])
    plan = make_plan(manifest, [full_placement("rank/0", manifest)], [full_placement("r/0", manifest)], 4096)
    transport = TcpTransport()
    offers = {m: transport.offer(m) for m in ("rank/0", "r/0")}
    spec = ChannelSpec("c-1", "g", "tcp", b"k" * 32, ("rank/0",), ("r/0",), 4096, offers)
    ours = [torch.randn(300, 7), torch.randn(5).bfloat16()]
    theirs = [torch.zeros(300, 7), torch.zeros(5).bfloat16()]
    boxes = [tuple((0, d) for d in t.shape) for t in manifest]
    source = SourceSpans(plan, manifest, "rank/0", {i: (t, boxes[i]) for i, t in enumerate(ours)})
    sink = SinkSpans(plan, manifest, "r/0", {i: (t, boxes[i]) for i, t in enumerate(theirs)})
    sender, receiver = transport.open_sender(spec, "rank/0"), transport.open_receiver(spec, "r/0")
    for update in ("u-1", "u-2"):
        token, deadline = ArmToken(update, 1, 1), time.monotonic() + 20
        sender.arm(token, plan.buckets, deadline)
        receiver.arm(token, plan.buckets, deadline)

        def send() -> None:
            for bucket in plan.buckets:
                sender.send(bucket, source.spans(bucket))
            sender.flush()

        thread = threading.Thread(target=send)
        thread.start()
        for bucket in plan.buckets:
            receiver.receive(bucket, sink.spans(bucket))
            sink.complete(bucket)
        thread.join(20)
        assert [digest_tensor(t) for t in theirs] == [digest_tensor(t) for t in ours]
        ours[0].mul_(2)
    token = ArmToken("u-3", 1, 1)
    receiver.arm(token, plan.buckets, time.monotonic() + 20)
    sender.arm(token, plan.buckets, time.monotonic() + 20)
    sender.send(plan.buckets[0], source.spans(plan.buckets[0]))
    receiver.receive(plan.buckets[0], sink.spans(plan.buckets[0]))
    sender.close()
    with pytest.raises(PeerLost):
        receiver.receive(plan.buckets[1], sink.spans(plan.buckets[1]))
    receiver.close()
