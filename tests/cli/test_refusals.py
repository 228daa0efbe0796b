"""What commands say when they cannot: the kind, the exit code, whom it is about, what to do next."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests import warm
from weightplane.cli.client import words
from weightplane.cli.refusals import how_to_convert, next_for_replicas
from weightplane.transports import registry

from .checkpoints import tiny
from .fleet import ROOT, Launched, weightplane
from .site import GROUP, Site, engine_of
from .test_commands import wait_stopped


@pytest.mark.parametrize("option", ["--mode", "--verify", "--transport"])
def test_a_value_that_an_option_does_not_know_is_wrong_usage(site: Site, option: str) -> None:
    text = site.run("publish", str(site.checkpoint), "-g", GROUP, option, "bogus", code=2)
    assert option in text and "expected one of" in text and "bogus" in text


@pytest.mark.parametrize(
    ("env", "address", "said"),
    [
        ({"WEIGHTPLANE_CA": "nope.pem"}, "", "WEIGHTPLANE_CA: No such file"),
        (
            {"WEIGHTPLANE_CA": "junk", "WEIGHTPLANE_CERT": "junk", "WEIGHTPLANE_KEY": "junk"},
            "",
            "PEM certificate and its",
        ),
        ({"WEIGHTPLANE_TOKEN": "view\u00e9-view\u00e9-view\u00e9"}, "", "token: expected printable ASCII"),
        ({}, "http://127.0.0.1:7450", "no URL"),
        ({}, "a b:1", "no blanks"),
    ],
    ids=["no such file", "no pair", "no header", "a URL", "a blank"],
)
@pytest.mark.parametrize("command", [["status"], ["doctor"], ["watch", "-g", "g"]], ids=" ".join)
def test_what_no_connection_can_be_made_with_is_wrong_usage(
    tmp_path: Path, command: list[str], env: dict[str, str], address: str, said: str
) -> None:
    (tmp_path / "junk").write_bytes(b"junk")
    words = [*command, *(["-a", address] if address else [])]
    done = subprocess.run(
        [sys.executable, "-m", "weightplane.cli", *words],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "400", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_token_from_a_file_with_a_newline_is_taken(site: Site) -> None:
    assert '"replicas"' in site.run("status", "-g", GROUP, "--json", env={"WEIGHTPLANE_TOKEN": "any-token-at-all\n"})


def test_a_version_that_no_replica_serves_is_no_success(site: Site, tmp_path: Path) -> None:
    """Committed, and its one replica broke off as it applied it: named, with what to do; the next publish heals it."""
    options = ("-a", site.address, "-g", "breaks", "--replica-id", "breaks")
    broken = {"WEIGHTPLANE_FAILPOINTS": "replica.apply.inside=raise@1"}
    site.launched.start("breaks", "inference-agent", *options, *engine_of(site.checkpoint), env=broken)
    text = site.run("publish", str(site.checkpoint), "-g", "breaks", "--mode", "staged", code=5)
    assert "is committed" in text and "breaks is DIRTY and serves nobody" in text and "next full publish" in text
    assert "replica.apply.inside" in text
    (said,) = site.json("publish", str(site.checkpoint), "-g", "breaks")["replicas"]
    assert said["state"] == "READY" and said["failure"] == ""


def test_a_publish_whose_failure_is_forgiven_is_no_success_either(site: Site) -> None:
    """continue_stale: training goes on, and the command says that nothing was committed and why."""
    options = ("-a", site.address, "-g", "stale", "--replica-id", "stale")
    broken = {"WEIGHTPLANE_FAILPOINTS": "replica.receive.inside=raise@1"}
    site.launched.start("stale", "inference-agent", *options, *engine_of(site.checkpoint), env=broken)
    site.run("policy", "-g", "stale", "--on-failure", "continue_stale", "--max-stale", "1")
    text = site.run("publish", str(site.checkpoint), "-g", "stale", code=5)
    assert "nothing was committed" in text and "replica.receive.inside" in text and "is committed" not in text
    assert "is committed" in site.run("publish", str(site.checkpoint), "-g", "stale")


def test_a_transport_that_cannot_work_here_is_refused_with_its_reason(site: Site) -> None:
    not_here = {name: probe.reason for name, probe in registry.available().items() if not probe.ok}
    if not not_here:
        pytest.skip("every transport works on this host")
    name, reason = next(iter(not_here.items()))
    error = site.json("publish", str(site.checkpoint), "-g", GROUP, "--transport", name, code=4)["error"]
    assert reason in error["message"] and "weightplane transports" in error["next"]


def test_a_checkpoint_that_is_none_is_wrong_usage_and_says_how_to_make_one(site: Site, tmp_path: Path) -> None:
    junk, saved, empty = tmp_path / "junk.safetensors", tmp_path / "old.pt", tmp_path / "empty"
    junk.write_bytes(b"\xff" * 64)
    torch.save({"w": torch.zeros(2)}, saved)
    empty.mkdir()
    for path, todo in ((junk, "written whole"), (saved, "torch.load('old.pt', weights_only=True)"), (empty, "folder")):
        error = site.json("publish", str(path), "-g", GROUP, code=2)["error"]
        assert path.name in error["message"] and todo in error["next"], error


def test_the_advice_converts_a_checkpoint_of_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "old.pt")
    advice = how_to_convert(tmp_path / "old.pt").partition(": ")[2]
    subprocess.run([sys.executable, "-c", advice], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "old.safetensors").exists()


def test_replicas_that_an_operator_took_out_are_named_with_what_brings_them_back(site: Site) -> None:
    try:
        site.json("pin", "a", "-g", GROUP)
        text = site.run("publish", str(site.checkpoint), "-g", GROUP, "--wait", "3", code=4)
        assert "still waiting: " in text and text.count("a: it is PINNED") == 2
        site.json("unpin", "a", "-g", GROUP)
        for verb, back in (("pin", "unpin"), ("drain", "activate")):
            site.json(verb, "a", "-g", GROUP)
            error = site.json("publish", str(site.checkpoint), "-g", GROUP, "--wait", "0", code=4)["error"]
            assert error["reason"] == "NOT_ENOUGH_REPLICAS" and "a: it is" in error["message"]
            assert error["next"] == f"weightplane {back} a -g {GROUP}"
            site.json(back, "a", "-g", GROUP)
    finally:
        site.json("activate", "a", "-g", GROUP)
    assert next_for_replicas("group 'g': found 0 (none)", "g") == ""


def test_a_reason_is_said_once(site: Site, tmp_path: Path) -> None:
    bad = tiny(tmp_path / "bad.safetensors", 1.0)
    raw = bad.read_bytes().replace(b"head.bias", b"head.bent")
    bad.write_bytes(raw)
    text = site.run("publish", str(bad), "-g", GROUP, code=5)
    assert text.count("MANIFEST_MISMATCH") == 1 and "head.bent" in text


def test_hints_name_the_group_that_was_asked_for(site: Site) -> None:
    assert f"weightplane updates --group {GROUP}" in site.run("abort", "-g", GROUP, code=7)


def test_answers_to_a_change_have_no_column_that_they_cannot_fill(site: Site) -> None:
    assert "reached by" not in site.run("pause", "-g", GROUP)
    assert "reached by" not in site.run("resume", "-g", GROUP)
    assert "reached by" in site.run("status", "-g", GROUP)


def test_a_trainer_that_left_in_good_order_is_not_lost(site: Site) -> None:
    assert "trainer" not in site.json("status", "-g", GROUP)["group"]


def test_a_port_that_is_taken_is_named_with_what_to_do(site: Site) -> None:
    done = weightplane("controlplane", "--listen", site.address, "--store", "memory:")
    assert done.returncode == 4, done.stderr
    assert f"cannot listen on {site.address}" in done.stderr and "next: " in done.stderr and "--listen" in done.stderr
    assert "GRPC_VERBOSITY" not in done.stderr and "add_port" not in done.stderr
    agent = ["inference-agent", "-g", GROUP, "--replica-id", "z", *engine_of(site.checkpoint)]
    done = weightplane(*agent, "--generate", site.address, "-a", site.address)
    assert done.returncode == 4 and f"cannot listen on {site.address}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["controlplane", "--listen", "0.0.0.0:0", "--store", "memory:"], "--insecure"),
        (["controlplane", "--probes", "0.0.0.0:0", "--store", "memory:"], "--probes 0.0.0.0:0"),
        (["controlplane", "--gateway", "0.0.0.0:0", "--store", "memory:"], "--gateway 0.0.0.0:0"),
        (["controlplane", "--log-level", "loud"], "--log-level"),
        (["controlplane", "--listen", "127.0.0.1:99999"], "99999"),
        (["controlplane", "--tokens", "no-such-file"], "no-such-file"),
        (["status", "-a", "10.1.2.3:7450"], "WEIGHTPLANE_INSECURE=1"),
        (["inference-agent", "-g", "g", "--replica-id", "r", "--engine", "torch_module"], "'module'"),
    ],
)
def test_wrong_usage_is_told_in_the_words_of_the_command_line(args: list[str], word: str) -> None:
    done = weightplane(*args)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr and "insecure=True" not in done.stderr and "Traceback" not in done.stderr


def test_watch_says_what_it_waits_for_and_leaves_no_blank_line(site: Site) -> None:
    command = [sys.executable, "-m", "weightplane.cli", "watch", "-g", GROUP, "-a", site.address]
    watch = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watch.stderr is not None
    assert f"waiting for an update of group {GROUP}" in watch.stderr.readline()
    watch.send_signal(signal.SIGINT)
    stdout, stderr = watch.communicate(timeout=30)
    assert (watch.returncode, stdout) == (130, "") and "nothing was changed" in stderr
    nobody = weightplane("watch", "-g", GROUP, "-a", "127.0.0.1:1")
    assert (nobody.returncode, nobody.stdout) == (3, "")


def test_ctrl_c_before_an_update_says_that_none_was_open(site: Site) -> None:
    command = [sys.executable, "-m", "weightplane.cli", "publish", str(site.checkpoint), "-g", GROUP]
    command += ["-a", site.address, "--replicas", "9"]
    publish = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert publish.stderr is not None and "waiting up to" in publish.stderr.readline()
    publish.send_signal(signal.SIGINT)
    _, stderr = publish.communicate(timeout=30)
    assert publish.returncode == 130 and "no update was open" in stderr and "aborted" not in stderr


def test_servers_end_with_0_when_they_are_asked_to(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    try:
        checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
        address = launched.start("plane", "controlplane", "--listen", "127.0.0.1:0", "--store", "memory:")["address"]
        launched.start("a", "inference-agent", "-a", address, "-g", GROUP, "--replica-id", "a", *engine_of(checkpoint))
        for name in ("a", "plane"):
            launched.processes[name].send_signal(signal.SIGINT)
            assert launched.processes[name].wait(30) == 0, launched.log(name)
    finally:
        launched.stop()


def test_an_agent_that_finds_no_control_plane_says_so_and_ever_more_rarely(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
    command = [sys.executable, "-m", "weightplane.cli", "inference-agent", "-a", address, "-g", GROUP]
    command += ["--replica-id", "a", *engine_of(checkpoint)]
    agent = warm.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert agent.stderr is not None
        said: list[str] = []
        while len(said) < 2:
            line = agent.stderr.readline()
            assert line, said
            said += [line] if address in line else []
        for line, pause in zip(said, (2, 4), strict=True):
            assert "WARNING" in line and f"no control plane answers at {address}" in line
            assert "weightplane controlplane" in line and f"again in {pause} s" in line
    finally:
        agent.terminate()
        agent.communicate(timeout=30)


def test_a_factory_that_raises_is_named_with_the_users_own_frames(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def boom():\n    raise RuntimeError('no weights [file]')\n")
    command = [sys.executable, "-m", "weightplane.cli", "inference-agent", "-g", "g", "--replica-id", "r"]
    command += ["--engine", "other:boom"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "engine 'other:boom': its factory raised RuntimeError: no weights [file]" in done.stderr
    assert "other.py" in done.stderr and "line 2, in boom" in done.stderr
    assert "typer" not in done.stderr and "serve.py" not in done.stderr and "Traceback" not in done.stderr


def test_a_registered_engine_that_needs_an_object_is_told_to_be_made_by_a_function() -> None:
    done = weightplane("inference-agent", "-g", "g", "--replica-id", "r", "--engine", "torch_module")
    assert done.returncode == 2 and "pass --engine module:function" in done.stderr, done.stderr


def test_a_vllm_that_does_not_answer_is_no_fault_of_a_factory() -> None:
    options = ["--engine-option", "url=http://127.0.0.1:1", "--engine-option", "start_timeout_s=1"]
    done = weightplane("inference-agent", "-g", "g", "--replica-id", "r", "--engine", "vllm", *options)
    assert done.returncode == 2 and "http://127.0.0.1:1" in done.stderr and "docs/vllm.md" in done.stderr, done.stderr
    assert "five lines" not in done.stderr and ", line " not in done.stderr, done.stderr


def test_who_is_confined_to_another_group_is_told_of_that_and_who_lacks_the_role_of_the_role(tmp_path: Path) -> None:
    tokens, words = tmp_path / "tokens", {"trainer+operator+viewer@other": "confined" * 2, "viewer": "views" * 4}
    tokens.write_text("".join(f"{who} {token}\n" for who, token in words.items()))
    confined, viewer = ({"WEIGHTPLANE_TOKEN": token} for token in words.values())
    checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
    launched = Launched(tmp_path)
    try:
        plane = ["--listen", "127.0.0.1:0", "--store", "memory:", "--tokens", str(tokens)]
        site = Site(launched, launched.start("plane", "controlplane", *plane)["address"], checkpoint)
        for command in (["status"], ["pause"], ["publish", str(checkpoint)]):
            text = site.run(*command, "-g", GROUP, code=8, env=confined)
            assert "for other groups, whatever its roles" in text and f"for group {GROUP} too" in text, text
        # In a table, where it may be broken into lines.
        assert "for other groups" in site.run("doctor", "-g", GROUP, code=4, env={**confined, "COLUMNS": "900"})
        text = site.run("pause", "-g", GROUP, code=8, env=viewer)
        assert "the role that is expected" in text and "for other groups" not in text
    finally:
        launched.stop()


def test_a_control_plane_that_dies_in_mid_publish_is_what_the_hint_is_about(tmp_path: Path) -> None:
    launched = Launched(tmp_path)
    try:
        plane = ["controlplane", "--listen", "127.0.0.1:0", "--store", "memory:", "--ttl", "60"]
        address = launched.start("plane", *plane)["address"]
        checkpoint = tiny(tmp_path / "one.safetensors", 1.0)
        replica = ["inference-agent", "-a", address, "-g", GROUP, "--replica-id", "a", *engine_of(checkpoint)]
        launched.start("a", *replica, env={"WEIGHTPLANE_FAILPOINTS": "replica.arm.before=stop@1"})
        command = [sys.executable, "-m", "weightplane.cli", "publish", str(checkpoint), "-g", GROUP, "-a", address]
        command += ["--timeout", "4"]
        publish = warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_stopped(launched.processes["a"].pid, publish)
        began = time.monotonic()
        launched.processes["plane"].kill()
        stdout, stderr = publish.communicate(timeout=40)
        assert publish.returncode in (5, 6), (publish.returncode, stderr)
        assert "(version 1)" in stderr
        assert "weightplane controlplane" in stderr and f"weightplane updates -g {GROUP}" in stderr
        assert "_MultiThreadedRendezvous" not in stdout + stderr
        assert time.monotonic() - began < 12  # its deadline, and a loaded machine
    finally:
        launched.stop()


def test_a_failed_call_is_told_in_a_few_words() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call: Any = channel.unary_unary("/a/b")
        with pytest.raises(grpc.RpcError) as found:
            call(b"", timeout=5)
    assert words(found.value).startswith("UNAVAILABLE: ") and "\n" not in words(found.value)
    assert words(grpc.RpcError()) == "RpcError"


def test_every_error_of_the_json_mode_is_one_document(site: Site) -> None:
    done = weightplane("publish", "no-such-file", "-g", GROUP, "-a", site.address, "--json")
    assert done.returncode == 2
    done = weightplane("status", "-g", "nowhere", "-a", site.address, "--json")
    assert json.loads(done.stdout)["error"]["exit"] == done.returncode == 7
