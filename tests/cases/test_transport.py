"""Cases of kind transport that are not critical, by id: who cannot be reached, breaks, or never ends; and is back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.base import MOVERS, Small, holds, must, site, soon
from tests.cases.card_models import Even
from tests.cases.cards import TWINS, Stand, cards, on_sender
from tests.cases.cases_control import held_up, in_thread
from tests.cases.test_cards import twins
from tests.cases.test_control import fleet_of
from tests.cases.wires import WIRES, Wire, param
from tests.trainer_agent.fleet import fill
from tests.transports.host_card import HostCard, HostCardIpc
from tests.transports.pull_memory import MemoryTransport
from tests.transports.test_pull import TOKEN, bucket, home, spec, transport
from weightplane.controlplane.core.reasons import Reason
from weightplane.trainer_agent.errors import UpdateFailed, UpdateRefused
from weightplane.trainer_agent.sources import StateDictSource
from weightplane.transports import cuda_facts, registry
from weightplane.transports.base import ChannelTimeout, PeerLost, TransportError
from weightplane.transports.cuda_facts import Device, Facts
from weightplane.transports.cuda_import import CudaIpcImporter
from weightplane.transports.external import set_mover
from weightplane.transports.ucx_agent import Agent, UcxError, package
from weightplane.v1 import fleet_pb2

__all__ = ["home", "transport", "twins"]

ROOT = Path(__file__).resolve().parents[2]
ucx = pytest.mark.skipif(not package(), reason="NIXL is not installed (tools/test-nixl.txt)")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def wires(*transports: str) -> Any:
    return pytest.mark.parametrize("wire", [param(WIRES[f"{t}-host"]) for t in transports])


# --- peers that come late, die and come back


def test_X18_one_failed_attempt_puts_nobody_on_a_list() -> None:
    """Replicas that are not there yet, then a control plane that is not: the same trainer succeeds a moment later."""
    with site() as f:
        module = Small(1)
        publisher = f.publisher(module)
        with pytest.raises(UpdateRefused):
            publisher.publish(1)
        f.replica("r0", _engine())
        assert publisher.publish(1).ready == ("r0",) and holds(f.engines["r0"], module)
        f.plane.stop()
        late = f.publisher(module, trainer_id="late", takeover=True, init_timeout=20)
        waiting = in_thread(late.init)
        waiting.join(0.5)
        assert waiting.is_alive(), "it tries until its deadline"
        f.plane.start()
        waiting.join(20)
        assert not waiting.is_alive() and late._hold.bound
        soon("the replica is back", lambda: "r0" in f.state().replicas and f.state().replicas["r0"].reported, 20)
        fill(module, 2)
        assert late.publish(2).ready == ("r0",) and holds(f.engines["r0"], module)


def _engine() -> Any:
    from weightplane.inference_agent.engines.torch_module import TorchModuleEngine

    return TorchModuleEngine(Small())


@pytest.mark.timeout(180)
@wires("ucx", "nccl")
def test_X19_X20_X21_a_peer_that_died_is_replaced_under_its_name_and_closing_is_bounded(wire: Wire) -> None:
    """Killed in a bucket: the error is typed. Back under its name: the next publish of the same trainer goes there, and
    to no endpoint that is dead. Killed again: everything closes at once."""
    with cards(wire, "small", heartbeat=True) as c:
        module = on_sender(wire, Small(1))
        publisher = c.publisher(module, update_timeout=15)
        _killed_in_a_bucket(c, publisher)
        c.replace_twin()
        c.join("r0", "small", heartbeat=True)
        fill(module, 2)
        with must("it is used under its name again, without another init"):
            receipt = publisher.publish(2)
        assert receipt.ready == ("r0",)
        c.exact("the values are exact", module)
        _killed_in_a_bucket(c, publisher)
        began = time.monotonic()
        publisher.close()
        assert time.monotonic() - began < 15


def _killed_in_a_bucket(c: Stand, publisher: Any) -> None:
    c.twin.do("hold", point="replica.receive.inside", nth=3)
    handle = publisher.publish_async(1)
    assert c.twin.do("inside", seconds=20)
    c.twin.kill()
    with pytest.raises(UpdateFailed) as caught:
        handle.result(20)
    reasons = {f.reason for f in caught.value.failures.values()}
    assert caught.value.failures.keys() == {"r0"}, caught.value
    assert reasons <= {Reason.MEMBER_LOST, Reason.TRANSPORT}, reasons


@pytest.mark.timeout(180)
@wires("nccl")
def test_X27_when_one_of_two_receivers_dies_what_is_left_is_torn_down_in_bounded_time(wire: Wire) -> None:
    with cards(wire, "small", heartbeat=True) as c:
        other = TWINS.take()
        other.do("use", wire=wire.id)
        c.join("r1", "small", twin=other, heartbeat=True)
        publisher = c.publisher(on_sender(wire, Small(1)), update_timeout=20)
        publisher.init()
        _killed_in_a_bucket(c, publisher)
        began = time.monotonic()
        other.do("end", 20)
        publisher.close()
        assert time.monotonic() - began < 15
        other.close()


@wires("cuda_ipc", "nccl")
def test_X23_what_is_accepted_and_never_completes_ends_by_the_deadline(wire: Wire) -> None:
    """Copies that are queued on the card and do not end; in finish the deadline says so, and whom it waited for."""
    with cards(wire, "even") as c:
        module = on_sender(wire, Even())
        publisher = c.publisher(module, bucket_bytes=Even.BUCKET)
        publisher.publish(1)
        c.twin.do("drag", seconds=1.5)
        began = time.monotonic()
        with pytest.raises(UpdateFailed) as caught:
            publisher.publish(2, update_timeout=1.0)
        assert time.monotonic() - began < 6, "by the deadline, and not when the copies end: after nine seconds"
        assert "r0" in str(caught.value), caught.value


def test_X23_a_users_mover_that_never_returns_ends_by_the_deadline() -> None:
    with site("r0") as f:
        go = threading.Event()
        set_mover("rank/0", lambda bucket, spans: None)
        set_mover("r0/0", lambda bucket, spans: held_up(go, bucket.index))
        try:
            publisher = f.publisher(Small(1), transport="external")
            publisher.init()
            with pytest.raises(UpdateFailed, match=r"r0.*deadline|deadline.*r0|did not vote"):
                publisher.publish(1, update_timeout=1.0)
            assert f.engines["r0"].held()[0].version == 0 and not f.check_replica("r0").ready
        finally:
            go.set()
            for member in ("rank/0", "r0/0"):
                set_mover(member, None)
        assert f.publisher(Small(1), takeover=True).publish(2).ready == ("r0",)


# --- registration and reads


@pytest.mark.parametrize("transport_name", MOVERS)
def test_X25_one_tensor_under_two_names_is_registered_and_sent(transport_name: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.zeros(3000), requires_grad=False)
            self.two = nn.Parameter(torch.zeros(3000), requires_grad=False)

    tensor = torch.arange(3000.0)
    with site("r0", make=Two) as f:
        publisher = f.publisher(StateDictSource({"one": tensor, "two": tensor}), transport=transport_name)
        live = f.engines["r0"].modules[0]
        for step in (1, 2, 3):
            tensor.add_(1)
            publisher.publish(step, mode="in_place" if step == 2 else "staged")
            assert torch.equal(live.get_parameter("one"), tensor) and torch.equal(live.get_parameter("two"), tensor)


@ucx
@pytest.mark.parametrize("side", ["rank/0", "r0/0"])
def test_X28_X33_memory_that_cannot_be_registered_is_an_error_with_its_bucket_and_what_to_do(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on registered memory, or a GPU without peer memory ("bad address"): nothing is said to be there."""
    register = Agent.register

    def limited(self: Agent, memory: Any) -> None:
        if self.member == side and any(nbytes > 64 for _, _, nbytes, _ in memory):
            raise UcxError("memory cannot be registered: Bad address")
        register(self, memory)

    with site("r0") as f:
        module = Small(1)
        with monkeypatch.context() as m:
            m.setattr(Agent, "register", limited)
            with pytest.raises(UpdateFailed) as caught:
                f.publisher(module, transport="ucx", trainer_id="a").publish(1)
            text, failures = str(caught.value), caught.value.failures
            assert "Bad address" in text and "bucket 0" in text and "ulimit -l" in text, text
            assert [x.reason for x in failures.values()] == [Reason.TRANSPORT]
            if side == "r0/0":
                assert failures["r0"].tensors == ("embed.weight",)
            assert f.engines["r0"].held()[0].version == 0
        again = f.publisher(module, transport="ucx", trainer_id="b", takeover=True)
        assert again.publish(2).ready == ("r0",) and holds(f.engines["r0"], module)


