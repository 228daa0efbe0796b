"""FleetService: policies, pauses, administrative states, lists."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.server.scripted import Replica, fleet, refused, server, until
from weightplane.controlplane.core.states import Admin
from weightplane.v1 import agent_pb2 as ag
from weightplane.v1 import common_pb2 as cm
from weightplane.v1 import fleet_pb2 as fl


async def test_groups_are_made_and_their_policies_replaced() -> None:
    async with server() as running, fleet(running.address, 0) as (trainer, _):
        fleet_ = trainer.fleet
        policy = fl.GroupPolicy(min_replicas=3, cache=cm.CACHE_POLICY_KEEP, failure=fl.FAILURE_POLICY_RETRY)
        request = fl.CreateGroupRequest(request_id="1", group="new", policy=policy)
        made = (await fleet_.CreateGroup(request, timeout=5)).group
        assert made.policy.min_replicas == 3 and made.policy.update_timeout_ms == 120_000
        assert made.policy.pause == cm.PAUSE_MODE_KEEP and made.committed_step == -1
        assert (await fleet_.CreateGroup(request, timeout=5)).group.policy == made.policy
        other = fl.CreateGroupRequest(request_id="2", group="new")
        await refused(fleet_.CreateGroup(other, timeout=5), "GROUP_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
        update = fl.UpdateGroupRequest(request_id="3", group="new", policy=fl.GroupPolicy(min_replicas=1))
        assert (await fleet_.UpdateGroup(update, timeout=5)).group.policy.cache == cm.CACHE_POLICY_CLEAR
        later = fl.UpdateGroupRequest(request_id="4", group="new", policy=fl.GroupPolicy(min_replicas=7))
        await fleet_.UpdateGroup(later, timeout=5)
        await fleet_.UpdateGroup(update, timeout=5)  # a late duplicate
        groups = (await fleet_.ListGroups(fl.ListGroupsRequest(), timeout=5)).groups
        assert [(g.group, g.policy.min_replicas) for g in groups] == [("g", 1), ("new", 7)]
        reused = fl.UpdateGroupRequest(request_id="4", group="new", policy=fl.GroupPolicy(min_replicas=9))
        await refused(fleet_.UpdateGroup(reused, timeout=5), "REQUEST_ID_REUSED")


async def test_a_policy_that_goes_on_stale_says_how_often() -> None:
    async with server() as running, fleet(running.address, 0) as (trainer, _):
        policy = fl.GroupPolicy(failure=fl.FAILURE_POLICY_CONTINUE_STALE)
        create = fl.CreateGroupRequest(request_id="1", group="new", policy=policy)
        await refused(trainer.fleet.CreateGroup(create, timeout=5), "INVALID_ARGUMENT")
        update = fl.UpdateGroupRequest(request_id="2", group="g", policy=policy)
        await refused(trainer.fleet.UpdateGroup(update, timeout=5), "INVALID_ARGUMENT")
        policy.max_stale_versions = 1
        update = fl.UpdateGroupRequest(request_id="3", group="g", policy=policy)
        assert (await trainer.fleet.UpdateGroup(update, timeout=5)).group.policy.max_stale_versions == 1


def pausing(replica: Replica) -> asyncio.Task[None]:
    """An engine that does as the desired state says."""

    async def obey() -> None:
        last: list[object] = []
        while True:
            newest = replica.seen[-1] if replica.seen else ag.DesiredReplica()
            wanted: list[object] = [*newest.pause_holders, newest.sleep.order]
            if wanted != (last or [0]):
                last, asleep = wanted, list(newest.sleep.asleep)
                holders = [*newest.pause_holders, *(["sleep"] if asleep else [])]
                await replica.send_report(pause_holders=holders, asleep=asleep, sleep_order=newest.sleep.order)
            await asyncio.sleep(0.01)

    return asyncio.create_task(obey())


async def test_pauses_are_counted_by_holder_and_answer_when_in_force() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, replicas):
        await trainer.publish()
        request = fl.PauseGenerationRequest(request_id="p", group="g")
        await refused(trainer.fleet.PauseGeneration(request, timeout=2), "DEADLINE")
        obeying = [pausing(r) for r in replicas]
        paused = await trainer.fleet.PauseGeneration(request, timeout=5)
        assert [list(r.pause_holders) for r in paused.replicas] == [["operator"]] * 2
        assert not paused.replicas[0].routable and "operator" in paused.replicas[0].reason
        also = fl.PauseGenerationRequest(
            request_id="q", group="g", replica_ids=["r0"], holder="trainer", mode=cm.PAUSE_MODE_ABORT
        )
        await trainer.fleet.PauseGeneration(also, timeout=5)
        assert replicas[0].seen[-1].pause_mode == cm.PAUSE_MODE_ABORT
        resume = fl.ResumeGenerationRequest(request_id="r", group="g")
        resumed = await trainer.fleet.ResumeGeneration(resume, timeout=5)
        assert [list(r.pause_holders) for r in resumed.replicas] == [["trainer"], []]
        await trainer.fleet.PauseGeneration(request, timeout=5)  # a late duplicate pauses nothing
        assert not (await trainer.fleet.ResumeGeneration(resume, timeout=5)).replicas[1].pause_holders
        state = running.coordinator.group("g").state
        assert not state.replicas["r1"].pauses_wanted
        unsupported = fl.PauseGenerationRequest(request_id="w", group="g", mode=cm.PAUSE_MODE_WAIT)
        await refused(trainer.fleet.PauseGeneration(unsupported, timeout=5), "CAPABILITY")
        somebody = fl.PauseGenerationRequest(request_id="s", group="g", holder="somebody")
        await refused(trainer.fleet.PauseGeneration(somebody, timeout=5), "INVALID_ARGUMENT")
        nobody = fl.PauseGenerationRequest(request_id="n", group="g", replica_ids=["r9"])
        await refused(trainer.fleet.PauseGeneration(nobody, timeout=5), "UNKNOWN_REPLICA")
        for task in obeying:
            task.cancel()


async def test_administrative_states() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, _):
        group = running.coordinator.group("g")
        names: dict[str, Any] = {"group": "g", "replica_id": "r0"}
        stub = trainer.fleet
        pin = fl.PinReplicaRequest(request_id="1", **names)
        await refused(stub.PinReplica(pin, timeout=5), "WRONG_PHASE", grpc.StatusCode.FAILED_PRECONDITION)
        await trainer.publish()
        pinned = (await stub.PinReplica(pin, timeout=5)).replica
        assert pinned.admin == fl.ADMIN_STATE_PINNED and pinned.pinned_version == 1
        info = await trainer.publish()
        assert [o.replica_id for o in info.outcomes] == ["r1"]
        listed = (await stub.ListReplicas(fl.ListReplicasRequest(group="g"), timeout=5)).replicas
        assert [(r.replica_id, r.held.version, r.lag) for r in listed] == [("r0", 1, 1), ("r1", 2, 0)]
        activate = fl.ActivateReplicaRequest(request_id="2", **names)
        await refused(stub.ActivateReplica(activate, timeout=5), "WRONG_PHASE")
        await stub.UnpinReplica(fl.UnpinReplicaRequest(request_id="3", **names), timeout=5)
        drain = fl.DrainReplicaRequest(request_id="4", **names)
        assert (await stub.DrainReplica(drain, timeout=5)).replica.admin == fl.ADMIN_STATE_DRAINING
        await stub.DrainReplica(drain, timeout=5)
        await refused(stub.UnpinReplica(fl.UnpinReplicaRequest(request_id="5", **names), timeout=5), "WRONG_PHASE")
        again = fl.PinReplicaRequest(request_id="7", **names)  # its unpin would end the drain
        error = await refused(stub.PinReplica(again, timeout=5), "WRONG_PHASE", grpc.StatusCode.FAILED_PRECONDITION)
        assert "DRAINING" in str(error.details()) and "activate it first" in str(error.details())
        await stub.ActivateReplica(fl.ActivateReplicaRequest(request_id="6", **names), timeout=5)
        await until(lambda: group.state.replicas["r0"].admin is Admin.ACTIVE, "ACTIVE")
        await stub.DrainReplica(drain, timeout=5)  # a late duplicate drains nothing
        assert group.state.replicas["r0"].admin is Admin.ACTIVE
        assert len((await trainer.publish()).outcomes) == 2


async def test_a_sleeping_replica_joins_no_update_and_wakes_in_two_steps() -> None:
    async with server() as running, fleet(running.address, 2) as (trainer, replicas):
        obeying = pausing(replicas[0])
        names: dict[str, Any] = {"group": "g", "replica_id": "r0"}
        stub = trainer.fleet
        await trainer.publish()
        asleep = (await stub.SleepReplica(fl.SleepReplicaRequest(request_id="1", **names), timeout=5)).replica
        assert asleep.admin == fl.ADMIN_STATE_ASLEEP and list(asleep.asleep) == ["weights", "kv_cache"]
        assert list(asleep.pause_holders) == ["sleep"] and not asleep.routable and asleep.may_not_join == "it is ASLEEP"
        assert replicas[0].seen[-1].sleep.level == 1
        assert [o.replica_id for o in (await trainer.publish()).outcomes] == ["r1"]
        await stub.SleepReplica(fl.SleepReplicaRequest(request_id="2", **names), timeout=5)
        deeper = fl.SleepReplicaRequest(request_id="3", level=2, **names)
        await refused(stub.SleepReplica(deeper, timeout=5), "WRONG_PHASE", grpc.StatusCode.FAILED_PRECONDITION)
        for call in (
            stub.ActivateReplica(fl.ActivateReplicaRequest(request_id="4", **names), timeout=5),
            stub.DrainReplica(fl.DrainReplicaRequest(request_id="5", **names), timeout=5),
            stub.WakeReplica(fl.WakeReplicaRequest(request_id="6", tags=["kv_cache"], **names), timeout=5),
        ):
            await refused(call, "WRONG_PHASE", grpc.StatusCode.FAILED_PRECONDITION)
        unknown = fl.WakeReplicaRequest(request_id="7", tags=["dreams"], **names)
        await refused(stub.WakeReplica(unknown, timeout=5), "INVALID_ARGUMENT")
        half = fl.WakeReplicaRequest(request_id="8", tags=["weights"], **names)
        woken = (await stub.WakeReplica(half, timeout=5)).replica
        assert woken.admin == fl.ADMIN_STATE_ACTIVE and list(woken.asleep) == ["kv_cache"] and not woken.routable
        await until(lambda: not running.coordinator.group("g").state.open, "the update before is over")
        awake = (await stub.WakeReplica(fl.WakeReplicaRequest(request_id="9", **names), timeout=5)).replica
        assert not awake.asleep and not awake.pause_holders and awake.lag == 1
        await stub.WakeReplica(half, timeout=5)  # a late duplicate wakes nothing
        assert len((await trainer.publish()).outcomes) == 2
        obeying.cancel()


async def test_updates_are_listed_newest_first_in_pages() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):
        for _ in range(5):
            await trainer.publish()
        await trainer.start()
        versions: list[int] = []
        token, pages = "", 0
        while True:
            request = fl.ListUpdatesRequest(group="g", page_size=2, page_token=token)
            answer = await trainer.fleet.ListUpdates(request, timeout=5)
            versions.extend(u.version for u in answer.updates)
            token, pages = answer.next_page_token, pages + 1
            if not token:
                break
        assert versions == [6, 5, 4, 3, 2, 1] and pages == 3
        for token in ("x", "\u00b2", "-1", "9" * 5000):
            bad = fl.ListUpdatesRequest(group="g", page_token=token)
            await refused(trainer.fleet.ListUpdates(bad, timeout=5), "INVALID_ARGUMENT")


async def test_three_answers_about_a_replica() -> None:
    async with server() as running, fleet(running.address, 1) as (trainer, _):

        async def check(**fields: Any) -> tuple[bool, bool, bool]:
            request = fl.CheckReplicaRequest(group="g", replica_id="r0", **fields)
            answer = await trainer.fleet.CheckReplica(request, timeout=5)
            assert answer.routable or answer.reason
            return answer.live, answer.ready, answer.routable

        assert await check() == (True, False, False)
        await trainer.publish()
        assert await check() == (True, True, True)
        assert await check(min_version=2) == (True, True, False)


async def test_labels_select() -> None:
    async with server() as running:
        from tests.server.scripted import Trainer

        replicas = [Replica(running.address, f"r{i}") for i in range(2)]
        replicas[1].hello.labels["zone"] = "b"
        for r in replicas:
            await r.start()
        trainer = Trainer(running.address)
        await trainer.init()
        await trainer.put_manifest()
        listed = fl.ListReplicasRequest(group="g", selector={"zone": "b"})
        assert [r.replica_id for r in (await trainer.fleet.ListReplicas(listed, timeout=5)).replicas] == ["r1"]
        u = await trainer.start(replica_selector={"zone": "b"})
        assert [p.replica_id for p in u.participants] == ["r1"] and u.absent[0].replica_id == "r0"
        for r in replicas:
            await r.kill()
