"""A replica tells how its engine's settings compare with what its group declares: as it joins, on every session, when
the declaration changes, and, where a version is declared, when the engine holds another."""

from __future__ import annotations

import threading
from uuid import uuid4

import pytest
import torch
from torch import nn

from tests.inference_agent.server import Server, eventually
from weightplane.cli.client import connect
from weightplane.controlplane.core.members import routable
from weightplane.controlplane.core.model import Condition, Declaration
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent import ModuleSource, Publisher
from weightplane.v1 import common_pb2, fleet_pb2


class Judged(TorchModuleEngine):
    """Is of float32, whatever is declared; takes as long to say so as it is let."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.asked: list[Declaration] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
        self.asked.append(declared)
        assert self.may_answer.wait(30)
        wanted = declared.values.get("dtype", "float32")
        if wanted == "impossible":
            raise RuntimeError("no such dtype")
        same = wanted == "float32"
        return (Condition("Dtype", str(same), "Judged", f"float32, declared is {wanted}", "" if same else "--dtype"),)


def policy(plane: Server, **fields: object) -> None:
    request = fleet_pb2.UpdateGroupRequest(
        request_id=uuid4().hex,
        group="g",
        policy=fleet_pb2.GroupPolicy(**fields),  # type: ignore[arg-type]
    )
    with connect(plane.address, timeout=30) as c:
        c.fleet.UpdateGroup(request, timeout=30)


def told(plane: Server) -> dict[str, str]:
    r = plane.state().replicas.get("r0")
    return {c.type: c.status for c in r.conditions} if r is not None else {}


@pytest.mark.timeout(240)
def test_conditions_are_told_at_join_when_the_declaration_changes_and_to_a_coordinator_that_restarted() -> None:
    plane = Server().start()
    engine = Judged()
    agent = InferenceAgent(plane.address, "g", "r0", engine).start()
    try:
        eventually(lambda: told(plane) == {"Dtype": "True"}, 60, "told at join")
        assert len(engine.asked) == 1, "judged once"
        with Publisher(plane.address, "g", ModuleSource(nn.Linear(2, 2)), trainer_id="t") as publisher:
            assert publisher.publish(1).ready == ("r0",)
        policy(plane, declared={"dtype": "bfloat16"}, cache=common_pb2.CACHE_POLICY_KEEP, blocking=["Dtype"])
        eventually(lambda: told(plane) == {"Dtype": "False"}, 60, "judged anew")
        assert (engine.asked[-1].values, engine.asked[-1].cache) == ({"dtype": "bfloat16"}, "KEEP")
        state = plane.state()
        assert routable(state, state.replicas["r0"])[1:] == (
            False,
            False,
            "condition Dtype is False: float32, declared is bfloat16",
        )
        with connect(plane.address, timeout=30) as c:
            ask = fleet_pb2.ListReplicasRequest(group="g", conditions=True)
            (listed,) = c.fleet.ListReplicas(ask, timeout=30).replicas
            (plain,) = c.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(group="g"), timeout=30).replicas
        (condition,) = listed.conditions
        assert (condition.type, condition.status, condition.setting) == ("Dtype", 2, "--dtype")
        assert not plain.conditions and plain.reason == listed.reason
        plane.stop()
        plane.start()
        eventually(lambda: told(plane) == {"Dtype": "False"}, 60, "told again to who forgot it")
        assert plane.state().policy.blocking == ("Dtype",), "policies outlive the coordinator"
    finally:
        agent.stop()
        plane.close()


@pytest.mark.timeout(240)
def test_an_engine_that_is_slow_to_tell_holds_nothing_up_and_the_newest_declaration_counts() -> None:
    plane = Server().start()
    engine = Judged()
    engine.may_answer.clear()
    agent = InferenceAgent(plane.address, "g", "r0", engine).start()
    try:
        eventually(lambda: len(engine.asked) == 1, 60, "it is asked")
        with torch.no_grad(), Publisher(plane.address, "g", ModuleSource(nn.Linear(2, 2)), trainer_id="t") as publisher:
            assert publisher.publish(1).ready == ("r0",), "an update passes meanwhile"
        policy(plane, declared={"dtype": "bfloat16"})
        eventually(lambda: len(engine.asked) == 2, 60, "it is asked again")
        assert told(plane) == {}
        engine.may_answer.set()
        eventually(lambda: told(plane) == {"Dtype": "False"}, 60, "the newest")
        policy(plane, declared={"dtype": "impossible"})
        eventually(lambda: told(plane) == {"Audit": "Unknown"}, 60, "an audit that fails is told")
    finally:
        agent.stop()
        plane.close()


class Versioned(TorchModuleEngine):
    """Judges the version of its weights alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.asked = 0

    def conditions(self, declared: Declaration) -> tuple[Condition, ...]:
        self.asked += 1
        same = declared.values.get("weight_version", "") in ("", str(self.held()[0].version))
        return (Condition("WeightVersion", str(same), "Judged", "", "publish"),)


@pytest.mark.timeout(240)
def test_a_version_that_is_declared_is_judged_again_when_the_engine_holds_another() -> None:
    plane = Server().start()
    engine = Versioned()
    agent = InferenceAgent(plane.address, "g", "r0", engine).start()
    try:
        eventually(lambda: told(plane) == {"WeightVersion": "True"}, 60, "told at join")
        with Publisher(plane.address, "g", ModuleSource(nn.Linear(2, 2)), trainer_id="t") as publisher:
            assert publisher.publish(1).version == 1
            assert engine.asked == 1, "no version is declared: an update is no reason to ask an engine"
            policy(plane, declared={"weight_version": "2"}, blocking=["WeightVersion"])
            eventually(lambda: told(plane) == {"WeightVersion": "False"}, 60, "it holds 1")
            assert publisher.publish(2).version == 2
            eventually(lambda: told(plane) == {"WeightVersion": "True"}, 60, "it holds 2")
            assert publisher.publish(3).version == 3
            eventually(lambda: told(plane) == {"WeightVersion": "False"}, 60, "it holds 3")
    finally:
        agent.stop()
        plane.close()
