"""Cases of kind control that are not critical, by id: versions, options, names, updates that are not whole."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from tests.cases.base import Even, Small, bits, differing, holds, site, soon
from tests.cases.cases_control import _Sleeper, at, breaks, read, small_trainer, values_of
from tests.inference_agent.trainer import Trainer
from tests.trainer_agent.fleet import fill, hook
from tests.transports.test_dtypes import filled
from weightplane.controlplane.core.manifest import DTYPE_BYTES
from weightplane.controlplane.core.reasons import Reason
from weightplane.controlplane.core.states import CachePolicy
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.trainer_agent.errors import PublishError, UpdateFailed, UpdateRefused
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource, StateDictSource
from weightplane.transports.base import ArmToken
from weightplane.transports.buckets import SourceSpans
from weightplane.transports.dtypes import dtype_of
from weightplane.v1 import agent_pb2, common_pb2, fleet_pb2, fleet_pb2_grpc, tensor_pb2, weight_transfer_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt


def fleet_of(publisher: Publisher) -> fleet_pb2_grpc.FleetServiceStub:
    """Calls of an operator, over a trainer's connection."""
    stub: fleet_pb2_grpc.FleetServiceStub = fleet_pb2_grpc.FleetServiceStub(publisher._hold.client._channel)
    return stub


def ask(kind: Any, **fields: Any) -> Any:
    return kind(request_id=uuid.uuid4().hex, group="g", **fields)


# --- versions and trainers


def test_C28_a_trainer_that_starts_again_from_nothing_never_takes_the_version_back() -> None:
    """It comes with a counter of its own at 0; versions are the control plane's, and what it resumes from is told."""
    with site("r0", make=Even) as f:
        module = Even()
        first = f.publisher(module, trainer_id="t")
        for step in range(50, 58):
            module.become(step)
            last = first.publish(step)
        first.close()
        again = f.publisher(module, trainer_id="t", resume_step=0)
        again.init()
        said = f.check_replica("r0", last.version)
        assert not said.routable, "what it serves is of a step that the trainer gave up"
        module.become(1)
        receipt = again.publish(0)
        assert receipt.version > last.version and receipt.lineage != last.lineage
        assert f.check_replica("r0", receipt.version).routable and read(f.engines["r0"]) == {1.0}
        assert f.state().committed.version == receipt.version


def test_C30_an_update_brings_what_the_source_holds_now_and_not_what_it_held_at_first() -> None:
    """The same source object, its memory changed in place, and then exchanged under the same names."""
    module = Small(1)
    state = {n: t.clone() for n, t in module.state_dict().items()}
    for source in (ModuleSource(module), StateDictSource(state)):
        with site("r0") as f:
            publisher = f.publisher(source)
            live = f.engines["r0"].modules[0].state_dict()
            for step in (1, 2, 3, 4):
                fill(module, step)
                for name, tensor in module.state_dict().items():
                    if step % 2:
                        state[name] = tensor.clone()
                    else:
                        state[name].copy_(tensor)
                publisher.publish(step)
                assert all(torch.equal(live[n], t) for n, t in module.state_dict().items()), step


def test_C60_the_chain_of_versions_shows() -> None:
    """Every update with its version, step, outcome and reason, newest last; each replica with what it holds and why."""
    with site("r0") as f:
        module = Small(1)
        publisher = f.publisher(module)
        receipts = [publisher.publish(step) for step in (10, 20)]
        with hook("replica.receive.inside", at(2, breaks)), pytest.raises(UpdateFailed) as failed:
            publisher.publish(30)
        receipts.append(publisher.publish(40))
        stub = fleet_of(publisher)
        chain = sorted(
            stub.ListUpdates(fleet_pb2.ListUpdatesRequest(group="g"), timeout=10).updates, key=lambda u: u.version
        )
        assert [(u.trainer_step, u.phase) for u in chain] == [(10, 5), (20, 5), (30, 7), (40, 5)]
        assert [u.version for u in chain if u.phase == 5] == [r.version for r in receipts]
        assert chain[2].failure.message and chain[2].update_id == failed.value.update_id
        assert "receiver broke" in chain[2].outcomes[0].failure.message, "in its own words, whoever was heard first"
        group = stub.GetGroup(fleet_pb2.GetGroupRequest(group="g"), timeout=10).group
        assert group.committed.version == receipts[-1].version and group.committed_step == 40
        assert group.manifest_id == receipts[-1].manifest_id and group.trainer.lineage == receipts[-1].lineage
        (replica,) = stub.ListReplicas(fleet_pb2.ListReplicasRequest(group="g"), timeout=10).replicas
        assert (replica.held.version, replica.lag, replica.routable) == (receipts[-1].version, 0, True)


