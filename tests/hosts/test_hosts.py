"""The whole fleet over several hosts: init, publish, cut one off, heal, publish again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.fleet import HOSTS, REPLICAS, TRAINERS, Hosts
from tests.hosts.net import CUTS, Network, cut_problem, why_not
from tests.process.coded import LAYERS, SIZE
from tests.process.harness import eventually
from weightplane.transports import registry
from weightplane.v1 import fleet_pb2

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made"),
]
NBYTES = LAYERS * SIZE * 4
#: UCX takes shared memory between namespaces of one kernel, unless it is told that there is only the network.
UCX = {"UCX_TLS": "tcp,self"}


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(HOSTS) as made:
        yield made


def needs(transport: str) -> None:
    found = registry.available()[transport]
    if not found.ok:
        pytest.skip(f"{transport}: {found.reason}")


@pytest.mark.parametrize("transport", ["grpc", "ucx"])
def test_six_hosts_publish_lose_one_and_have_it_back(transport: str, network: Network, tmp_path: Path) -> None:
    needs(transport)
    with Hosts(tmp_path, network, transport, UCX if transport == "ucx" else {}) as h:
        try:
            scenario(h, network)
        except BaseException:
            print("\n".join(f"--- {host}\n{h.log(host)}" for host in HOSTS))
            raise


def scenario(h: Hosts, network: Network) -> None:
    h.wait(len(REPLICAS))
    before = {host: network.received(host) for host in REPLICAS}
    for step in (1, 2):
        answers = h.publish(step)
        assert all(a["ok"] and set(a["ready"]) == set(REPLICAS) for a in answers), answers
        assert {h.serves(host) for host in REPLICAS} == {step}
    for host in REPLICAS:
        assert network.received(host) - before[host] > 2 * NBYTES, "the bytes did not come by its cable"
    step = 2
    for how in CUTS:
        if cut_problem(how):
            continue
        lost = REPLICAS[step % 3]
        others = sorted(set(REPLICAS) - {lost})
        # cut off while its bytes come: the update goes on without it, long before its deadline
        step += 1
        network.slow(lost)
        answers = h.publish(step, during=lambda n=lost, w=how: cut_while_bytes_come(network, n, n, w), failure="retry")  # type: ignore[misc]
        assert all(a["ok"] and sorted(a["ready"]) == others and a["took"] < 10 for a in answers), (how, answers)
        network.fast(lost)
        # without it
        step += 1
        answers = h.publish(step)
        assert all(a["ok"] and sorted(a["ready"]) == others for a in answers), (how, answers)
        assert {h.serves(host) for host in others} == {step} and h.routable() == others
        network.heal(lost, how)

        def back(host: str = lost) -> bool:
            found = h.info(host)
            return found is not None and found.liveness == fleet_pb2.LIVENESS_LIVE and not found.may_not_join

        eventually(back, f"{lost} is back after {how}", 60)
        step += 1
        answers = h.publish(step)
        assert all(a["ok"] and set(a["ready"]) == set(REPLICAS) for a in answers), (how, answers)
        assert {h.serves(host) for host in REPLICAS} == {step} and h.routable() == sorted(REPLICAS)
    assert all(p.poll() is None for p in h.processes.values()), "a process ended over a cut cable"


def cut_while_bytes_come(network: Network, to: str, host: str, how: str) -> None:
    """Cut ``host`` off once a part of the update, and not all of it, has come to ``to``."""
    before = network.received(to)
    eventually(lambda: network.received(to) - before > NBYTES // 4, f"bytes come to {to}")
    assert network.received(to) - before < NBYTES
    network.cut(host, how)


def test_a_trainer_host_that_is_cut_off_aborts_the_update_by_name(network: Network, tmp_path: Path) -> None:
    how = "port taken away"
    with Hosts(tmp_path, network, "grpc", {}) as h:
        h.wait(len(REPLICAS))
        assert all(a["ok"] for a in h.publish(1))
        network.slow("i0")
        began = time.monotonic()
        for host in TRAINERS:
            h.tell(host, step=2, options={"failure": "raise"})
        cut_while_bytes_come(network, "i0", "t1", how)
        said = h.heard("t0")
        assert time.monotonic() - began < 10
        assert not said["ok"] and "rank/1" in str(said["failure"]), said
        assert {h.serves(host) for host in REPLICAS} == {1} and h.routable() == sorted(REPLICAS)
        network.fast("i0")
        network.heal("t1", how)
        said = h.heard("t1")
        assert not said["ok"] and said["error"] != "OutcomeUnknown", said
        answers = h.publish(3)
        assert all(a["ok"] and set(a["ready"]) == set(REPLICAS) for a in answers), answers
        assert {h.serves(host) for host in REPLICAS} == {3}
