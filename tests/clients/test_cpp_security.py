"""The C++ trainer shows who it is: certificates of ``weightplane certs``, tokens, and data ports that speak TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.cli.checkpoints import tiny
from tests.cli.fleet import Launched, weightplane
from tests.clients.cpp_fleet import Fleet, digests_of
from tests.server.certificates import HAS_OPENSSL

pytestmark = [
    pytest.mark.usefixtures("cpp"),
    pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command"),
]
TOKENS = {role: f"a-token-of-role-{role}-0123456789" for role in ("trainer", "inference", "viewer")}


class Secured(Fleet):
    """A control plane with TLS, and one replica with a certificate, which its data port shows and asks for too.

    ``by``: what the control plane tells callers apart by, "certificates" or "tokens".
    """

    def __init__(self, launched: Launched, folder: Path, by: str) -> None:
        self.certs = folder / "certs"
        for more in ([], ["--role", "trainer", "--group", "other", "--name", "job7"]):
            made = weightplane("certs", str(self.certs), *more)
            assert made.returncode == 0, made.stderr
        self.by_tokens = by == "tokens"
        tokens = folder / "tokens"
        tokens.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
        tokens.chmod(0o600)
        plane = ["--tls-cert", str(self.certs / "server.pem"), "--tls-key", str(self.certs / "server.key")]
        plane += ["--tokens", str(tokens)] if self.by_tokens else ["--tls-client-ca", str(self.certs / "ca.pem")]
        files = {"CA": "ca.pem", "CERT": "inference.pem", "KEY": "inference.key"}
        env = {f"WEIGHTPLANE_{k}": str(self.certs / name) for k, name in files.items()}
        if self.by_tokens:
            env["WEIGHTPLANE_TOKEN"] = TOKENS["inference"]
        super().__init__(launched, *plane, env=env)
        self.file = tiny(folder / "one.safetensors", 1.0)
        self.replica("a", self.file)

    def viewer(self) -> grpc.Channel:
        ca, key, cert = ((self.certs / name).read_bytes() for name in ("ca.pem", "viewer.key", "viewer.pem"))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        if self.by_tokens:
            token = grpc.access_token_call_credentials(TOKENS["viewer"])
            credentials = grpc.composite_channel_credentials(credentials, token)
        return grpc.secure_channel(self.address, credentials)

    def who(self, name: str) -> list[str]:
        """The options of a certificate."""
        pair = ["--tls-cert", str(self.certs / f"{name}.pem"), "--tls-key", str(self.certs / f"{name}.key")]
        return [*self.trust(), *pair]

    def trust(self) -> list[str]:
        return ["--tls-ca", str(self.certs / "ca.pem")]


def fleet(factory: pytest.TempPathFactory, by: str) -> Iterator[Secured]:
    launched = Launched(folder := factory.mktemp(by))
    try:
        yield Secured(launched, folder, by)
    finally:
        launched.stop()


@pytest.fixture(scope="module")
def secured(cpp: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    yield from fleet(tmp_path_factory, "certificates")


@pytest.fixture(scope="module")
def tokens(cpp: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    yield from fleet(tmp_path_factory, "tokens")


@pytest.mark.parametrize("wire", ["shm", "grpc"])
def test_weights_go_with_a_certificate_also_over_a_data_port_with_tls(secured: Secured, wire: str) -> None:
    said = secured.publish("--file", str(secured.file), *secured.who("trainer"), "--transport", wire)
    assert said["transports"] == {"a": wire} and secured.get("a", "/digests") == digests_of(secured.file)


def test_the_environment_says_it_too(secured: Secured) -> None:
    files = {"CA": "ca.pem", "CERT": "trainer.pem", "KEY": "trainer.key"}
    env = {f"WEIGHTPLANE_{k}": str(secured.certs / name) for k, name in files.items()}
    assert secured.publish("--file", str(secured.file), "--transport", "grpc", env=env)["transports"] == {"a": "grpc"}


def test_a_token_is_enough_for_the_control_plane_and_not_for_a_data_port(tokens: Secured) -> None:
    """The data port asks for a certificate, whatever the control plane has been shown."""
    words, token = ["--file", str(tokens.file), *tokens.trust()], TOKENS["trainer"]
    said = tokens.publish(*words, "--token", token)
    assert said["transports"] == {"a": "shm"}
    assert tokens.publish(*words, env={"WEIGHTPLANE_TOKEN": token})["version"] == said["version"] + 1
    refused = tokens.publish(*words, "--token", token, "--transport", "grpc", code=5)
    assert refused["reason"] in ("TRANSPORT", "TRANSPORT_FAILED") and "a/0" in refused["message"], refused
    both = tokens.publish("--file", str(tokens.file), *tokens.who("trainer"), "--token", token, "--transport", "grpc")
    assert both["transports"] == {"a": "grpc"}
    for word, reason, told in (
        ([], "UNAUTHENTICATED", ""),
        (["--token", "not one of this server's"], "UNAUTHENTICATED", "token"),
        (["--token", TOKENS["viewer"]], "PERMISSION_DENIED", "trainer"),
    ):
        refused = tokens.publish(*words, *word, code=8)
        assert refused["reason"] == reason and told in refused["message"], refused


def test_who_is_not_known_or_not_allowed_is_refused_with_the_reason(secured: Secured) -> None:
    other = secured.who("trainer")
    other[other.index("--tls-key") + 1] = str(secured.certs / "none.key")
    for words, code, reason, told in (
        (secured.who("viewer"), 8, "PERMISSION_DENIED", "trainer"),
        (secured.who("trainer-job7"), 8, "PERMISSION_DENIED", "other"),
        (secured.trust(), 3, "UNREACHABLE", "one of ours"),
        ([], 3, "UNREACHABLE", "--tls-ca"),
        (["--tls-ca", str(secured.certs / "viewer.pem")], 3, "UNREACHABLE", "authority"),
        (other, 2, "INVALID_ARGUMENT", "none.key: No such file"),
        (secured.who("trainer")[:4], 2, "INVALID_ARGUMENT", "come together"),
        (secured.who("trainer")[2:], 2, "INVALID_ARGUMENT", "--tls-ca turns on"),
    ):
        said = secured.publish("--file", str(secured.file), *words, code=code)
        assert said["reason"] == reason and told in said["message"], (words, said)
