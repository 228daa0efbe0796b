"""A store that cannot be used, seen from the command line: refused in a sentence, never overwritten; a full disk is an
error of a call, not the end of the server. What else can be wrong with a file: ``tests/store/test_sqlite.py``."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path

import grpc
import pytest

from tests.cli.fleet import ROOT, weightplane
from tests.store.test_sqlite import filled
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc


def corrupt(path: Path) -> None:
    filled(path)
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 8192)


def newer(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE somebody_elses (x)")
    db.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(corrupt, "left as it is"), (newer, "newer release"), (foreign, "another program")],
    ids=["corrupt", "newer", "foreign"],
)
def test_a_file_that_cannot_be_used_ends_the_command_and_stays_as_it_is(
    spoil: object, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    assert callable(spoil)
    spoil(path)
    before = path.read_bytes()
    done = weightplane("controlplane", "--listen", "127.0.0.1:0", "--store", f"sqlite:{path}")
    assert done.returncode == 4 and words in done.stderr and str(path) in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_bytes() == before
    log = path.with_name("store.db-wal")  # SQLite's own, and empty
    assert not log.exists() or log.stat().st_size == 0


def can_mount() -> bool:
    words = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return (
        shutil.which("unshare") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


needs_mount = pytest.mark.skipif(not can_mount(), reason="a file system of its own needs unshare -rm")


def served(folder: Path, mount: str, *words: str) -> subprocess.Popen[str]:
    """The command in a mount namespace of its own, after ``mount`` (a shell command) ran there."""
    command = [sys.executable, "-m", "weightplane.cli", "controlplane", "--listen", "127.0.0.1:0", *words]
    script = f'{mount} && exec "$@"'
    return subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", script, "sh", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
        text=True,
    )


@needs_mount
def test_a_read_only_store_is_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    filled(disk / "store.db")
    before = {p.name: p.read_bytes() for p in disk.iterdir()}
    read_only = f"mount --bind {disk} {disk} && mount -o remount,ro,bind {disk}"
    process = served(tmp_path, read_only, "--store", f"sqlite:{disk / 'store.db'}")
    assert process.wait(60) == 4
    log = (tmp_path / "log").read_text()
    assert "cannot be opened for writing" in log and "check its directory and permissions" in log, log
    assert {p.name: p.read_bytes() for p in disk.iterdir()} == before


@needs_mount
def test_a_full_disk_fails_calls_and_ends_nothing(tmp_path: Path) -> None:
    disk, facts = tmp_path / "disk", tmp_path / "facts.json"
    disk.mkdir()
    store = ("--store", f"sqlite:{disk / 'store.db'}", "--announce", str(facts), "--exit-with", str(os.getpid()))
    process = served(tmp_path, f"mount -t tmpfs -o size=1m tmpfs {disk}", *store)
    try:
        end = time.monotonic() + 60
        while not facts.exists():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        inside = Path(f"/proc/{process.pid}/root{disk}")
        address = facts.read_text().split('"address": "')[1].split('"')[0]
        with grpc.insecure_channel(address) as channel:
            fleet = fleet_pb2_grpc.FleetServiceStub(channel)

            def make(name: str) -> str:
                try:
                    request = fleet_pb2.CreateGroupRequest(request_id=uuid.uuid4().hex, group=name)
                    fleet.CreateGroup(request, timeout=10)
                except grpc.RpcError as e:
                    assert isinstance(e, grpc.Call)
                    return f"{e.code().name}: {e.details()}"
                return "OK"

            assert make("before") == "OK"
            fill(inside / "ballast")
            said = [make(f"g{n}") for n in range(4)]
            assert any("disk is full" in s for s in said), said
            assert all(s == "OK" or s.startswith(("UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")) for s in said), said
            assert process.poll() is None
            (inside / "ballast").unlink()
            end = time.monotonic() + 15
            while (answer := make("after")) != "OK":
                assert time.monotonic() < end, answer
                time.sleep(0.2)
            names = [g.group for g in fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=5).groups]
            assert {"before", "after"} <= set(names)
    finally:
        process.terminate()
        assert process.wait(20) == 0, (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()


def fill(path: Path) -> None:
    """Take every byte that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 512, 1):
            while True:
                try:
                    if not file.write(b"x" * size):
                        break
                except OSError:
                    break
