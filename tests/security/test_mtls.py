"""mTLS from end to end: control plane, replica and trainer as processes, with certificates from ``weightplane certs``.

All of them run under an audit hook that notes every unpickling (``hooks/sitecustomize.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import ROOT, Launched, weightplane
from tests.cli.site import engine_of
from tests.server.certificates import HAS_OPENSSL
from weightplane.controlplane.certificates import Authority, CertificateError, Made

HOOKS = Path(__file__).parent / "hooks"
GROUP = "rl/tiny"

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")


class Secured:
    """A control plane and one replica, both with certificates; ``env`` makes a caller's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launched = folder, Launched(folder)
        self.certs, self.audit = folder / "certs", folder / "audit"
        made = weightplane("certs", str(self.certs))
        assert made.returncode == 0, made.stderr
        scoped = ("--role", "trainer", "--group", GROUP, "--name", "job7")
        assert weightplane("certs", str(self.certs), *scoped).returncode == 0
        tls = ("--tls-cert", "server.pem", "--tls-key", "server.key", "--tls-client-ca", "ca.pem")
        files = [word if word.startswith("--") else str(self.certs / word) for word in tls]
        store = f"sqlite:{folder / 'store.db'}"
        plane = ["controlplane", "--listen", "127.0.0.1:0", "--store", store, "--beat", "0.5", "--ttl", "3", *files]
        self.address: str = self.launched.start("plane", *plane, env=self.env(None))["address"]
        self.checkpoint = tiny(folder / "one.safetensors", 1.0)
        replica = ["inference-agent", "-a", self.address, "-g", GROUP, "--replica-id", "a"]
        self.launched.start("a", *replica, *engine_of(self.checkpoint), env=self.env("inference"))

    def env(self, who: str | None, folder: Path | None = None) -> dict[str, str]:
        """``who``: the file name of a certificate; none of its own for ``None``."""
        at, paths = folder or self.certs, [str(HOOKS), os.environ.get("PYTHONPATH", "")]
        env = {"WEIGHTPLANE_AUDIT": str(self.audit), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if who is not None:
            env |= {"WEIGHTPLANE_CA": str(self.certs / "ca.pem")}
            env |= {"WEIGHTPLANE_CERT": str(at / f"{who}.pem"), "WEIGHTPLANE_KEY": str(at / f"{who}.key")}
        return env

    def publish(self, who: str, step: int, transport: str, group: str = GROUP) -> str:
        """What ``weightplane publish`` says, after its exit code."""
        words = ("publish", str(self.checkpoint), "-g", group, "--step", str(step), "--transport", transport)
        done = weightplane(*words, "--wait", "15", "-a", self.address, env=self.env(who))
        return f"{done.returncode} {done.stdout} {done.stderr}"

    def status(self, env: dict[str, str]) -> str:
        """The same of ``weightplane status``."""
        done = weightplane("status", "-a", self.address, env=env)
        return f"{done.returncode} {done.stdout} {done.stderr}"

    def served(self) -> bytes:
        """The server's certificate, as a client sees it now."""
        context = ssl.create_default_context(cafile=str(self.certs / "ca.pem"))
        context.load_cert_chain(self.certs / "viewer.pem", self.certs / "viewer.key")
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as plain:
            with context.wrap_socket(plain, server_hostname=host) as made:
                shown = made.getpeercert(binary_form=True)
        assert shown is not None
        return shown


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"))
    yield made
    made.launched.stop()


def test_weights_go_over_shm_and_over_a_data_port_with_tls_and_nothing_is_unpickled(
    secured: Secured, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, transport in ((1, "shm"), (2, "grpc")):
        said = secured.publish("trainer-job7" if step == 1 else "trainer", step, transport)
        assert said.startswith("0 ") and f"version {step}" in said, f"{said}\n{secured.launched.log('a')}"
    lines = secured.audit.read_text().splitlines()
    started = [line for line in lines if line.split()[1] == "started"]
    assert sum("weightplane.cli" in line for line in started) == 4, started
    assert any("heartbeat" in line for line in started), started  # the helper processes too
    assert [line for line in lines if line not in started] == []
    with capsys.disabled():
        print(f"\nmTLS: published over shm and grpc; {len(started)} processes audited, 0 unpicklings")


def listening(pid: int) -> dict[str, str]:
    """What a process listens on over TCP: inode -> address."""
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(os.readlink(fd))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in held:
                found[words[9]] = words[1].partition(":")[0]
    return found


def test_S05_with_defaults_nothing_listens_off_loopback(tmp_path: Path) -> None:
    launched, loopback = Launched(tmp_path), {"0100007F", "00000000000000000000000001000000"}
    loopback.add("0000000000000000FFFF00000100007F")  # 127.0.0.1 as IPv6 says it
    store = f"sqlite:{tmp_path / 's.db'}"
    port = free_port()
    try:
        launched.start("plane", "controlplane", "--store", store, env={"WEIGHTPLANE_LISTEN": f"127.0.0.1:{port}"})
        words = ["inference-agent", "-a", f"127.0.0.1:{port}", "-g", "g", "--replica-id", "r"]
        agent = launched.start("a", *words, "--generate", "127.0.0.1:0", "--engine", "tests.security.test_mtls:small")
        assert agent["generate"]
        end = time.monotonic() + 20
        while "r " not in weightplane("status", "-a", f"127.0.0.1:{port}", "-g", "g").stdout:
            assert time.monotonic() < end, launched.log("a")
        open_at = {n: set(listening(p.pid).values()) for n, p in launched.processes.items()}
        assert open_at["plane"] and open_at["a"], open_at
        assert open_at["plane"] | open_at["a"] <= loopback, open_at
    finally:
        launched.stop()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def expired(made: Made, authority: Authority, folder: Path) -> Made:
    """The same identity from the same authority, until yesterday."""
    request, out = folder / "old.csr", folder / "old.pem"
    again = ["openssl", "x509", "-in", str(made.certificate), "-x509toreq", "-signkey", str(made.key)]
    subprocess.run([*again, "-out", str(request)], check=True, capture_output=True)
    signer = ["-CA", str(authority.ca), "-CAkey", str(authority.folder / "ca.key"), "-days", "-1"]
    sign = ["openssl", "x509", "-req", "-in", str(request), "-out", str(out), *signer]
    subprocess.run(sign, check=True, capture_output=True)
    (folder / "old.key").write_bytes(made.key.read_bytes())
    return dataclasses.replace(made, certificate=out)


def test_what_is_refused_says_what_to_do(secured: Secured, tmp_path: Path) -> None:
    other, own = Authority(tmp_path / "other"), Authority(secured.certs)
    other.ensure()
    other.member(["trainer"], "dev")
    expired(own.member(["trainer"], "dev"), own, tmp_path)
    no_certificate = secured.env("viewer")
    del no_certificate["WEIGHTPLANE_CERT"], no_certificate["WEIGHTPLANE_KEY"]
    wrong_ca = {**secured.env("viewer"), "WEIGHTPLANE_CA": str(tmp_path / "other" / "ca.pem")}
    seen = {
        "a wrong role": secured.publish("viewer", 9, "shm"),
        "a wrong group": secured.publish("trainer-job7", 9, "shm", group="elsewhere"),
        "an expired certificate": secured.status(secured.env("old", tmp_path)),
        "another authority's certificate": secured.status(secured.env("trainer", tmp_path / "other")),
        "no certificate": secured.status(no_certificate),
        "another authority trusted": secured.status(wrong_ca),
        "no TLS": secured.status(secured.env(None)),
    }
    wanted = {
        "a wrong role": "expected role trainer, found viewer (viewer/dev)",
        "a wrong group": f"trainer/job7 is confined to group {GROUP}, found 'elsewhere'",
        "an expired certificate": "our client certificate has expired: renew it",
        "another authority's certificate": "use one from the authority that its --tls-client-ca names",
        "no certificate": "set WEIGHTPLANE_CERT and WEIGHTPLANE_KEY",
        "another authority trusted": "set WEIGHTPLANE_CA to the ca.pem",
        "no TLS": "it speaks TLS and we do not: set WEIGHTPLANE_CA",
    }
    for what, words in wanted.items():
        assert words in seen[what] and not seen[what].startswith("0 "), f"{what}: {seen[what]}"
        assert "Traceback" not in seen[what]


def test_certificates_are_renewed_without_a_restart(secured: Secured) -> None:
    before = secured.served()
    (secured.certs / "server.pem").write_text("in the middle of being copied")
    assert secured.served() == before  # what cannot be used is not
    assert weightplane("certs", str(secured.certs)).returncode == 0
    after = secured.served()
    assert after != before
    assert secured.publish("trainer", 3, "shm").startswith("0 ")
    assert "those read before stay in use" in secured.launched.log("plane")


def test_an_agent_that_is_not_let_in_says_why(secured: Secured, tmp_path: Path) -> None:
    words = ["inference-agent", "-a", secured.address, "-g", GROUP, "--replica-id", "b", *engine_of(secured.checkpoint)]
    launched = Launched(tmp_path)
    try:
        launched.start("b", *words, env=secured.env("trainer"))
        end = time.monotonic() + 20
        while "expected role inference, found trainer (trainer/dev)" not in launched.log("b"):
            assert time.monotonic() < end, launched.log("b")
            time.sleep(0.1)
    finally:
        launched.stop()


def test_the_authority_is_kept_and_faulty_names_make_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    assert authority.ensure() and not authority.ensure()
    assert [oct(p.stat().st_mode & 0o777) for p in sorted((tmp_path / "a").iterdir())] == ["0o600", "0o644"]
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    bad: list[tuple[list[str], str, list[str], list[str]]] = [
        (["boss"], "x", [], []),
        (["trainer"], "../x", [], []),
        (["trainer"], "a/b", [], []),
        (["trainer"], "x", ["a,DNS:evil"], []),
        (["inference"], "x", [], ["a,IP:1.2.3.4"]),
        (["inference"], "x", [], ["a\nb"]),
    ]
    for roles, name, groups, hosts in bad:
        with pytest.raises(CertificateError, match="expected"):
            authority.member(roles, name, groups, hosts)
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    (tmp_path / "a" / "ca.key").unlink()
    with pytest.raises(CertificateError, match="bring it back"):
        authority.ensure()


def test_no_address_off_loopback_without_tls_and_identities(tmp_path: Path) -> None:
    """Each refusal names the option that mends it; --insecure is logged."""
    store = ("--store", f"sqlite:{tmp_path / 's.db'}")
    own = Authority(tmp_path / "c")
    own.ensure()
    server = own.server([])
    pair = ("--tls-cert", str(server.certificate), "--tls-key", str(server.key))
    for more, words in (((), "--tls-cert and --tls-key"), (pair, "--tls-client-ca or --tokens")):
        done = weightplane("controlplane", "--listen", "0.0.0.0:0", *store, *more)
        assert done.returncode == 2 and words in " ".join(done.stderr.replace("│", " ").split()), done.stderr
    env = {"WEIGHTPLANE_DATA_BIND": "0.0.0.0:0", "WEIGHTPLANE_DATA_ADVERTISE": "10.0.0.1:1"}
    agent = ("inference-agent", "-g", "g", "--replica-id", "r", "--transport", "grpc", "--generate", "0.0.0.0:0")
    done = weightplane(*agent, "--engine", "tests.security.test_mtls:small", env=env)
    assert done.returncode == 2 and "needs insecure=True (--insecure)" in done.stderr, done.stderr
    done = weightplane(*agent[:-2], "--engine", "tests.security.test_mtls:small", env=env)
    assert done.returncode == 2 and "give it a certificate" in done.stderr, done.stderr
    assert not (tmp_path / "s.db").exists()
    launched = Launched(tmp_path)
    try:
        launched.start("plane", "controlplane", "--listen", "0.0.0.0:0", *store, "--insecure")
        assert "INSECURE, as asked for" in launched.log("plane")
    finally:
        launched.stop()


def small() -> object:
    """An engine's factory."""
    from torch import nn

    from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
    from weightplane.inference_agent.serve import Served

    return Served(TorchModuleEngine(nn.Linear(2, 2)), lambda *_, **__: [])


def test_the_folder_of_the_repository_holds_no_keys() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert not [f for f in tracked.splitlines() if f.endswith((".key", ".pem"))]
