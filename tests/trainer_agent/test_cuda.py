"""A source on a card: replayed, hashed where it lies, mirrored for host transports, waited for. Not yet run on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.trainer_agent.fleet import fleet, same
from tests.trainer_agent.test_replay import Trainer
from weightplane.controlplane.core.states import Verify
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.hashing import LaneHasher
from weightplane.trainer_agent.sources import StateDictSource

pytestmark = pytest.mark.gpu


def state() -> dict[str, torch.Tensor]:
    shapes = [(300, 500), (7,), (1 << 20,), (64, 64), ()]
    made = {f"t{i}": torch.randn(s, device="cuda").bfloat16() for i, s in enumerate(shapes)}
    made["turned"] = torch.randn(40, 70, device="cuda").t()
    return made


@pytest.mark.parametrize("bucket_bytes", [1 << 18, 1 << 16], ids=["leaf-aligned", "cut-anywhere"])
def test_lists_come_again_and_digests_are_the_hosts(bucket_bytes: int) -> None:
    values = state()
    trainer = Trainer(StateDictSource(values), bucket_bytes=bucket_bytes, kinds={"cuda"})
    first: dict[int, object] = {}
    for round_ in range(3):
        sending = trainer.publish()
        trainer.check(values)
        assert sending.mirrored == (0, 0.0)
        if round_:
            same_lists = [i for i in first if trainer.channel.lists[i] is first[i]]
            assert len(same_lists) >= len(first) - 2, "all but those that hold the strided tensor"
        first = dict(trainer.channel.lists)
        for t in values.values():
            t.add_(1)
    values["t0"] = torch.randn(300, 500, device="cuda").bfloat16()
    trainer.publish()
    trainer.check(values)
    trainer.publish(verify=Verify.SAMPLED)


def test_nothing_goes_bucket_by_bucket_when_all_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneHasher, "_hash", lambda *a: pytest.fail("hashed by the bucket"))
    values = {n: t for n, t in state().items() if n != "turned"}
    trainer = Trainer(StateDictSource(values), bucket_bytes=1 << 20, kinds={"cuda"})
    trainer.publish()
    trainer.check(values)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_host_transport_gets_a_mirror(buffered: bool) -> None:
    values = state()
    trainer = Trainer(StateDictSource(values), bucket_bytes=1 << 18, kinds={"cpu"}, buffered=buffered)
    for _ in range(2):
        sending = trainer.publish()
        assert all(s.device.type == "cpu" for spans in trainer.channel.lists.values() for s in spans)
        trainer.check(values)
        nbytes, seconds = sending.mirrored
        assert nbytes == sum(t.nbytes for t in values.values()) and seconds > 0
        for t in values.values():
            t.mul_(-1)


def test_what_the_callers_stream_has_queued_is_waited_for() -> None:
    """A stream of the caller's writes the weights, late; a publish that did not wait would send the old ones."""
    module = nn.Linear(512, 512, bias=False, device="cuda")
    replica = nn.Linear(512, 512, bias=False)
    stream = torch.cuda.Stream()
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(replica))
        publisher = f.publisher(module, bucket_bytes=1 << 20)
        with torch.cuda.stream(stream), torch.no_grad():
            for step in range(3):
                torch.cuda._sleep(200_000_000)  # about 0.1 s of the card's clock
                module.weight.fill_(step + 1)
                receipt = publisher.publish(step)
                assert set(replica.weight.flatten().tolist()) == {step + 1.0}
        assert receipt.metrics()["mirror_bytes"] == 512 * 512 * 4 and receipt.metrics()["mirror_s"] > 0
        assert same(f.engines["r0"], module.cpu())


def test_a_module_that_leaves_the_card_frees_its_memory_once_released() -> None:
    module = nn.Linear(4096, 4096, bias=False, device="cuda")
    with fleet() as f:
        f.replica("r0", TorchModuleEngine(nn.Linear(4096, 4096, bias=False)))
        publisher = f.publisher(module, bucket_bytes=1 << 24)
        publisher.publish(1)
        before = torch.cuda.memory_allocated()
        publisher.release()
        module.to("cpu")
        assert torch.cuda.memory_allocated() <= before - 4096 * 4096 * 4
        module.to("cuda")
        publisher.publish(2)
        assert same(f.engines["r0"], module.cpu())
