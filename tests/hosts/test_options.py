"""``--data``, ``--advertise``, ``--interface``: put where the transports look, refused by name where they cannot be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import typer

from tests.cli.fleet import weightplane
from weightplane.cli import network

NAMES = ("UCX_NET_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *(f"WEIGHTPLANE_{k}_{w}" for k in ("DATA", "PULL") for w in ("BIND", "ADVERTISE"))):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)  # so that it is put back at the end


@pytest.mark.parametrize("kind", ["DATA", "PULL"])
@pytest.mark.parametrize(
    ("data", "advertise", "bind"),
    [("", "", None), ("10.0.0.1:7", "", "10.0.0.1:7"), ("", "node:7", "0.0.0.0:7"), ("[::]:0", "node:9", "[::]:0")],
)
def test_an_address_to_advertise_listens_everywhere_unless_told_where(
    kind: str, data: str, advertise: str, bind: str | None
) -> None:
    network.on_network(kind, data, advertise, ())
    assert os.environ.get(f"WEIGHTPLANE_{kind}_BIND") == bind
    assert os.environ.get(f"WEIGHTPLANE_{kind}_ADVERTISE") == (advertise or None)


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTPLANE_DATA_BIND", "10.0.0.1:1")
    monkeypatch.setenv("WEIGHTPLANE_DATA_ADVERTISE", "old:1")
    network.on_network("DATA", "10.0.0.2:2", "", ())
    assert os.environ["WEIGHTPLANE_DATA_BIND"] == "10.0.0.2:2" and "WEIGHTPLANE_DATA_ADVERTISE" not in os.environ


def test_interfaces_and_rdma_devices_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_RDMA", tmp_path)
    network.on_network("DATA", "", "", ["lo"])
    assert [os.environ.get(n) for n in NAMES] == ["lo", "=lo", None]
    (tmp_path / "mlx5_0").mkdir()
    network.on_network("DATA", "", "", ["mlx5_0:1", "lo"])
    assert [os.environ.get(n) for n in NAMES] == ["mlx5_0:1,lo", "=lo", "=mlx5_0:1"]
    with pytest.raises(typer.BadParameter, match=r"--interface 'eth77': this host has .*lo.*mlx5_0"):
        network.on_network("DATA", "", "", ["eth77"])


@pytest.mark.parametrize("words", [("--data", "nowhere"), ("--advertise", "node:0"), ("--advertise", "node:99999")])
def test_what_is_no_address_is_wrong_usage(words: tuple[str, str]) -> None:
    needed = ("inference-agent", "--group", "g", "--replica-id", "r", "--engine", "tests.process.coded:make")
    done = weightplane(*needed, *words)
    assert done.returncode == 2 and "expected host:port" in done.stderr, done.stderr


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    done = weightplane("publish", ".", "--group", "g", "--interface", "eth77")
    assert done.returncode == 2 and "eth77" in done.stderr, done.stderr
    assert any(name in done.stderr for _, name in socket.if_nameindex())
