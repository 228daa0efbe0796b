"""The walk over every RPC finds each hole that is planted in the guard."""

from __future__ import annotations

import pickle  # noqa: TID251 - the defect
from pathlib import Path
from typing import Any

import pytest

from tests.security import test_hostile_names as hostile
from tests.server import test_authorisation, test_security
from weightplane.controlplane.server import fields, security
from weightplane.controlplane.server.authorisation import RPC_TABLE, Row
from weightplane.controlplane.server.identities import ANYONE, Identity, Role
from weightplane.controlplane.server.security import Authoriser

DRAIN = "/weightplane.v1.FleetService/DrainReplica"


def one_method_is_open(m: pytest.MonkeyPatch) -> None:
    """A sibling forgot its check: S03, S04."""
    admit = Authoriser.admit

    def holed(self: Authoriser, method: str, context: Any) -> Any:
        return (ANYONE, RPC_TABLE[method]) if method == DRAIN else admit(self, method, context)

    m.setattr(Authoriser, "admit", holed)
    m.setattr(Authoriser, "strange", lambda self, metadata: False)


def a_viewer_may_drain(m: pytest.MonkeyPatch) -> None:
    """A row says more than it should, and the server follows it: the copy that the test holds to is the contract's."""
    admit = Authoriser.admit

    def holed(self: Authoriser, method: str, context: Any) -> Any:
        identity = self.identify(context)
        return (identity, RPC_TABLE[method]) if identity.roles == {Role.VIEWER} else admit(self, method, context)

    m.setattr(Authoriser, "admit", holed)


def groups_are_not_looked_at(m: pytest.MonkeyPatch) -> None:
    m.setattr(Identity, "enter", lambda self, group, what: None)


@pytest.mark.parametrize("plant", [one_method_is_open, a_viewer_may_drain, groups_are_not_looked_at])
async def test_S03_S04_a_hole_in_the_guard_is_found(
    plant: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await test_authorisation.test_S03_S04_each_rpc_admits_its_roles_and_groups_and_no_other(caplog, capsys)


async def test_S01_a_field_that_is_unpickled_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fields.name

    def name(field: str, value: str) -> str:
        try:
            pickle.loads(value.encode())
        except Exception:
            pass
        return real(field, value)

    monkeypatch.setattr(fields, "name", name)
    with pytest.raises(AssertionError):
        await hostile.test_S01_a_pickle_in_any_field_or_in_place_of_any_message_runs_nothing(tmp_path)


async def test_S05_a_server_that_listens_anywhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "is_loopback", lambda address: True)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await test_security.test_an_open_address_is_refused_before_anything_happens()


def test_a_row_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RPC_TABLE, DRAIN)
    with pytest.raises(AssertionError):
        test_authorisation.test_S03_S04_the_table_has_a_row_for_every_rpc_and_no_other()
    monkeypatch.setitem(RPC_TABLE, DRAIN, Row(frozenset()))
    with pytest.raises(AssertionError):
        test_authorisation.test_S03_S04_the_table_has_a_row_for_every_rpc_and_no_other()
