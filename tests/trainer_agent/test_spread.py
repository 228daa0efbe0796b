"""One update over several transports at once, also within one replica: real agents, real transports, one commit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch import nn

from tests import warm
from tests.inference_agent.models import manifest_of
from tests.inference_agent.trainer import Trainer as Caller
from tests.inference_agent.trainer import state_of
from tests.trainer_agent.fleet import Fleet, eventually, fill, fleet, hook
from tests.trainer_agent.spread import LyingGrpc, Model, spread
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import Mode, Phase, Weights
from weightplane.inference_agent import transfer
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.transports.base import Transport
from weightplane.transports.dtypes import as_bytes

FAR = "ucx"  # how the other replica is reached


@pytest.fixture
def f() -> Iterator[Fleet]:
    with fleet() as f:
        yield f


def holds(engine: TorchModuleEngine, module: nn.Module) -> bool:
    """Whether every worker of an engine holds the module's bytes."""
    want = module.state_dict(keep_vars=True)
    live = [m.state_dict(keep_vars=True) for m in engine.modules]
    return all(as_bytes(w[k]).equal(as_bytes(v)) for w in live for k, v in want.items())


def three_ways(f: Fleet, grpc: Transport | None = None, staged: bool = True) -> None:
    """``spread`` by shm and grpc, as ``staged`` says, beside the other two."""
    f.replica("spread", TorchModuleEngine([Model(), Model()], staged=staged), transports=spread(grpc))
    two_others(f)


def two_others(f: Fleet) -> None:
    """``far`` by ucx, ``near`` by shm."""
    f.replica("far", TorchModuleEngine(Model()), transports=[FAR])
    f.replica("near", TorchModuleEngine(Model()), transports=["shm"])


def reached(f: Fleet) -> dict[str, str]:
    """Each member's transport, as bound."""
    return {member: c.transport for c in f.state().trainer.channels for member in c.receivers}


ALL_WAYS = {"spread/0": "shm", "spread/1": "grpc", "far/0": FAR, "near/0": "shm"}


@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_one_update_over_three_transports_commits_once_and_bit_exact(f: Fleet, mode: str, verify: str) -> None:
    three_ways(f)
    source = Model()
    publisher = f.publisher(source, transport="", mode=mode, verify=verify)
    for step in (1, 2, 3):
        fill(source, step)
        receipt = publisher.publish(step)
        assert receipt.version == step and receipt.committed, "one version a publish, whatever carried it"
        assert {r.replica_id: (r.state, r.mode) for r in receipt.replicas} == {
            name: ("READY", mode.upper()) for name in ("spread", "far", "near")
        }
        for engine in f.engines.values():
            assert holds(engine, source)
            assert set(engine.held()) == {Held(receipt.version, receipt.update_id)}
    assert reached(f) == ALL_WAYS
    u = f.state().history[receipt.update_id]
    assert u.phase is Phase.COMMITTED and len(u.calls) == 1 and len(u.channels) == 3
    got = {r.replica_id: r.bytes_received for r in receipt.replicas}
    assert got["spread"] == 2 * got["far"] == 2 * got["near"]


def test_a_replica_spread_over_two_channels_in_place_waits_for_the_staged_ones(f: Fleet) -> None:
    three_ways(f, staged=False)
    source = Model()
    publisher = f.publisher(source, transport="", mode="staged")
    order: list[str] = []
    engine = f.engines["spread"]
    writing = engine.writing

    def observed(update_id: str) -> None:
        order.append(staged_votes(f))
        writing(update_id)

    engine.writing = observed  # type: ignore[method-assign]
    for step in (1, 2):
        fill(source, step)
        receipt = publisher.publish(step)
        assert {r.replica_id: r.mode for r in receipt.replicas} == {
            "spread": "IN_PLACE",
            "far": "STAGED",
            "near": "STAGED",
        }
        assert all(holds(e, source) for e in f.engines.values())
    assert order == ["far near", "far near"], "live parameters are written once every staged replica has voted"
    u = f.state().history[receipt.update_id]
    modes = {c.channel_id: c.modes for c in f.state().trainer.channels}
    assert [{modes[c] for c, _, _ in call.ranges} for call in u.calls] == [
        {(Mode.STAGED, Mode.IN_PLACE)},
        {(Mode.IN_PLACE,)},
    ], "no channel mixes modes"


@pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
def test_a_call_for_each_channel_moves_one_workers_bytes_after_the_other(f: Fleet, mode: Mode) -> None:
    """While the second worker receives in a call of its own, the first has nothing to arm, and its channel rests."""
    three_ways(f)
    source = Model()
    manifest = manifest_of(source)
    params = source.state_dict()
    values = {i: params[t.name].detach() for i, t in enumerate(manifest) if manifest.root(i) == i}
    with Caller(f.address, manifest, bucket_bytes=4096) as caller:
        caller.init()
        for step in (1, 2):
            fill(source, step)
            started = caller.start(step, mode=mode)
            assert len(started.channels) == 3
            caller.send(started, values, apart=True)
            done = caller.finish()
            assert done.version == step and {state_of(o) for o in done.outcomes} == {"READY"}
            assert all(holds(e, source) for e in f.engines.values())
    u = f.state().history[done.update_id]
    assert [len(c.ranges) for c in u.calls] == [1, 1, 1]


def staged_votes(f: Fleet) -> str:
    u = f.state().open
    return " ".join(sorted(p.replica_id for p in u.parts.values() if p.mode is Mode.STAGED and p.verified))


def untouched(f: Fleet, before: nn.Module, version: int) -> bool:
    """Whether every replica still holds and serves what it did."""
    return all(holds(e, before) and e.held()[0].version == version for e in f.engines.values())


