"""``weightplane status``: what one cell says of a replica."""

from __future__ import annotations

import pytest

from weightplane.cli import fleet
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import update_pb2 as up


@pytest.mark.parametrize(
    ("changed", "cell"),
    [
        ({}, "yes"),
        (
            {"liveness": fl.LIVENESS_SUSPECT, "may_not_join": "it is silent"},
            "yes, but joins no update: it is silent",
        ),
        ({"may_not_join": "its process is stopped"}, "yes, but joins no update: its process is stopped"),
        ({"admin": fl.ADMIN_STATE_PINNED, "may_not_join": "it is PINNED"}, "yes"),
        (
            {"admin": fl.ADMIN_STATE_PINNED, "may_not_join": "its process is stopped"},
            "yes, but joins no update: its process is stopped",
        ),
        ({"weights": up.WEIGHTS_STATE_UPDATING, "may_not_join": "it is UPDATING in another update"}, "yes"),
        (
            {"weights": up.WEIGHTS_STATE_DIRTY, "routable": False, "reason": "its weights are DIRTY"},
            "no: its weights are DIRTY: publish again, a full update heals it",
        ),
        ({"routable": False, "reason": "its lease ended", "may_not_join": "its lease ended"}, "no: its lease ended"),
    ],
)
def test_the_cell_says_what_keeps_a_replica_from_requests_or_updates_and_what_mends_it_and_nothing_twice(
    changed: dict[str, object], cell: str
) -> None:
    serves = {"weights": up.WEIGHTS_STATE_READY, "liveness": fl.LIVENESS_LIVE, "admin": fl.ADMIN_STATE_ACTIVE}
    info = fl.ReplicaInfo(**{"replica_id": "r0", "routable": True, **serves, **changed})  # type: ignore[arg-type]
    assert fleet._routable(info) == cell
