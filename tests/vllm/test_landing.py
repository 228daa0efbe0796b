"""In place on a card: tensors land in the same few pieces at each update, vLLM's thread takes copies. Played on CPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.placement import full_placement
from weightplane.controlplane.core.planner import make_plan
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.receipts import Ledger, WorkerPlan
from weightplane.inference_agent.threads import WorkThread
from weightplane.inference_agent.vllm_plugin.landing import Landing
from weightplane.inference_agent.vllm_plugin.stream import Stream, StreamWorker
from weightplane.transports.base import ChannelAborted

BUCKET = 4096
#: Several in a bucket, one that fills it, one that is larger, odd sizes, none at all.
SHAPES = {
    "a": (10, 20),
    "b": (7,),
    "big": (50, 60),
    "c": (32, 32),
    "none": (0, 4),
    "d": (3, 5),
    "e": (600,),
    "f": (500,),
}
MANIFEST = Manifest.of([TensorMeta(n, "float32", s) for n, s in SHAPES.items()])


class Channel:
    """Fills a bucket's spans from the trainer's tensors; remembers where they lay."""

    def __init__(self, plan: Any, sent: dict[str, torch.Tensor]) -> None:
        self.plan, self.sent = plan, sent
        self.memory: set[int] = set()
        self.spans: list[Any] = []

    def receive(self, bucket: Any, spans: Any) -> None:
        for s, span in zip(bucket.segments, spans, strict=True):
            source = self.sent[MANIFEST.tensors[self.plan.regions[s.region].tensor].name]
            span.copy_(source.flatten().view(torch.uint8)[s.offset : s.offset + s.nbytes])
            self.memory.add(span.untyped_storage().data_ptr())
        self.spans.append(spans)  # as transports do


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {n: torch.rand(s, generator=made) for n, s in SHAPES.items()}


def stream_of(landing: Landing | None) -> Stream:
    stream = Stream(1 << 30)
    stream.copies = landing is not None
    return stream


def receive(landing: Landing, sent: dict[str, torch.Tensor], slow: float = 0.0) -> tuple[dict[str, Any], Channel]:
    """One update; what the loaders were given, looked at only once all came."""
    placed = [full_placement(m, MANIFEST) for m in ("rank/0", "r/0")]
    plan = make_plan(MANIFEST, placed[:1], placed[1:], BUCKET)
    assert len(plan.buckets) > 4
    stream, channel, share = stream_of(landing), Channel(plan, sent), WorkerPlan(plan, MANIFEST, "r/0")
    names = lambda i: [MANIFEST.tensors[i].name]  # noqa: E731
    ledger = Ledger(share, "u", Verify.FULL, True)
    landing.begin(share)
    any_channel: Any = channel
    worker = StreamWorker(
        "r/0", WorkThread("t"), any_channel, share, 0, ledger, stream, names, channel_id="c", landing=landing
    )
    got: dict[str, Any] = {}

    def load() -> None:
        assert stream.enter()
        for name, tensor in stream:
            time.sleep(slow)
            got[name] = tensor
        stream.leave()

    thread = threading.Thread(target=load)
    thread.start()
    for bucket in share.buckets:
        worker.take(bucket)
    worker.finish()
    thread.join(10)
    assert not thread.is_alive() and not worker.missing()
    return got, channel


@pytest.mark.parametrize("slow", [0.0, 0.01])
def test_what_lands_is_what_was_sent_and_the_memory_is_the_same_at_each_update(slow: float) -> None:
    landing = Landing(torch.device("cpu"))
    memory: set[int] = set()
    for seed in range(3):
        sent = tensors(seed)
        got, channel = receive(landing, sent, slow)
        assert set(got) == set(sent)
        assert all(torch.equal(got[n], t) for n, t in sent.items())
        assert not memory or channel.memory == memory, "an update landed elsewhere than the one before"
        memory = channel.memory
    assert len(memory) == 3  # two pieces in turn, and one for the large tensor


def test_a_piece_is_not_used_again_before_it_was_copied() -> None:
    """The giver waits; an abort lets it go, and so does the deadline."""
    landing, stream = Landing(torch.device("cpu")), stream_of(Landing(torch.device("cpu")))
    assert stream.enter()
    for turn in range(2):
        made = landing.place(MANIFEST, [0], {0: MANIFEST.tensors[0].nbytes}, stream)
        stream.give("a", made[0])
        landing.given(stream.given, [0])
        assert stream.copied == 0, turn
    waited = threading.Thread(target=lambda: stream.wait_copied(1))
    waited.start()
    waited.join(0.2)
    assert waited.is_alive()
    assert next(iter(stream))[0] == "a"
    waited.join(5)
    assert not waited.is_alive()
    stream.deadline = time.monotonic() + 0.1
    with pytest.raises(Exception, match="deadline"):
        stream.wait_copied(2)
    stream.abort("the trainer is gone")
    with pytest.raises(ChannelAborted, match="the trainer is gone"):
        landing.place(MANIFEST, [0], {0: MANIFEST.tensors[0].nbytes}, stream)
