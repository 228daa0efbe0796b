"""A lost write-ahead log is noticed by the mark beside it; a mark that says nothing stands in nobody's way."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.helpers import Desk, committed, desk, reopen, rival, state, trainer, update
from weightplane.controlplane.core.model import Held
from weightplane.controlplane.core.states import Admin
from weightplane.controlplane.store import StoreError, mark


def opened(path: Path) -> Desk:
    return desk(lambda: rival(path))


def publish(d: Desk, version: int) -> None:
    u = update(version, d.epoch)
    assert d.freeze(u) and d.decide(u) and d.close(committed(u))


def left_behind(path: Path, to: Path, *suffixes: str) -> Path:
    """The files as a SIGKILL would leave them, those named."""
    to.mkdir()
    for suffix in suffixes:
        shutil.copy(f"{path}{suffix}", to / f"{path.name}{suffix}")
    return to / path.name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def _grant(d: Desk) -> None:
    assert d.group(state(d.epoch, trainer=trainer(1), last_generation=1))


def _freeze(d: Desk) -> None:
    assert d.freeze(update(2, d.epoch))


def _decide(d: Desk) -> None:
    _freeze(d)
    assert d.decide(update(2, d.epoch))


@pytest.mark.parametrize("lost", [_grant, _freeze, _decide, lambda d: opened(d.store.path)])
def test_a_lost_log_is_refused_by_name_and_the_file_left_as_it_was(
    lost: Callable[[Desk], None], path: Path, tmp_path: Path
) -> None:
    d = opened(path)
    publish(d, 1)
    d.store.close()  # all of it is in the file
    d = opened(path)
    before = left_behind(path, tmp_path / "before", "", "-wal", "-mark")
    lost(d)
    whole = left_behind(path, tmp_path / "whole", "", "-wal", "-mark")
    without = left_behind(path, tmp_path / "without", "", "-mark")
    old = without.read_bytes()
    with pytest.raises(StoreError, match=r"older than what was written.*store\.db-wal\) is lost.*was left as it is"):
        rival(without).open()
    assert without.read_bytes() == old
    reopen(lambda: rival(whole))
    reopen(lambda: rival(before))
    Path(f"{without}-mark").unlink()  # as it was told: go on without what is missing
    assert reopen(lambda: rival(without)).state.committed == Held(1, "u1")


def test_an_older_copy_put_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    d = opened(path)
    publish(d, 1)
    d.store.close()
    shutil.copy(path, tmp_path / "backup.db")
    d = opened(path)
    publish(d, 2)
    path = left_behind(path, tmp_path / "restored", "-mark")
    shutil.copy(tmp_path / "backup.db", path)
    with pytest.raises(StoreError, match="an older copy was put in its place"):
        rival(path).open()


def test_a_clean_close_leaves_no_mark_and_one_of_another_leader_stays(path: Path) -> None:
    old, new = opened(path), opened(path)
    publish(new, 1)
    old.store.close()
    assert Path(f"{path}-mark").exists()
    new.store.close()
    assert [p.name for p in path.parent.iterdir()] == ["store.db"]


@pytest.mark.parametrize("text", [b"", b"weightplane 1 x", b"\xff" * 90, b"weightplane 1 " + b"0" * 32 + b" 9 9 0\n"])
def test_a_torn_mark_says_nothing(text: bytes, path: Path) -> None:
    d = opened(path)
    publish(d, 1)
    d.store.close()
    Path(f"{path}-mark").write_bytes(text)
    d = opened(path)
    publish(d, 2)
    assert reopen(lambda: rival(path)).state.committed == Held(2, "u2")


def test_the_mark_of_another_store_says_nothing(path: Path, tmp_path: Path) -> None:
    d = opened(path)
    for version in range(1, 9):
        publish(d, version)
    Path(f"{path}-mark").rename(tmp_path / "other.db-mark")
    assert opened(tmp_path / "other.db").epoch == 1


def test_what_changes_no_number_writes_no_mark(path: Path) -> None:
    d = opened(path)
    u = update(1)
    d.freeze(u)
    d.decide(u)
    before = Path(f"{path}-mark").read_bytes()
    Path(f"{path}-mark").write_bytes(b"")
    d.roster("r1", Admin.DRAINING)
    d.close(replace(committed(u), frozen=True))  # not synced: it must not be said
    assert Path(f"{path}-mark").read_bytes() == b""
    d.freeze(update(2))
    assert Path(f"{path}-mark").read_bytes() > before


def test_one_that_cannot_be_written_is_told_and_costs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = opened(path)
    mark.remove(path, *d.store._life)  # type: ignore[attr-defined]
    Path(f"{path}-mark").unlink()
    Path(f"{path}-mark").mkdir()
    with caplog.at_level(logging.WARNING):
        publish(d, 1)
    assert "a loss of the write-ahead log would go unnoticed" in caplog.text
    assert reopen(lambda: rival(path)).state.committed == Held(1, "u1")