# --- what a call says


@pytest.mark.parametrize(
    ("mode", "pause", "verify", "policy"),
    [("staged", "wait", "off", 1), ("in_place", "abort", "sampled", 1), ("in_place", "wait", "off", 1)],
)
def test_C32_options_other_than_the_defaults_are_in_force_as_they_were_given(
    mode: str, pause: str, verify: str, policy: int
) -> None:
    """The answer to StartUpdate echoes them, and what the replica was told and did is that."""
    with site("r0") as f:
        publisher = f.publisher(Small(1), mode=mode, pause=pause, verify=verify, commit_policy=policy, cache="clear")
        asked: list[Any] = []
        call = publisher._hold.client.call

        def noted(method: str, request: Any, *rest: Any, **more: Any) -> Any:
            answer = call(method, request, *rest, **more)
            if method == "StartUpdate":
                asked.append((request, answer))
            return answer

        publisher._hold.client.call = noted
        receipt = publisher.publish(1)
        ((request, answer),) = asked
        assert (answer.pause_mode, answer.cache_policy, answer.verify) == (
            getattr(common_pb2, f"PAUSE_MODE_{pause.upper()}"),
            common_pb2.CACHE_POLICY_CLEAR,
            getattr(common_pb2, f"VERIFY_LEVEL_{verify.upper()}"),
        )
        assert answer.commit_policy.at_least == policy and request.mode == answer.participants[0].mode
        assert [r.mode for r in receipt.replicas] == [mode.upper()]


def test_C63_dtypes_travel_under_canonical_names_and_another_is_refused() -> None:
    names = sorted(DTYPE_BYTES)
    assert {"float8_e4m3fn", "bfloat16", "bool", "int64"} <= set(names)

    def make() -> nn.Module:
        module = nn.Module()
        for name in names:
            module.register_buffer(f"t_{name}", torch.empty(4, 6, dtype=dtype_of(name)))
        return module

    with site("r0", make=make) as f:
        state = {f"t_{name}": filled(dtype_of(name), 4, 6) for name in names}
        publisher = f.publisher(StateDictSource(state))
        publisher.publish(1)
        live = dict(f.engines["r0"].modules[0].named_buffers())
        assert all(live[n].view(torch.uint8).equal(t.view(torch.uint8)) for n, t in state.items())
        assert [t.dtype for t in publisher.source.manifest()] == names
        stub = weight_transfer_pb2_grpc.WeightTransferServiceStub(publisher._hold.client._channel)
        for wrong in ("torch.float32", "float7", "Float", ""):
            entry = tensor_pb2.TensorMeta(name="w", dtype=wrong, shape=[2])
            request = wt.PutManifestRequest(
                request_id=wrong or "none", group="g", manifest_id=f"m-{'0' * 32}", total=1, tensors=[entry]
            )
            request.generation = f.state().trainer.generation
            with pytest.raises(grpc.RpcError) as caught:
                stub.PutManifest(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert repr(wrong) in str(caught.value.details()), caught.value.details()
        with pytest.raises(TypeError, match=r"'odd'.*quantised"):
            f.publisher(StateDictSource({"odd": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)})).init()


# --- updates that are not whole