def test_a_lie_on_one_channel_aborts_all_staged_and_nobody_changes(f: Fleet) -> None:
    grpc = LyingGrpc()
    three_ways(f, grpc)
    source, before = Model(), Model()
    fill(source, 1)
    fill(before, 1)
    publisher = f.publisher(source, transport="")
    publisher.publish(1)
    fill(source, 2)
    grpc.lying = True
    with pytest.raises(UpdateFailed) as caught:
        publisher.publish(2)
    assert caught.value.reason is Reason.DIGEST_MISMATCH and "spread/1" in str(caught.value)
    assert untouched(f, before, 1)
    grpc.lying = False
    assert publisher.publish(3).committed and all(holds(e, source) for e in f.engines.values())
    assert reached(f) == ALL_WAYS


def test_a_lie_on_one_channel_in_place_leaves_that_replica_fenced_until_the_next_update(f: Fleet) -> None:
    grpc = LyingGrpc()
    three_ways(f, grpc, staged=False)
    source, before = Model(), Model()
    fill(source, 1)
    fill(before, 1)
    publisher = f.publisher(source, transport="", mode="staged")
    publisher.publish(1)
    fill(source, 2)
    grpc.lying = True
    with pytest.raises(UpdateFailed, match="spread/1"):
        publisher.publish(2)
    assert f.agents["spread"].status().dirty and "dirty" in f.engines["spread"].holders()
    assert f.state().replicas["spread"].weights is Weights.DIRTY
    assert all(holds(f.engines[n], before) and f.engines[n].held()[0].version == 1 for n in ("far", "near"))
    grpc.lying = False
    assert publisher.publish(3).committed and all(holds(e, source) for e in f.engines.values())
    assert not f.engines["spread"].holders()


@pytest.mark.parametrize("policy", ["all", "at_least"])
def test_a_death_on_one_channel_aborts_all_or_excludes_the_whole_replica(f: Fleet, policy: str) -> None:
    """A process of two workers dies while its second receives by grpc; its first, by shm, had its bytes or not."""
    two_others(f)
    env = {**os.environ, "WEIGHTPLANE_FAILPOINTS": "grpc.receive.inside=kill@12", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trainer_agent.spread", f.address, "mortal"]
    with warm.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            eventually(
                lambda: "mortal" in (s := f.state().replicas) and s["mortal"].reported, 60, "the process is here"
            )
            source, before = Model(), Model()
            fill(source, 1)
            fill(before, 1)
            publisher = f.publisher(source, transport="")
            publisher.publish(1)
            assert reached(f)["mortal/0"] == "shm" and reached(f)["mortal/1"] == "grpc"
            fill(source, 2)
            began = time.monotonic()
            if policy == "all":
                with pytest.raises(UpdateFailed) as caught:
                    publisher.publish(2)
                assert "mortal" in str(caught.value)
                assert untouched(f, before, 1)
            else:
                receipt = publisher.publish(2, commit_policy=2)
                states = {r.replica_id: r.excluded for r in receipt.replicas}
                assert states == {"mortal": True, "far": False, "near": False}
                assert all(holds(e, source) for e in f.engines.values())
            assert process.wait(10) == -9 and time.monotonic() - began < 15
        finally:
            process.kill()
    assert publisher.publish(3).committed and all(holds(e, source) for e in f.engines.values())


# --- planted --------------------------------------------------------------------------------------------------------


def test_planted_a_worker_whose_channel_is_never_armed_is_found(f: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arming stops at the workers of the first channel: the update does not commit, and says so in time."""
    three_ways(f)
    arm = transfer.Transfer.arm

    def first_only(self: transfer.Transfer, seq: int) -> None:
        everyone, self.workers = self.workers, [w for w in self.workers if w.channel_id == self.workers[0].channel_id]
        arm(self, seq)
        self.workers = everyone

    monkeypatch.setattr(transfer.Transfer, "arm", first_only)
    source = Model()
    publisher = f.publisher(source, transport="", update_timeout=6.0)
    with pytest.raises(UpdateFailed) as caught:
        publisher.publish(1)
    assert "spread" in str(caught.value)
    assert f.state().committed.version == 0
    monkeypatch.undo()
    assert publisher.publish(2, update_timeout=30.0).committed


def test_planted_a_replica_that_votes_for_one_channels_bytes_is_found(
    f: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receiving stops at the first channel's workers: no vote without the plan's bytes of the others."""
    three_ways(f)
    receive = transfer.Transfer.receive

    def first_only(self, engine, progress):
        everyone, self.workers = self.workers, [w for w in self.workers if w.channel_id == self.workers[0].channel_id]
        receive(self, engine, progress)
        self.workers = everyone

    monkeypatch.setattr(transfer.Transfer, "receive", first_only)
    publisher = f.publisher(Model(), transport="", update_timeout=8.0)
    with pytest.raises(UpdateFailed) as caught:
        publisher.publish(1)
    assert "spread/1" in str(caught.value) and "missing" in str(caught.value)
    assert f.state().committed.version == 0


def test_the_channels_of_an_abandoned_update_are_not_used_again(f: Fleet) -> None:
    three_ways(f)
    publisher = f.publisher(Model(), transport="")
    publisher.publish(1)
    before = {c.channel_id for c in f.state().trainer.channels}

    def fail(n: int) -> None:
        if n == 3:
            raise RuntimeError("planted")

    with hook("grpc.receive.inside", fail), pytest.raises(UpdateFailed, match="spread"):
        publisher.publish(2)
    assert publisher.publish(3).committed
    assert not before & {c.channel_id for c in f.state().trainer.channels}, "rule 9: also those of the other transports"
    assert reached(f) == ALL_WAYS
