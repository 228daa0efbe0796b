"""The Node trainer shows who it is, also to data ports that speak TLS and ask for a certificate."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.cli.fleet import Launched
from tests.clients.needs import NODE
from tests.clients.test_cpp_security import TOKENS, Secured
from tests.server.certificates import HAS_OPENSSL

pytestmark = [
    pytest.mark.usefixtures("node_client"),
    pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command"),
]


@pytest.fixture(scope="module", params=["certificates", "tokens"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    launched = Launched(folder := tmp_path_factory.mktemp(request.param))
    try:
        yield Secured(launched, folder, request.param)
    finally:
        launched.stop()


def publish(fleet: Secured, name: str, ca: str = "ca", token: str = "") -> subprocess.CompletedProcess[str]:
    """As who has the certificate ``name``; without one where that is empty."""
    env = {"WEIGHTPLANE_CA": str(fleet.certs / f"{ca}.pem"), "WEIGHTPLANE_TOKEN": token}
    if name:
        pair = {"CERT": f"{name}.pem", "KEY": f"{name}.key"}
        env |= {f"WEIGHTPLANE_{word}": str(fleet.certs / file) for word, file in pair.items()}
    words = ["node", str(NODE / "bin" / "publish.js"), "--address", fleet.address, "--group", "g"]
    words += ["--file", str(fleet.file)]
    return subprocess.run(words, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def test_weights_go_with_a_certificate_over_a_data_port_that_asks_for_one(secured: Secured) -> None:
    done = publish(secured, "trainer", token=TOKENS["trainer"] if secured.by_tokens else "")
    assert done.returncode == 0 and json.loads(done.stdout)["replicas"] == {"a": "READY"}, done.stderr


def test_who_is_not_known_or_not_allowed_is_refused_with_the_reason(secured: Secured) -> None:
    if secured.by_tokens:
        cases = [("trainer", "ca", "", 8, "UNAUTHENTICATED"), ("trainer", "ca", "none of theirs", 8, "UNAUTHENTICATED")]
        cases += [("trainer", "ca", TOKENS["viewer"], 8, "PERMISSION_DENIED")]
    else:
        cases = [("viewer", "ca", "", 8, "PERMISSION_DENIED"), ("trainer-job7", "ca", "", 8, "PERMISSION_DENIED")]
        cases += [(name, ca, "", 3, "no control plane answers") for name, ca in (("", "ca"), ("trainer", "viewer"))]
    for name, ca, token, code, told in cases:
        done = publish(secured, name, ca, token)
        assert done.returncode == code and told in done.stderr, (name, ca, token, done.stderr)