def test_C40_memory_that_was_released_is_served_again_only_when_all_of_it_was_restored() -> None:
    """Two sub-models are released; an update that covers one is refused by the names of the other, and so is waking."""

    class Both(Even):
        def __init__(self) -> None:
            super().__init__()
            self.draft = nn.Parameter(torch.zeros(2048), requires_grad=False)

    with site() as f:
        engine = _Sleeper(Both())
        f.replica("r0", engine)
        whole = {n: torch.full_like(t, 3.0) for n, t in Both().state_dict().items()}
        publisher = f.publisher(StateDictSource(whole))
        stub = fleet_of(publisher)
        publisher.publish(1)
        stub.SleepReplica(ask(fleet_pb2.SleepReplicaRequest, replica_id="r0", level=2), timeout=10)
        stub.WakeReplica(ask(fleet_pb2.WakeReplicaRequest, replica_id="r0", tags=["weights"]), timeout=10)
        publisher.source = StateDictSource({n: t for n, t in whole.items() if n != "draft"})
        with pytest.raises(UpdateFailed, match="draft") as caught:
            publisher.publish(2)
        assert caught.value.reason is Reason.MANIFEST_MISMATCH
        with pytest.raises(grpc.RpcError):
            stub.WakeReplica(ask(fleet_pb2.WakeReplicaRequest, replica_id="r0"), timeout=10)
        stub.ResumeGeneration(ask(fleet_pb2.ResumeGenerationRequest), timeout=10)
        said = f.check_replica("r0")
        assert not said.ready and not said.routable and engine.holders(), said
        publisher.source = StateDictSource(whole)
        publisher.publish(3)
        stub.WakeReplica(ask(fleet_pb2.WakeReplicaRequest, replica_id="r0"), timeout=10)
        assert f.check_replica("r0").routable and not engine.holders()
        assert bool((engine.modules[0].get_parameter("draft") == 3).all())


def test_C41_a_part_over_a_base_is_refused_whole_and_changes_nothing() -> None:
    """SUBSET and DELTA are not built: a replica at another version is never patched; what is behind is sent it all."""
    with site("r0", make=Even) as f:
        module = Even()
        with small_trainer(f, module) as trainer:
            trainer.init()
            for k in (1, 2):
                module.become(k)
                done = trainer.publish(values_of(trainer, module), k)
            part = {"coverage": common_pb2.COVERAGE_SUBSET}
            delta = {"encoding": common_pb2.ENCODING_DELTA}
            base: dict[str, Any] = {"base": common_pb2.HeldVersion(version=1, update_id="u")}
            for options in (part, delta, part | base, delta | base, base):
                with pytest.raises(grpc.RpcError) as caught:
                    trainer.start(3, **options)
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, caught.value.details()
            assert f.state().open is None and f.state().committed.version == done.version
            assert read(f.engines["r0"]) == {2.0}
            f.replica("late", TorchModuleEngine(Even()))
            module.become(9)
            trainer.init()
            trainer.publish(values_of(trainer, module), 3)
            assert read(f.engines["late"]) == read(f.engines["r0"]) == {9.0}


def test_C42_an_update_that_is_called_full_and_is_not_is_refused_by_the_names_it_lacks() -> None:
    """A source that names only what changed; and one whose calls leave out a part of what was declared."""
    with site("r0") as f:
        module = Small(1)
        publisher = f.publisher(module)
        first = publisher.publish(1)
        before = bits(f.engines["r0"].modules[0])
        fill(module, 2)
        changed = {n: t for n, t in module.state_dict().items() if n.startswith("layers.1.")}
        publisher.source = StateDictSource(changed)
        with pytest.raises(UpdateFailed, match="7 missing") as caught:
            publisher.publish(2)
        assert "embed.weight" in str(caught.value) and caught.value.reason is Reason.MANIFEST_MISMATCH
        assert not differing(before, bits(f.engines["r0"].modules[0]))
        assert f.state().committed.version == first.version and f.check_replica("r0", first.version).routable
        publisher.close()
        with small_trainer(f, module) as trainer:
            trainer.init()
            with pytest.raises(grpc.RpcError) as refused:
                two_buckets_of(trainer, trainer.start(3), values_of(trainer, module))
                trainer.finish()
            assert refused.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, refused.value.details()
            assert "buckets" in str(refused.value.details()), refused.value.details()
        assert f.state().committed.version == first.version
        again = f.publisher(module, takeover=True)
        assert again.publish(4).ready == ("r0",) and holds(f.engines["r0"], module)


def two_buckets_of(trainer: Trainer, started: Any, values: dict[int, torch.Tensor]) -> None:
    """Declare and send the first two buckets, put every digest, and say no more."""
    (channel,), (said,) = trainer.channels, started.channels
    plan, held = trainer.plan(said.plan_id), trainer.placements[0]
    mine = {p.tensor: [(values[p.tensor], p.box)] for p in held.pieces}
    spans = SourceSpans(plan, trainer.manifest, "rank/0", mine)
    assert len(spans.buckets) > 2
    sender = trainer.sender(channel, "rank/0")
    sender.arm(ArmToken(trainer.update_id, trainer.epoch, trainer.generation), spans.buckets, time.monotonic() + 20)
    first = agent_pb2.BucketRange(channel_id=said.channel_id, first=0, count=2)
    trainer.ours("UpdateWeights", rank=0, seq=1, buckets=[first])
    for bucket in spans.buckets[:2]:
        sender.send(bucket, spans.spans(bucket))
    trainer.put_digests(0, plan, values)