@ucx
@pytest.mark.parametrize("call", ["start", "done"])
def test_X33_X37_a_read_that_fails_is_an_error_with_peer_path_size_and_tensor(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site("r0") as f:
        module = Small(1)
        publisher = f.publisher(module, transport="ucx")
        publisher.publish(1)
        fill(module, 2)

        def fails(self: Agent, handle: Any) -> bool:
            raise UcxError("the read failed: NIXL_ERR_REMOTE_DISCONNECT")

        with monkeypatch.context() as m:
            if call == "done":
                m.setattr(Agent, "start", lambda self, handle: False)
            m.setattr(Agent, call, fails)
            with pytest.raises(UpdateFailed) as caught:
                publisher.publish(2, mode="staged")
        failure = caught.value.failures["r0"]
        assert failure.reason is Reason.TRANSPORT and failure.tensors == ("embed.weight",), failure
        for word in ("'rank/0'", "bucket 0 of 4096 bytes", "into cpu", "cma/memory", "REMOTE_DISCONNECT"):
            assert word in failure.message, (word, failure.message)
        assert publisher.publish(3).ready == ("r0",) and holds(f.engines["r0"], module)


# --- addresses, platforms, settings


@pytest.fixture
def unanswered() -> Iterator[str]:
    """The address of a host that answers nothing: a socket whose queue is full."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        filling = [socket.socket() for _ in range(4)]
        for s in filling:
            s.setblocking(False)
            s.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"
        for s in filling:
            s.close()


def test_X31_who_cannot_be_reached_is_named_with_the_address_that_was_tried(
    transport: MemoryTransport, unanswered: str
) -> None:
    """The dialling that ``ucx`` and ``cuda_ipc`` share; the interface is the user's to choose, and that is said too."""

    def arm(address: str, seconds: float) -> Callable[[], None]:
        offer = transport.offer("s")
        offer.ucx.endpoint.host_id, offer.ucx.endpoint.address = "another", address
        receiver = transport.open_receiver(spec(transport, offers={"s": offer}), "r0")
        return lambda: receiver.arm(TOKEN, [bucket(0)], time.monotonic() + seconds)

    with pytest.raises(ChannelTimeout) as late:
        arm(unanswered, 0.4)()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(PeerLost) as lost:
            arm(nobody, 5)()
    for e, address in ((late, unanswered), (lost, nobody)):
        assert address in str(e.value) and e.value.peers == ("s",), e.value
        assert "WEIGHTPLANE_PULL_BIND" in str(e.value), e.value


_PUBLISHES = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
from tests.cases.base import Small, holds, site
from weightplane.trainer_agent.errors import UpdateFailed
with site("r0") as f:
    module = Small(1)
    publisher = f.publisher(module, transport="ucx", update_timeout=15)
    try:
        for step in range(1, 4):
            publisher.publish(step)
        print("fine", holds(f.engines["r0"], module))
    except UpdateFailed as e:
        print(str(e).replace("\\n", " "))
"""


def published(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PUBLISHES]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**ENVIRONMENT, **environment}, check=False
    )


@ucx
def test_X40_cpu_tensors_over_ucx_end_without_a_word() -> None:
    done = published()
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine True\n", "")


@ucx
def test_X29_transports_that_cannot_notice_a_lost_peer_are_refused_by_their_list() -> None:
    """UCX has none among these for a connection that is to fail when its peer does."""
    done = published(UCX_TLS="cuda_copy,cuda_ipc,sm,self")
    assert done.returncode == 0, done.stderr
    for word in ("TRANSPORT [rank/0]", "UCX_TLS=cuda_copy,cuda_ipc,sm,self", "no peer failure handler"):
        assert word in done.stdout, (word, done.stdout)


def test_X32_a_handle_is_opened_on_the_card_that_it_names_whatever_its_number_here() -> None:
    """No tuple of torch's is rebuilt: typed fields name the card by UUID, and each side numbers the cards by itself."""
    a, b = Device("aaaa", 0), Device("bbbb", 1)
    both = frozenset({frozenset({"aaaa", "bbbb"})})
    turned = Facts(torch_cuda="13.0", devices=(Device("bbbb", 0), Device("aaaa", 1)), peers=both, complete=True)
    assert cuda_facts.pair_problem(a, turned.devices[1], turned) == ""
    assert cuda_facts.pair_problem(b, turned.devices[0], turned) == ""
    apart = Facts(torch_cuda="13.0", devices=turned.devices, peers=frozenset(), complete=True)
    importer = CudaIpcImporter(_TwoCards(), apart)
    assert [importer._problem(n, "aaaa") != "" for n in (0, 1)] == [True, False], "number 1 here is its card"
    assert "no peer access" in importer._problem(0, "aaaa")


class _TwoCards(HostCard):
    def count(self) -> int:
        return 2

    def uuid(self, device: int) -> str:
        return ("bbbb", "aaaa")[device]


@pytest.mark.parametrize(
    "facts",
    [
        Facts(torch_cuda="13.0", devices=(Device("host-card", 0),), complete=True, kernel="5.15-microsoft-WSL2"),
        Facts(torch_cuda="13.0", devices=(), complete=True),
        Facts(torch_cuda="13.0", devices=(Device("c", 0),), complete=True, allocator={"expandable_segments": "True"}),
    ],
    ids=["WSL 2", "no card", "expandable segments"],
)
def test_M13_X39_a_platform_without_ipc_offers_none_and_another_transport_is_chosen(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At init, from the platform's facts, and not when a handle cannot be opened in an update."""

    class Platform(HostCardIpc):
        def facts(self, *, deep: bool) -> Facts:
            return facts

    made = Platform()
    monkeypatch.setitem(registry._instances, "cuda_ipc", made)
    with pytest.raises(TransportError, match=r"WSL 2|no GPU|expandable_segments:False"):
        made.offer("rank/0")
    with site("r0") as f:
        module = Small(1)
        publisher = f.publisher(module, transport="")
        assert publisher.publish(1).ready == ("r0",) and holds(f.engines["r0"], module)
        asked = fleet_pb2.ListReplicasRequest(group="g", transports=True)
        (replica,) = fleet_of(publisher).ListReplicas(asked, timeout=10).replicas
        assert [t.transport for t in replica.transports] not in ([], ["cuda_ipc"]), replica.transports
    made.shutdown()
