"""Faults of the product that the cases showed, each as small as it gets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.base import MOVERS, Small, site
from tests.core.test_dirty_joins import play
from weightplane.controlplane.core import events as ev
from weightplane.controlplane.core.group_state import GroupState
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import Held, Offer, Replica, Worker
from weightplane.controlplane.core.reasons import Failure, Reason
from weightplane.controlplane.core.states import Phase, Stage, Verify
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.base import EngineError
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import sending, sources
from weightplane.trainer_agent.sources import StateDictSource


def aborting() -> GroupState:
    """Two replicas in a transfer that a sender aborted, because it lost one of them."""
    state = GroupState("g", "c", 1)
    for name in ("r", "s"):
        worker = Worker(0, offers=(Offer("grpc"),))
        state = play(state, ev.ReplicaHello(1, Replica(name, "i", workers=(worker,))), said(name, 1, Stage.NONE))
    state = play(
        state,
        ev.InitTransfer("c1", 99.0, "q1", "job", "life", 0, 1, 0, "l", bytes(32), offers=(Offer("grpc"),)),
        ev.RankPlacement(1, 0, "m", "l"),
        ev.StartUpdate("c2", 99.0, "q2", 1, "m", 1, "u", verify=Verify.OFF),
        said("r", 2, Stage.JOINED),
        said("s", 2, Stage.JOINED),
        ev.UpdateWeights("c3", 99.0, 1, "u", 1, 0, 1),
        ev.AbortUpdate("c4", 99.0, 1, "u", "rank/0 cannot send: PeerLost: 'r/0' aborted its side", -1),
    )
    assert state.open is not None and state.open.phase is Phase.ABORTING
    return state


def said(name: str, sequence: int, stage: Stage, failure: Failure | None = None) -> ev.Report:
    update = "u" if stage else ""
    return ev.Report(name, "i", sequence, (Held(),), update_id=update, stage=stage, failure=failure)


def test_a_receivers_own_words_survive_the_abort_that_its_sender_sent_first() -> None:
    """C16, P01: the sender lost a receiver that broke, and its abort came before the receiver's report."""
    state = aborting()
    assert state.open is not None and state.open.failure is not None
    heard = state.open.failure
    state = play(
        state,
        said("r", 3, Stage.FAILED, Failure(Reason.ENGINE, "no room", "r")),
        said("s", 3, Stage.ABORTED, heard),
    )
    u = state.history["u"]
    assert u.phase is Phase.ABORTED and u.failure == heard
    assert u.parts["r"].failure == Failure(Reason.ENGINE, "no room", "r")
    assert u.parts["s"].failure is None, "it only heard of the abort"


def test_an_engine_whose_abort_raises_after_a_failed_apply_is_dirty_at_once() -> None:
    """T21: it stayed PENDING until the update's deadline."""

    class Hopeless(TorchModuleEngine):
        def apply(self, update_id: str) -> None:
            raise EngineError("device lost")

        def abort(self, update_id: str, wrote: bool, reason: str) -> None:
            if update_id:
                raise EngineError("device still lost")

    with site("r0") as f:
        f.replica("r1", Hopeless(Small()))
        receipt = f.publisher(Small(1)).publish(1)
        assert {r.replica_id: r.state for r in receipt.replicas} == {"r0": "READY", "r1": "DIRTY"}
        r1 = next(r for r in receipt.replicas if r.replica_id == "r1")
        assert r1.failure is not None and "device lost" in r1.failure.message
        assert not f.check_replica("r1").routable


def test_an_agent_whose_name_is_refused_says_so_when_it_is_made() -> None:
    """D04: the control plane refused its hello, and it dialled for ever."""
    for group, name, wrong in (("g", "", "replica_id"), ("g", "-r", "replica_id"), ("g h", "r", "group")):
        with pytest.raises(ValueError, match=rf"^{wrong}: expected 1 to 128 letters.* found '"):
            InferenceAgent("127.0.0.1:1", group, name, TorchModuleEngine(Small()))


def test_no_list_excuses_an_update_that_brings_nothing() -> None:
    """T14: with lists that allow every name, an update none of whose names matched committed as a new version."""
    engine = TorchModuleEngine(Small(), allow_extra=["*"], allow_missing=["*"])
    stranger = TensorMeta("adapter.weight", "float32", (2,))
    failure = engine.describe(Manifest.of([stranger]), ("r/0",)).failure("r")
    assert failure is not None and failure.reason is Reason.MANIFEST_MISMATCH and "adapter.weight" in failure.message
    known = TensorMeta("layers.0.bias", "float32", (32,))
    said = engine.describe(Manifest.of([stranger, known]), ("r/0",))
    assert not said.problems and said.ignored == ("adapter.weight",)


@pytest.mark.parametrize("transport", MOVERS)
def test_what_a_cast_makes_is_freed_while_the_update_goes_on(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """M08 looked for who holds it: all that was made for an update was held to its end, a whole model more."""
    cast: Callable[..., torch.Tensor] = sources.cast_to
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal most
        out = cast(*args)
        made.append(weakref.ref(out))
        most = max(most, sum(r() is not None for r in made))
        return out

    monkeypatch.setattr(sources, "cast_to", counted)
    monkeypatch.setattr(sending, "_RETAINED", 8 * 4096)
    state = {f"t{i}": torch.full((1024,), float(i), dtype=torch.float64) for i in range(64)}
    served = nn.Module()
    for name in state:
        served.register_buffer(name, torch.zeros(1024))
    with site("r0", make=lambda: served) as f:
        f.publisher(StateDictSource(state, cast=torch.float32), transport=transport, verify="off").publish(1)
    assert all(served.get_buffer(n).equal(t.float()) for n, t in state.items())
    assert len(made) >= 64 and most <= 20, f"{most} of {len(made)} at once"