def test_C49_an_engine_with_dummy_weights_serves_nothing_before_its_first_full_update() -> None:
    """However often generation is resumed; neither a router nor a client gets anything at step 0."""
    with site("r0") as f:
        engine, module = f.engines["r0"], Small(1)
        publisher = f.publisher(module)
        publisher.init()
        server = GenerateServer(engine, lambda *a, **k: [])
        try:
            for _ in range(2):
                resumed = fleet_of(publisher).ResumeGeneration(ask(fleet_pb2.ResumeGenerationRequest), timeout=10)
                assert not resumed.replicas[0].routable
                said = f.check_replica("r0")
                assert said.live and not said.ready and not said.routable and said.replica.held.version == 0, said
                assert "no update" in server.why_not()
            with hook("replica.receive.inside", at(2, breaks)), pytest.raises(UpdateFailed):
                publisher.publish(0)
            assert "no update" in server.why_not() and not f.check_replica("r0").ready, "a failed one is none"
            receipt = publisher.publish(0)
            assert not server.why_not() and f.check_replica("r0", receipt.version).routable
            assert holds(engine, module)
        finally:
            server._http.server_close()


def test_C29_a_newer_full_update_clears_what_a_failed_one_left_uncertain() -> None:
    """In place, so that it failed half-way in live memory: nobody has to repeat the version that failed."""
    with site("r0", staged=False, make=Even) as f:
        engine, module = f.engines["r0"], Even()
        publisher = f.publisher(module, mode="in_place")
        module.become(1)
        publisher.publish(1)
        module.become(5)
        with hook("replica.receive.inside", at(4, breaks)), pytest.raises(UpdateFailed):
            publisher.publish(5)
        soon("it is fenced", lambda: "dirty" in engine.holders())
        assert len(read(engine)) == 2, "half of it was written"
        module.become(6)
        receipt = publisher.publish(6)
        assert receipt.ready == ("r0",) and read(engine) == {6.0} and not engine.holders()
        assert f.check_replica("r0", receipt.version).routable and not engine.mixed()


# --- caches


def test_C57_a_cache_that_cannot_be_reset_while_requests_run_is_a_failure_and_said() -> None:
    running: list[threading.Event] = []

    def on_cache(policy: CachePolicy) -> None:
        if running:
            raise RuntimeError("blocks are in use by 1 running request")

    with site() as f:
        engine = TorchModuleEngine(Even(), on_cache=on_cache)
        f.replica("r0", engine)
        module = Even()
        publisher = f.publisher(module)
        module.become(1)
        publisher.publish(1)
        epoch = engine.cache_epoch
        with engine.request():
            running.append(threading.Event())
            receipt = publisher.publish(2, pause="keep")
            (said,) = receipt.replicas
            assert said.state == "DIRTY" and said.failure is not None and "blocks are in use" in said.failure.message
            assert engine.cache_epoch == epoch and receipt.ready == ()
            assert not f.check_replica("r0").routable and "dirty" in engine.holders()
        running.clear()
        module.become(3)
        assert publisher.publish(3).ready == ("r0",) and engine.cache_epoch > epoch


def test_C37_a_reset_without_an_implementation_is_refused_and_not_called_done() -> None:
    """An engine that can only clear is asked to keep or to salt: it is refused when the update starts."""
    with site("r0") as f:
        engine, module = f.engines["r0"], Small(1)
        publisher = f.publisher(module)
        publisher.publish(1)
        epoch = engine.cache_epoch
        for policy in ("keep", "salt"):
            with pytest.raises(PublishError) as caught:
                publisher.publish(2, cache=policy)
            assert caught.value.reason in (Reason.CAPABILITY, Reason.NOT_ENOUGH_REPLICAS), caught.value
            assert policy.upper() in str(caught.value) and isinstance(caught.value, UpdateRefused)
        assert engine.cache_epoch == epoch
        publisher.publish(3)
        assert engine.cache_epoch == epoch + 1
