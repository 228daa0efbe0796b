"""The rules that a trainer of any language keeps (docs/clients.md), each shown on a ``Stage``; a violation is an
``AssertionError`` in words."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import grpc

from tests.clients.stage import RIVAL, Client, Stage, ended, in_thread
from tests.inference_agent.server import eventually
from weightplane.v1 import weight_transfer_pb2 as wt

__all__ = ["RULES"]

_LEASE_S = 8.0  # after its first call, in which a trainer's lease is seen
_SOON_S = 6.0  # in which a trainer that was told ends; it starts no process and moves nothing


def _within(seconds: float, look: Callable[[], object]) -> bool:
    end = time.monotonic() + seconds
    while not look() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(look())


def _committed(stage: Stage, client: Client, *more: str) -> None:
    code, said = client.publish(stage, *more)
    assert code == 0, f"it ended with {code}: {said[-500:]}"
    assert stage.plane.state().committed.version > 0


def order(stage: Stage, client: Client) -> None:
    """init, manifest, placement, start, update, digests, finish; and a lease, held while the update is open."""
    stage.stand_still("replica.arm.before")  # an update lasts here as long as its lease may take to be seen
    process = client.start(stage)
    _within(60, lambda: stage.calls or process.poll() is not None)  # its process starts
    held = _within(_LEASE_S, lambda: stage.leases)
    stage.go_on.set()
    code, said = ended(process, 60)
    assert held, f"no lease was held {_LEASE_S:g} s into the update"
    assert code == 0, f"it ended with {code}: {said[-500:]}"
    begins = {name: stage.named(name)[0].began for name in {c.name for c in stage.calls}}
    wanted = [
        "InitTransfer",
        "PutManifest",
        "PutPlacement",
        "StartUpdate",
        "UpdateWeights",
        "PutDigests",
        "FinishUpdate",
    ]
    missing = [name for name in wanted if name not in begins]
    assert not missing, f"it never called {missing}"
    found = sorted(wanted, key=begins.__getitem__)
    assert found == wanted, f"expected {wanted}, found {found}"
    put = max(c.ended for c in stage.named("PutDigests"))
    assert put <= begins["FinishUpdate"], "FinishUpdate was called before every digest was put"


def deadlines(stage: Stage, client: Client) -> None:
    """Every unary call has a deadline, of minutes at most."""
    _committed(stage, client)
    without = {c.name for c in stage.calls if c.deadline is None or c.deadline > 3600}
    assert not without, f"calls without a deadline: {sorted(without)}"


def arming(stage: Stage, client: Client) -> None:
    """No stream begins before UpdateWeights returned, however long the replica takes to arm."""
    stage.stand_still("replica.arm.before")
    process = client.start(stage)
    eventually(lambda: stage.named("UpdateWeights"), 30, "it declares its bytes")
    began = stage.named("UpdateWeights")[0].began
    eventually(lambda: time.monotonic() > began + 0.7, what="some time passes")
    early = len(stage.streams)
    stage.go_on.set()
    code, said = ended(process, 60)
    assert not early, "it began to send before UpdateWeights returned"
    assert code == 0 and stage.streams, said[-500:]


def content(stage: Stage, client: Client) -> None:
    """What is committed is the file's content, verified by digests."""
    _committed(stage, client)
    assert stage.holds("r0"), "the replica does not hold what the file does"


def abort(stage: Stage, client: Client) -> None:
    """An update that is aborted ends the trainer soon, unsuccessful and with the reason, though its bytes are stuck."""
    stage.stand_still("grpc.receive.inside", 2)
    process = client.start(stage)
    eventually(lambda: stage.streams, 30, "it sends")
    update = stage.plane.state().open
    assert update is not None
    with stage.stub() as stub:
        stub.AbortUpdate(
            wt.AbortUpdateRequest(request_id="a", group="g", update_id=update.update_id, reason="enough of it"),
            timeout=10,
        )
    code, said = ended(process, _SOON_S)
    assert code != 0, "it ended as if it had committed"
    assert "enough of it" in said, f"it does not say why: {said[-300:]}"


def repeats(stage: Stage, client: Client) -> None:
    """A StartUpdate whose answer was lost is made again with its request_id, so that it opens one update."""
    stage.lose["StartUpdate"] = 1
    _committed(stage, client)
    ids = {c.request.request_id for c in stage.named("StartUpdate") if not c.failed}
    assert len(ids) == 1, f"{len(ids)} request_ids for one update"
    assert stage.plane.state().committed.version == 1, "more than one update was opened"


def unknown(stage: Stage, client: Client) -> None:
    """A FinishUpdate whose answer was lost is unknown, not failed: it is asked for."""
    stage.lose["FinishUpdate"] = 1
    _committed(stage, client)


def fenced(stage: Stage, client: Client) -> None:
    """A trainer that another took the group from ends, and does not ask for it again."""
    stage.stand_still("grpc.receive.inside", 2)
    process = client.start(stage)
    eventually(lambda: stage.streams, 30, "it sends")
    with stage.stub() as stub:
        try:
            stage.rival(stub, takeover=True)
        except grpc.RpcError as e:  # it was fenced and back before the rival had its answer
            raise AssertionError(f"it took the group back: {e.details()}") from None
        asked = len(stage.named("InitTransfer"))
        code, said = ended(process, _SOON_S)
        assert code != 0, "it ended as if it had committed"
        assert len(stage.named("InitTransfer")) == asked, f"it asked for the group again: {said[-300:]}"
    trainer = stage.plane.state().trainer
    assert trainer is not None and trainer.trainer_id == RIVAL


def held(stage: Stage, client: Client) -> None:
    """A group that another trainer holds is left alone, unless --takeover says otherwise."""
    with stage.stub() as stub:
        generation = stage.rival(stub, takeover=False).generation
        lease = stub.WatchUpdate(wt.WatchUpdateRequest(group="g", generation=generation))
        next(iter(lease))
        code, said = client.publish(stage)
        assert code != 0 and stage.plane.state().committed.version == 0, "it took the group, unasked"
        assert RIVAL in said or "TRAINER_HELD" in said, f"it does not say who holds it: {said[-300:]}"
        _committed(stage, client, "--takeover")
        with contextlib.suppress(grpc.RpcError):
            lease.cancel()


def rebind(stage: Stage, client: Client) -> None:
    """A replica that came since InitTransfer takes part: the trainer binds again under its generation."""
    stage.before["PutPlacement"] = lambda: in_thread(lambda: stage.join("late"))
    _committed(stage, client)
    assert stage.holds("r0") and stage.holds("late"), "a replica was left out"
    later = stage.named("InitTransfer")[1:]
    assert later and all(c.request.generation == 1 for c in later), "it did not bind again under its generation"


def close(stage: Stage, client: Client) -> None:
    """A trainer that is done gives the group up: the next one need not wait for its lease to end."""
    _committed(stage, client)
    with stage.stub() as stub:
        try:
            stage.rival(stub, takeover=False)
        except grpc.RpcError as e:
            raise AssertionError(f"it kept the group: {e.details()}") from None


RULES: dict[str, Callable[[Stage, Client], None]] = {
    rule.__name__: rule
    for rule in (order, deadlines, arming, content, abort, repeats, unknown, fenced, held, rebind, close)
}
