"""Every command against a real control plane and a real replica: output, JSON, exit codes, what an error says to do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm

from .checkpoints import tiny
from .fleet import ROOT, Launched, weightplane
from .site import GROUP, Site, engine_of


def test_status_lists_groups_and_replicas(site: Site) -> None:
    assert GROUP in site.run("status")
    text = site.run("status", "-g", GROUP)
    assert "ready" in text and "yes" in text
    said = site.json("status", "-g", GROUP)
    assert said["group"]["committed_step"] == "7"
    assert said["replicas"][0]["labels"] == {"zone": "x"} and said["replicas"][0]["routable"] is True
    (reached,) = said["replicas"][0]["transports"]
    assert reached["transport"] == "shm" and reached["workers"] == [0] and "preference" in reached["reason"]
    assert "passed over" in site.run("status", "-g", GROUP, "--transports")


def test_updates_show_what_was_published(site: Site) -> None:
    said = site.json("updates", "-g", GROUP)
    assert said["updates"][-1]["trainer_step"] == "7"
    assert said["updates"][-1]["phase"] == "UPDATE_PHASE_COMMITTED"
    assert "committed" in site.run("updates", "-g", GROUP)


def test_pause_and_resume_name_their_holder(site: Site) -> None:
    assert "operator" in site.run("pause", "-g", GROUP)
    assert site.json("status", "-g", GROUP)["replicas"][0]["pause_holders"] == ["operator"]
    assert site.json("status", "-g", GROUP)["replicas"][0]["routable"] is False
    assert site.json("resume", "-g", GROUP)["replicas"][0]["pause_holders"] == []
    assert "expected keep, wait or abort" in site.run("pause", "-g", GROUP, "--mode", "bogus", code=2)


def test_drain_pin_and_back(site: Site) -> None:
    for verb, state in (("drain", "DRAINING"), ("activate", "ACTIVE"), ("pin", "PINNED"), ("unpin", "ACTIVE")):
        assert site.json(verb, "a", "-g", GROUP)["replicas"][0]["admin"] == f"ADMIN_STATE_{state}"
        site.json(verb, "a", "-g", GROUP)  # a repeat is no error


def test_an_engine_that_cannot_sleep_says_so_and_to_wake_who_is_awake_is_no_error(site: Site) -> None:
    said = site.json("sleep", "a", "-g", GROUP, "--level", "2", code=4)
    assert said["error"]["reason"] == "CAPABILITY" and "has no sleep" in said["error"]["message"]
    for tags in ((), ("weights",)):
        assert site.json("wake", "a", *tags, "-g", GROUP)["replicas"][0]["admin"] == "ADMIN_STATE_ACTIVE"


def test_what_does_not_exist_is_named_with_what_to_do(site: Site) -> None:
    text = site.run("status", "-g", "nowhere", code=7)
    assert "nowhere" in text and "next:" in text
    said = site.json("drain", "nobody", "-g", GROUP, code=7)
    assert said["error"]["reason"] == "UNKNOWN_REPLICA" and "nobody" in said["error"]["message"]


def test_nobody_at_the_address_is_exit_3_and_says_how_to_start_one() -> None:
    done = weightplane("status", "-a", "127.0.0.1:1")
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr and "weightplane controlplane" in done.stderr
    assert weightplane("status", "-a", "10.1.2.3:7450").returncode == 2  # plaintext off loopback is refused


def test_abort_with_nothing_open(site: Site) -> None:
    assert site.json("abort", "-g", GROUP, code=7)["error"]["reason"] == "UNKNOWN_UPDATE"


def test_publish_of_a_checkpoint_that_does_not_fit_names_the_tensors(site: Site, tmp_path: Path) -> None:
    import torch

    from .checkpoints import write_safetensors

    bad = write_safetensors(tmp_path / "bad.safetensors", {"layers.0.weight": torch.zeros(8, 9)})
    said = site.json("publish", str(bad), "-g", GROUP, code=5)
    assert said["error"]["reason"] == "MANIFEST_MISMATCH"
    assert "layers.0.weight" in said["error"]["message"] and "head.bias" in said["error"]["message"]
    assert site.json("status", "-g", GROUP)["replicas"][0]["held"]["version"] != "0"


def test_watch_follows_an_update_to_its_end(site: Site) -> None:
    command = [sys.executable, "-m", "weightplane.cli", "watch", "-g", GROUP, "-a", site.address, "--once", "--json"]
    watch = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    end = time.monotonic() + 30
    lines: list[dict[str, Any]] = []
    while watch.poll() is None and time.monotonic() < end:
        site.run("publish", str(site.checkpoint), "-g", GROUP, "--step", "8")
        try:
            watch.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
    lines = [json.loads(line) for line in watch.stdout]
    assert watch.returncode == 0
    assert lines[-1]["update"]["phase"] == "UPDATE_PHASE_COMMITTED"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_aborts_the_update_and_leaves_the_fleet_serving(tmp_path: Path, flags: list[str]) -> None:
    """A replica that stops while it arms holds the update open; Ctrl-C ends the command, and the update with it."""
    launched = Launched(tmp_path)
    try:
        plane = ["--listen", "127.0.0.1:0", "--store", "memory:", "--ttl", "60"]
        address = launched.start("plane", "controlplane", *plane)["address"]
        checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
        replica = ["inference-agent", "-a", address, "-g", GROUP, "--replica-id", "a", *engine_of(checkpoint)]
        launched.start("a", *replica, env={"WEIGHTPLANE_FAILPOINTS": "replica.arm.before=stop@2"})
        site = Site(launched, address, checkpoint)
        site.run("publish", str(checkpoint), "-g", GROUP, "--step", "1")
        command = [sys.executable, "-m", "weightplane.cli", "publish", str(checkpoint), "-g", GROUP, "-a", address]
        command += flags
        publish = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_stopped(launched.processes["a"].pid, publish)
        publish.send_signal(signal.SIGINT)
        stdout, stderr = publish.communicate(timeout=40)
        assert publish.returncode == 130, stderr
        said_so = stderr
        if flags:
            error = json.loads(stdout)["error"]
            assert (error["reason"], error["exit"]) == ("INTERRUPTED", 130)
            said_so = error["message"]
        assert "the update was aborted" in said_so
        launched.processes["a"].send_signal(signal.SIGCONT)
        said = site.json("updates", "-g", GROUP)["updates"]
        assert [u["phase"] for u in said] == ["UPDATE_PHASE_ABORTED", "UPDATE_PHASE_COMMITTED"]
        site.run("publish", str(checkpoint), "-g", GROUP, "--step", "2")
        replica_now = site.json("status", "-g", GROUP)["replicas"][0]
        assert replica_now["held"]["version"] == "3" and replica_now["routable"] is True
    finally:
        launched.stop()


def wait_stopped(pid: int, other: subprocess.Popen[str]) -> None:
    """Until the kernel says that a process is stopped."""
    end = time.monotonic() + 60  # two torch imports away, on a machine that may be busy
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert other.poll() is None and time.monotonic() < end
        time.sleep(0.02)  # a process state of the kernel's: nothing to wait on


def test_transports_and_doctor_say_what_works_here(site: Site) -> None:
    said = json.loads(weightplane("transports", "--json").stdout)
    works = {t["name"]: t["ok"] for t in said["transports"]}
    assert {"external": True, "grpc": True, "shm": True, "ucx": True}.items() <= works.items()
    checks = site.json("doctor", "-g", GROUP)
    assert checks["ok"] is True
    found = {c["check"]: c["found"] for c in checks["checks"]}
    assert {"control plane", "transport shm", "replica a", "copying memory"} <= found.keys()
    assert found["reaching a, worker 0"].startswith("shm: ")
    nobody = weightplane("doctor", "-a", "127.0.0.1:1", "--json")
    assert nobody.returncode == 3
    assert [c["check"] for c in json.loads(nobody.stdout)["checks"] if not c["ok"]] == ["control plane"]


def test_the_doctor_of_a_group_that_is_not_there_names_it_and_those_that_are_and_ends_with_7(site: Site) -> None:
    checks = site.json("doctor", "-g", "nowhere", code=7)["checks"]
    (bad,) = [c for c in checks if not c["ok"]]
    assert bad["check"] == "group nowhere" and "no group 'nowhere'" in bad["found"]
    assert GROUP in bad["found"] and bad["next"] == "name one of these"


def test_the_doctor_of_an_empty_group_says_that_no_replica_is_in_it(site: Site) -> None:
    site.run("policy", "-g", "empty", "--min-replicas", "1")
    found = {c["check"]: c["found"] for c in site.json("doctor", "-g", "empty")["checks"]}
    assert found["group empty"] == "0 replica(s)"


def test_a_pause_that_waits_for_a_stopped_replica_says_so_meanwhile_and_not_in_json(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    try:
        address = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", "memory:")["address"]
        site = Site(launched, address, tiny(tmp_path / "one.safetensors", 1.0))
        for name in ("a", "b"):
            replica = ["-a", address, "-g", GROUP, "--replica-id", name, *engine_of(site.checkpoint)]
            launched.start(name, "inference-agent", *replica)
        site.run("publish", str(site.checkpoint), "-g", GROUP, "--replicas", "2")
        launched.processes["b"].send_signal(signal.SIGSTOP)
        command = [sys.executable, "-m", "weightplane.cli", "pause", "-g", GROUP, "-a", address]
        quiet, pause = (
            warm.Popen([*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for more in (["--json"], [])
        )
        assert pause.stderr is not None
        said = ""
        while not said.endswith("until generation stands still: b (its process is stopped)\n"):
            said = pause.stderr.readline()
            assert said, "the pause ended, and had not said whom it waited for"
        launched.processes["b"].send_signal(signal.SIGCONT)
        pause.communicate(timeout=30)
        assert pause.returncode == 0
        stdout, stderr = quiet.communicate(timeout=30)
        assert stderr == "" and [r["pause_holders"] for r in json.loads(stdout)["replicas"]] == [["operator"]] * 2
    finally:
        launched.stop()


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["controlplane", "--listen", "0.0.0.0:0", "--store", "memory:"], "loopback"),
        (["controlplane", "--store", "nosuch:x"], "nosuch"),
        (["controlplane", "--beat", "2", "--ttl", "3"], "twice"),
        (["inference-agent", "-g", "g", "--replica-id", "r", "--engine", "no.such:thing"], "no.such:thing"),
        (
            ["inference-agent", "-g", "g", "--replica-id", "r", "--engine", "torch_module", "--generate", "x"],
            "host:port",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_starts(args: list[str], word: str) -> None:
    done = weightplane(*args)
    assert done.returncode in (2, 4), done.stderr
    assert word in done.stderr.replace("\n", " ")


def test_a_factory_in_the_current_folder_is_found_by_the_installed_command(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text("def make_engine():\n    return 7\n")
    command = Path(sys.executable).parent / "weightplane"
    args = ["inference-agent", "-g", "g", "--replica-id", "r", "--engine", "my_module:make_engine"]
    done = subprocess.run([command, *args], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "returned int" in done.stderr.replace("\n", " "), done.stderr
