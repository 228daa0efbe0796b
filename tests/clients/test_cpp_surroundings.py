"""The C++ trainer where its surroundings are not as they should be: its file changes, memory is short, output ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched
from tests.clients.cpp_fleet import Fleet, digests_of, weights
from tests.process.harness import eventually

pytestmark = pytest.mark.usefixtures("cpp")


def under(fleet: Fleet, shell: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Publish from a shell that sets something first: ``shell`` ends in what becomes the program."""
    words = ["sh", "-c", shell, "sh", *fleet.command(*args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("how", ["written to", "cut short"])
def test_a_file_that_changes_while_it_is_sent_is_published_by_nobody(
    launched: Launched, tmp_path: Path, how: str
) -> None:
    """A replica stands still in the middle; it goes on once the file has changed."""
    one, two = weights(tmp_path / "one.safetensors", 1.0), weights(tmp_path / "two.safetensors", 2.0)
    fleet = Fleet(launched)
    fleet.replica("a", one, WEIGHTPLANE_FAILPOINTS="grpc.receive.inside=block:4@24")
    assert fleet.publish("--file", str(one), "--transport", "grpc")["version"] == 1
    trainer = subprocess.Popen(
        fleet.command("--file", str(two), "--transport", "grpc"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: fleet.sends(2), "it sends")
        if how == "cut short":
            os.truncate(two, 4096)
        else:
            os.utime(two)
        out, err = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 2, (out, err)
    said = json.loads(out)
    assert said["reason"] == "INVALID_ARGUMENT" and not said["committed"], said
    told = f"the file was {how} while it was sent"
    assert told in said["message"] and str(two) in said["message"] and told in err, said
    eventually(lambda: (u := fleet.newest()) is not None and u.failure.message != "", "the update ends")
    assert fleet.get("a", "/digests") == digests_of(one) and fleet.get("a", "/version")["version"] == 1
    assert fleet.publish("--file", str(one), "--takeover", "--transport", "grpc")["replicas"] == {"a": "READY"}


def test_where_shared_memory_has_no_room_the_other_transport_is_taken(launched: Launched, tmp_path: Path) -> None:
    """No file may be larger than 1 MiB, as in a /dev/shm that is full."""
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    done = under(fleet, 'ulimit -f 2048; exec "$@"', "--file", str(path))
    assert done.returncode == 0 and json.loads(done.stdout)["transports"] == {"a": "grpc"}, done.stderr
    done = under(fleet, 'ulimit -f 2048; exec "$@"', "--file", str(path), "--transport", "shm")
    assert done.returncode == 4 and "KiB of shared memory are needed" in json.loads(done.stdout)["message"], done


def test_whoever_closes_its_streams_or_stops_reading_takes_no_status_from_it(
    launched: Launched, tmp_path: Path
) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    for version, shell in enumerate(('exec "$@" <&- >&- 2>&-', 'exec "$@" <&- >&-', 'exec "$@" >/dev/full'), 1):
        done = under(fleet, shell, "--file", str(path), "--transport", "shm")
        assert done.returncode == 0 and fleet.get("a", "/version")["version"] == version, done
        assert ("could not be written" in done.stderr) == ("full" in shell)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            fleet.command("--file", str(path)),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 0 and "could not be written" in done.stderr, done


def test_the_environment_names_control_plane_and_group(launched: Launched, tmp_path: Path) -> None:
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    env = {**os.environ, "WEIGHTPLANE_ADDRESS": fleet.address, "WEIGHTPLANE_GROUP": "g"}
    words = [str(fleet.program), "--file", str(path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["replicas"] == {"a": "READY"}, done.stderr


def test_where_no_thread_can_be_had_it_ends_and_says_so(launched: Launched, tmp_path: Path) -> None:
    """Too little address space for the stacks of gRPC's threads: its shutdown waited for them without end."""
    path, fleet = tiny(tmp_path / "one.safetensors", 1.0), Fleet(launched)
    fleet.replica("a", path)
    done = under(fleet, 'ulimit -v 400000; exec "$@"', "--file", str(path), "--transport", "shm")
    assert json.loads(done.stdout)["committed"] == (done.returncode == 0), done
    assert fleet.publish("--file", str(path), "--takeover")["replicas"] == {"a": "READY"}
