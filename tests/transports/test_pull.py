"""The engine of transports that pull, with readers in the same process (``pull_memory``)."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.transports.pull_memory import MemoryExporter, MemoryTransport
from weightplane.controlplane.core.plan import Bucket, Segment
from weightplane.transports import pull, pull_control, pull_declared, pull_link, pull_senders, pull_wire
from weightplane.transports.base import (
    ArmToken,
    ChannelAborted,
    ChannelSpec,
    ChannelTimeout,
    PeerLost,
    ReceiveChannel,
    TransportError,
)
from weightplane.transports.pull import PullReceiveChannel, PullSendChannel
from weightplane.v1.transport_pb2 import (
    PullArmed,
    PullBucket,
    PullChallenge,
    PullDone,
    PullEndpoint,
    PullHello,
    PullMessage,
    PullProof,
    PullReady,
    PullRegion,
    PullTable,
    PullWelcome,
    UcxRegion,
    UcxSender,
)

KEY = bytes(range(32))
TOKEN = ArmToken("u", 1, 1)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of shared memory of its own, empty again after the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-test-") as made:
        monkeypatch.setenv("WEIGHTPLANE_SHM_DIR", made)
        yield Path(made)
        assert os.listdir(made) == []


@pytest.fixture
def transport(home: Path) -> Iterator[MemoryTransport]:
    made = MemoryTransport()
    yield made
    made.shutdown()


def spec(transport: MemoryTransport, receivers: int = 1, **changes: Any) -> ChannelSpec:
    """A channel from ``s`` to ``r0..``."""
    given: dict[str, Any] = {
        "channel_id": f"c-{os.getpid()}",
        "group": "g",
        "transport": "pull_memory",
        "key": KEY,
        "senders": ("s",),
        "receivers": tuple(f"r{i}" for i in range(receivers)),
        "bucket_bytes": 1000,
        "offers": {"s": transport.offer("s")},
    }
    return ChannelSpec(**(given | changes))


def bucket(index: int, nbytes: int = 1000, receivers: tuple[str, ...] = ("r0",)) -> Bucket:
    return Bucket(index, "s", receivers, (Segment(0, index * nbytes, nbytes),), nbytes)


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


def full(value: int, n: int = 1000) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.uint8)


@pytest.fixture
def pair(transport: MemoryTransport) -> Iterator[tuple[PullSendChannel, PullReceiveChannel]]:
    """A sender and a receiver, both armed for bucket 0 of ``TOKEN``."""
    made = spec(transport)
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    sender.arm(TOKEN, [bucket(0)], soon())
    receiver.arm(TOKEN, [bucket(0)], soon())
    yield sender, receiver
    receiver.close()
    sender.close()


def fails(kind: type[Exception], match: str, call: Callable[..., object], *args: object) -> Callable[[], Exception]:
    """Run a call that blocks on a thread; the function returned waits for its error, which must be of that kind."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call(*args)
        except BaseException as e:
            caught.append(e)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Exception:
        thread.join(10)
        assert not thread.is_alive() and caught, "it did not end, or did not fail"
        with pytest.raises(kind, match=match):
            raise caught[0]
        assert isinstance(caught[0], kind)
        return caught[0]

    return wait


def taken(receiver: ReceiveChannel, what: Bucket, target: torch.Tensor) -> threading.Thread:
    thread = threading.Thread(target=receiver.receive, args=(what, [target]))
    thread.start()
    return thread


# -- the bytes


def test_the_same_list_is_exported_once(transport: MemoryTransport) -> None:
    made = spec(transport, 2)
    sender = transport.open_sender(made, "s")
    receivers = [transport.open_receiver(made, m) for m in made.receivers]
    both = bucket(0, receivers=made.receivers)
    source = full(0)
    spans = [source[:400], source[400:]]
    targets = [torch.zeros(1000, dtype=torch.uint8) for _ in receivers]
    for update in range(1, 5):
        token = ArmToken(f"u{update}", 1, 1)
        source.fill_(update)
        sender.arm(token, [both], soon())
        for receiver in receivers:
            receiver.arm(token, [both], soon())
        threads = [taken(r, both, t) for r, t in zip(receivers, targets, strict=True)]
        sender.send(both, spans if update < 4 else list(spans))
        sender.flush()
        for thread, target in zip(threads, targets, strict=True):
            thread.join(5)
            assert bool((target == update).all())
    exporter = sender._exporter
    assert isinstance(exporter, MemoryExporter) and exporter.exports == 2
    assert all(r._senders.known["s"].declared.entries[0][0] == 1 for r in receivers), (
        "the same memory in another list is no new table"
    )
    for receiver in receivers:
        receiver.close()
    sender.close()


def test_lists_that_nobody_else_holds_are_let_go_of(pair: tuple[PullSendChannel, PullReceiveChannel]) -> None:
    sender, receiver = pair
    exporter = sender._exporter
    assert isinstance(exporter, MemoryExporter)
    for update in range(3):
        token = ArmToken(f"v{update}", 1, 1)
        sender.arm(token, [bucket(0)], soon())
        receiver.arm(token, [bucket(0)], soon())
        target = torch.zeros(1000, dtype=torch.uint8)
        thread = taken(receiver, bucket(0), target)
        sender.send(bucket(0), [full(update + 1)])
        sender.flush()
        thread.join(5)
        assert bool((target == update + 1).all()) and not exporter.held
    receiver.arm(ArmToken("w", 1, 1), [bucket(0)], soon())
    sender.arm(ArmToken("w", 1, 1), [bucket(0)], soon())
    thread = taken(receiver, bucket(0), torch.zeros(1000, dtype=torch.uint8))
    sender.send(bucket(0), [full(9)])
    thread.join(5)
    assert len(receiver._senders.known["s"].declared.regions) == 1, "the receiver was told which regions are gone"


def test_a_long_table_is_split(transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "_SPLIT", 7)
    monkeypatch.setattr(pull, "_TABLE", 100)
    made = spec(transport)
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    sender.arm(TOKEN, [bucket(0)], soon())
    receiver.arm(TOKEN, [bucket(0)], soon())
    source, target = torch.arange(1000).to(torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    thread = taken(receiver, bucket(0), target)
    sender.send(bucket(0), [source[i * 10 : i * 10 + 10].clone() for i in range(100)])
    sender.flush()
    thread.join(5)
    assert bool((target == source).all()) and len(receiver._senders.known["s"].declared.entries[0][1].sizes) == 100
    receiver.close()
    sender.close()


# -- fences


@pytest.mark.parametrize("other", [ArmToken("v", 1, 1), ArmToken("u", 2, 1), ArmToken("u", 1, 2)])
def test_each_part_of_the_token_fences(
    pair: tuple[PullSendChannel, PullReceiveChannel], other: ArmToken, transport: MemoryTransport
) -> None:
    """What an update, epoch or generation left ready is not taken by the next, and is not waited for."""
    sender, receiver = pair
    sender.send(bucket(0), [full(1)])
    receiver.arm(other, [bucket(0)], soon())
    fails(PeerLost, "left this update", sender.flush)()
    sender.arm(other, [bucket(0)], soon())
    target = torch.zeros(1000, dtype=torch.uint8)
    thread = taken(receiver, bucket(0), target)
    sender.send(bucket(0), [full(2)])
    sender.flush()
    thread.join(5)
    assert bool((target == 2).all())


def test_an_answer_of_an_earlier_update_is_no_answer(pair: tuple[PullSendChannel, PullReceiveChannel]) -> None:
    sender, receiver = pair
    sender.send(bucket(0), [full(1)])
    receiver.arm(ArmToken("v", 1, 1), [bucket(0)], soon())
    sender.arm(ArmToken("v", 1, 1), [bucket(0)], soon(0.5))
    sender.send(bucket(0), [full(2)])
    receiver._senders.say(receiver._senders.known["s"], PullMessage(done=PullDone(bucket=0, armed=1)))
    receiver._senders.say(receiver._senders.known["s"], PullMessage(done=PullDone(bucket=77, armed=2)))
    with pytest.raises(ChannelTimeout, match="waited for 'r0' in bucket 0"):
        sender.flush()


# -- peers


def test_who_took_everything_may_leave_before_flush(pair: tuple[PullSendChannel, PullReceiveChannel]) -> None:
    sender, receiver = pair
    thread = taken(receiver, bucket(0), torch.zeros(1000, dtype=torch.uint8))
    sender.send(bucket(0), [full(1)])
    thread.join(5)
    receiver.close()
    while "r0" not in sender._lost:
        time.sleep(0.001)
    sender.flush()


def test_a_receiver_that_leaves_is_named_and_may_be_dropped(transport: MemoryTransport) -> None:
    made = spec(transport, 2)
    sender = transport.open_sender(made, "s")
    receivers = [transport.open_receiver(made, m) for m in made.receivers]
    both = bucket(0, receivers=made.receivers)
    sender.arm(TOKEN, [both], soon())
    for receiver in receivers:
        receiver.arm(TOKEN, [both], soon())
    receivers[0].close()
    while "r0" not in sender._lost:
        time.sleep(0.001)
    source = full(3)
    waiting = fails(PeerLost, "'r0' left: closed", sender.send, both, [source])
    assert waiting().peers == ("r0",)  # type: ignore[attr-defined]
    sender.drop("r0")
    target = torch.zeros(1000, dtype=torch.uint8)
    thread = taken(receivers[1], both, target)
    sender.send(both, [source])
    sender.flush()
    thread.join(5)
    assert bool((target == 3).all())
    again = transport.open_receiver(made, "r0")
    with pytest.raises(ChannelAborted, match="refused 'r0': dropped"):
        again.arm(TOKEN, [both], soon())
    again.close()
    receivers[1].close()
    sender.close()


def test_a_dropped_receiver_is_told(pair: tuple[PullSendChannel, PullReceiveChannel]) -> None:
    sender, receiver = pair
    waiting = fails(PeerLost, "left: dropped", receiver.receive, bucket(0), [torch.zeros(1000, dtype=torch.uint8)])
    sender.drop("r0")
    waiting()
    sender.send(bucket(0), [full(1)])
    sender.flush()


def test_what_was_read_from_a_sender_that_left_does_not_count(
    pair: tuple[PullSendChannel, PullReceiveChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have changed its memory as soon as it had dropped us."""
    sender, receiver = pair
    inner = receiver._importer.pull

    def read(name: str, work: Any) -> None:
        inner(name, work)
        sender.drop("r0")

    monkeypatch.setattr(receiver._importer, "pull", read)
    sender.send(bucket(0), [full(1)])
    with pytest.raises(PeerLost, match="left: dropped"):
        receiver.receive(bucket(0), [torch.zeros(1000, dtype=torch.uint8)])


def test_aborts_end_what_blocks(transport: MemoryTransport) -> None:
    made = spec(transport)
    sender, receiver = transport.open_sender(made, "s"), transport.open_receiver(made, "r0")
    sender.arm(TOKEN, [bucket(0)], soon())
    blocked = fails(ChannelAborted, "enough", sender.send, bucket(0), [full(1)])
    sender.abort("enough")
    blocked()
    with pytest.raises(ChannelAborted, match="refused 'r0': enough"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    receiver.close()
    sender.close()
    late = transport.open_receiver(spec(transport, channel_id="never-opened"), "r0")
    blocked = fails(ChannelAborted, "enough", late.arm, TOKEN, [bucket(0)], soon())
    time.sleep(0.05)
    late.abort("enough")
    blocked()
    late.close()


def test_an_abort_that_ends_the_connection_is_not_blamed_on_the_sender(
    pair: tuple[PullSendChannel, PullReceiveChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort comes between the look whether there was one and the look at the connection, which it ended."""
    sender, receiver = pair
    ended = pull_senders.Sender.ended

    def aborted_just_before(of: pull_senders.Sender) -> bool:
        receiver.abort("enough")
        return ended(of)

    sender.send(bucket(0), [full(1)])
    monkeypatch.setattr(pull_senders.Sender, "ended", aborted_just_before)
    with pytest.raises(ChannelAborted, match="enough"):
        receiver.receive(bucket(0), [torch.zeros(1000, dtype=torch.uint8)])


def test_receiver_waits_for_a_late_sender(transport: MemoryTransport) -> None:
    made = spec(transport)
    receiver = transport.open_receiver(made, "r0")
    with pytest.raises(ChannelTimeout, match="waited for 's'"):
        receiver.arm(TOKEN, [bucket(0)], soon(0.3))
    armed = threading.Thread(target=receiver.arm, args=(TOKEN, [bucket(0)], soon()))
    armed.start()
    sender = transport.open_sender(made, "s")
    armed.join(5)
    assert not armed.is_alive()
    receiver.close()
    sender.close()


def test_a_sender_whose_listener_is_gone_is_lost(transport: MemoryTransport) -> None:
    made = spec(transport)
    transport.shutdown()
    receiver = transport.open_receiver(made, "r0")
    with pytest.raises(PeerLost, match="'s' cannot be reached: its listener is gone"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    receiver.close()


# -- strangers


def connect(transport: MemoryTransport) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5)
    with pull_wire.socket_path(pull_wire.shm_directory(), transport.endpoint().socket) as path:
        made.connect(path)
    return made


def ask(made: socket.socket, message: PullMessage) -> PullMessage | None:
    """Send a message; the answer, or ``None`` at the end of the connection."""
    made.sendall(pull_wire.encode(message))
    return hear(made)


def hear(made: socket.socket) -> PullMessage | None:
    head = made.recv(4, socket.MSG_WAITALL)
    return PullMessage.FromString(made.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)) if head else None


def hello(channel: ChannelSpec, **changes: Any) -> PullMessage:
    given: dict[str, Any] = {
        "protocol": 1,
        "channel_id": channel.channel_id,
        "sender": "s",
        "receiver": "r0",
        "nonce": bytes(32),
    }
    return PullMessage(hello=PullHello(**(given | changes)))


def proven(transport: MemoryTransport, made: ChannelSpec) -> socket.socket:
    """A connection of one who knows the key, welcomed."""
    stranger = connect(transport)
    opening = hello(made)
    challenge = ask(stranger, opening)
    assert challenge is not None
    shown = pull_wire.proof(made.key, "receiver", opening.hello, challenge.challenge.nonce)
    welcome = ask(stranger, PullMessage(proof=PullProof(proof=shown)))
    assert welcome is not None and welcome.WhichOneof("message") == "welcome"
    return stranger


def test_the_key_is_asked_of_both_sides(transport: MemoryTransport) -> None:
    made = spec(transport)
    sender = transport.open_sender(made, "s")
    receiver = transport.open_receiver(spec(transport, key=bytes(32)), "r0")
    with pytest.raises(TransportError, match="'s' does not know the channel's key") as caught:
        receiver.arm(TOKEN, [bucket(0)], soon())
    assert caught.value.peers == ("s",)
    stranger = connect(transport)
    assert ask(stranger, hello(made)) is not None
    refused = ask(stranger, PullMessage(proof=PullProof(proof=bytes(32))))
    assert refused is not None and "key was not shown" in refused.refused.reason and not refused.refused.retry
    assert hear(stranger) is None
    echo = connect(transport)  # a proof of the sender's is none of the receiver's
    challenge = ask(echo, hello(made))
    assert challenge is not None
    refused = ask(echo, PullMessage(proof=PullProof(proof=challenge.challenge.proof)))
    assert refused is not None and "key was not shown" in refused.refused.reason
    for channel in (stranger, echo):
        channel.close()
    receiver.close()
    sender.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5000) + bytes(5000),
        struct.pack("<I", 3) + b"\xff\xff\xff",
        pull_wire.encode(PullMessage(armed=PullArmed(number=1))),
        pull_wire.encode(PullMessage(proof=PullProof(proof=bytes(32)))),
        pull_wire.encode(PullMessage()),
    ],
    ids=["http", "huge", "too-long", "no-message", "armed-first", "proof-first", "empty"],
)
def test_junk_ends_its_own_connection_only(pair: tuple[PullSendChannel, PullReceiveChannel], junk: bytes,
                                           transport: MemoryTransport) -> None:  # fmt: skip
    sender, receiver = pair
    stranger = connect(transport)
    stranger.sendall(junk)
    assert stranger.recv(1) == b""
    stranger.close()
    target = torch.zeros(1000, dtype=torch.uint8)
    thread = taken(receiver, bucket(0), target)
    sender.send(bucket(0), [full(4)])
    sender.flush()
    thread.join(5)
    assert bool((target == 4).all())


@pytest.mark.alone
def test_strangers_that_say_nothing_are_few_and_short_lived(
    transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_control, "_UNPROVEN", 5)
    monkeypatch.setattr(pull_control, "_PROVE_S", 0.4)
    made = spec(transport)
    sender = transport.open_sender(made, "s")
    strangers = [connect(transport) for _ in range(20)]
    assert strangers[0].recv(1) == b"", "the oldest goes first"
    receiver = transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    start = time.monotonic()
    assert all(s.recv(1) == b"" for s in strangers)
    assert time.monotonic() - start < 2
    assert transport._made is not None and len(transport._made._links) == 1
    for stranger in strangers:
        stranger.close()
    receiver.close()
    sender.close()


def test_a_receiver_that_does_not_read_is_cut_off(transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded, and the others get theirs."""
    monkeypatch.setattr(pull_link, "_OUTBOX", 100_000)
    made = spec(transport, 2)
    sender, good = transport.open_sender(made, "s"), transport.open_receiver(made, "r1")
    deaf = proven(transport, made)
    deaf.sendall(pull_wire.encode(PullMessage(armed=PullArmed(update_id="u", epoch=1, generation=1, number=1))))
    buckets = [bucket(i, 6_000, made.receivers) for i in range(40)]
    source = full(5, 6_000)
    spans = [source[i * 2 : i * 2 + 2] for i in range(3_000)]
    good.arm(TOKEN, buckets, soon())
    sender.arm(TOKEN, buckets, soon())
    target = torch.zeros(6_000, dtype=torch.uint8)

    def take() -> None:
        for b in buckets:
            good.receive(b, [target])

    threads = threading.Thread(target=take)
    threads.start()
    lost = None
    for b in buckets:
        try:
            sender.send(b, spans)
        except PeerLost as e:
            lost = e
            sender.drop("r0")
            sender.send(b, spans)
        while b.index not in sender._done["r1"]:  # at the pace of the one that reads
            time.sleep(0.001)
    assert lost is not None and lost.peers == ("r0",) and "does not read" in str(lost)
    sender.flush()
    threads.join(10)
    assert bool((target == 5).all())
    deaf.close()
    good.close()
    sender.close()


def test_a_proven_receiver_that_talks_nonsense_is_lost(transport: MemoryTransport) -> None:
    made = spec(transport)
    sender = transport.open_sender(made, "s")
    sender.arm(TOKEN, [bucket(0)], soon())
    odd = proven(transport, made)
    odd.sendall(pull_wire.encode(PullMessage(table=PullTable(gone=[1]))))
    fails(PeerLost, "'r0' sent what it must not: table", sender.send, bucket(0), [full(1)])()
    odd.close()
    sender.close()


def test_a_newer_connection_of_a_receiver_takes_the_older_ones_place(transport: MemoryTransport) -> None:
    made = spec(transport)
    sender = transport.open_sender(made, "s")
    first = proven(transport, made)
    receiver = transport.open_receiver(made, "r0")
    receiver.arm(TOKEN, [bucket(0)], soon())
    assert first.recv(1) == b""
    sender.arm(TOKEN, [bucket(0)], soon())
    thread = taken(receiver, bucket(0), torch.zeros(1000, dtype=torch.uint8))
    sender.send(bucket(0), [full(1)])
    sender.flush()
    thread.join(5)
    first.close()
    receiver.close()
    sender.close()


# -- a sender in another language, and one that means harm


class Script:
    """A sender that follows a script: after the handshake it says what it is told."""

    def __init__(self, made: ChannelSpec, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(directory / "script"))
        self.socket.listen(1)
        self.made = made
        self.endpoint = PullEndpoint(host_id=pull_wire.host_id(directory), socket="script")

    def serve(self, *messages: PullMessage) -> list[PullMessage]:
        """Prove the key, welcome, wait for ``armed``, say ``messages``; what the receiver says until it ends."""
        peer, _ = self.socket.accept()
        peer.settimeout(5)
        opening = hear(peer)
        assert opening is not None
        shown = pull_wire.proof(self.made.key, "sender", opening.hello, bytes(32))
        answer = ask(peer, PullMessage(challenge=PullChallenge(nonce=bytes(32), proof=shown)))
        assert answer is not None
        assert answer.proof.proof == pull_wire.proof(self.made.key, "receiver", opening.hello, bytes(32))
        said = [ask(peer, PullMessage(welcome=PullWelcome(ucx=UcxSender(agent_metadata=b"memory"))))]
        for message in messages:
            peer.sendall(pull_wire.encode(message))
        while said[-1] is not None:
            said.append(hear(peer))
        peer.close()
        return [m for m in said if m is not None]


@pytest.fixture
def script(transport: MemoryTransport, home: Path) -> Iterator[Script]:
    made = Script(spec(transport, offers={}), home)
    yield made
    made.socket.close()
    (home / "script").unlink()


def scripted(transport: MemoryTransport, script: Script, *messages: PullMessage) -> tuple[Any, list[PullMessage]]:
    """Receive bucket 0 from a script; the error or the bytes, and what the receiver said."""
    from tests.transports.pull_memory import MemoryImporter

    receiver = PullReceiveChannel(
        script.made, "r0", pull_wire.shm_directory(), {"s": script.endpoint}, MemoryImporter()
    )
    said: list[PullMessage] = []
    thread = threading.Thread(target=lambda: said.extend(script.serve(*messages)))
    thread.start()
    receiver.arm(TOKEN, [bucket(0)], soon(2))
    target = torch.zeros(1000, dtype=torch.uint8)
    result: Any = target
    try:
        receiver.receive(bucket(0), [target])
    except Exception as e:
        result = e
    receiver.close()
    thread.join(5)
    return result, said


def region(number: int, source: torch.Tensor) -> PullRegion:
    return PullRegion(id=number, ucx=UcxRegion(address=source.data_ptr(), nbytes=source.numel(), device=-1))


def place(**changes: Any) -> PullBucket:
    given: dict[str, Any] = {"bucket": 0, "version": 1, "regions": [1], "offsets": [0], "sizes": [1000]}
    return PullBucket(**(given | changes))


def test_the_protocol_as_another_language_speaks_it(transport: MemoryTransport, script: Script) -> None:
    source = torch.arange(1000).to(torch.uint8)
    table = PullMessage(table=PullTable(regions=[region(1, source)], buckets=[place()]))
    found, said = scripted(transport, script, table, PullMessage(ready=PullReady(bucket=0, armed=1, version=1)))
    assert bool((found == source).all())
    assert said[0].armed == PullArmed(update_id="u", epoch=1, generation=1, number=1)
    assert said[1].done == PullDone(bucket=0, armed=1) and said[2].bye.reason == "closed"


READY = PullMessage(ready=PullReady(bucket=0, armed=1, version=1))
SOURCE = torch.zeros(1000, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([READY], "ready, but not where its bytes lie"),
        ([PullMessage(table=PullTable(regions=[region(1, SOURCE)] * 2))], "declared a region twice"),
        ([PullMessage(table=PullTable(buckets=[place()]))], "in a region that it has not declared"),
        ([PullMessage(table=PullTable(regions=[region(1, SOURCE)], buckets=[place(sizes=[0])]))], "make no sense"),
        ([PullMessage(table=PullTable(regions=[region(1, SOURCE)], buckets=[place(sizes=[1, 2])]))], "make no sense"),
        (
            [PullMessage(table=PullTable(regions=[region(1, SOURCE)], buckets=[place(sizes=[999])])), READY],
            "not where its bytes lie",
        ),
        (
            [PullMessage(table=PullTable(regions=[region(1, SOURCE)], buckets=[place(offsets=[1])])), READY],
            "ends behind its region",
        ),
        ([PullMessage(done=PullDone(bucket=0, armed=1))], "sent done, which is not for a receiver"),
        ([PullMessage(ready=PullReady(bucket=0, armed=9, version=1))], "closed the connection|until the deadline"),
    ],
    ids=["no-table", "twice", "no-region", "empty", "uneven", "short", "behind", "not-for-us", "stale"],
)
def test_a_sender_that_declares_nonsense_is_named(
    transport: MemoryTransport, script: Script, messages: list[PullMessage], text: str
) -> None:
    found, _ = scripted(transport, script, *messages)
    assert isinstance(found, TransportError) and found.peers == ("s",)
    with pytest.raises(TransportError, match=text):
        raise found


def test_what_a_sender_may_declare_is_bounded(
    transport: MemoryTransport, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_declared, "_MOST", 50)
    many = [place(bucket=i, regions=[1] * 10, offsets=[0] * 10, sizes=[1] * 10) for i in range(6)]
    table = PullMessage(table=PullTable(regions=[region(1, SOURCE)], buckets=many))
    found, _ = scripted(transport, script, table)
    assert isinstance(found, TransportError) and "more than 50 chunks" in str(found)


# -- addresses


def test_another_host_is_reached_by_tcp(transport: MemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = MemoryTransport()
    monkeypatch.setenv("WEIGHTPLANE_PULL_BIND", "127.0.0.1:0")
    offer = elsewhere.offer("s")
    assert offer.ucx.endpoint.address.startswith("127.0.0.1:") and not offer.ucx.endpoint.address.endswith(":0")
    offer.ucx.endpoint.host_id = "another"
    made = spec(transport, offers={"s": offer})
    sender, receiver = elsewhere.open_sender(made, "s"), transport.open_receiver(made, "r0")
    sender.arm(TOKEN, [bucket(0)], soon())
    receiver.arm(TOKEN, [bucket(0)], soon())
    target = torch.zeros(1000, dtype=torch.uint8)
    thread = taken(receiver, bucket(0), target)
    sender.send(bucket(0), [full(6)])
    sender.flush()
    thread.join(5)
    assert bool((target == 6).all())
    receiver.close()
    sender.close()
    elsewhere.shutdown()


def test_a_sender_of_another_host_that_serves_its_own_only(transport: MemoryTransport) -> None:
    offer = transport.offer("s")
    offer.ucx.endpoint.host_id = "elsewhere/1.1/0"
    receiver = transport.open_receiver(spec(transport, offers={"s": offer}), "r0")
    with pytest.raises(TransportError, match=r"'s' is at elsewhere.*set WEIGHTPLANE_PULL_BIND there"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    offer.ucx.endpoint.address = "192.0.2.7:1000"
    receiver = transport.open_receiver(spec(transport, offers={"s": offer}), "r0")
    with pytest.raises(TransportError, match="plaintext off loopback"):
        receiver.arm(TOKEN, [bucket(0)], soon())
    offer.ucx.endpoint.host_id = transport.endpoint().host_id
    offer.ucx.endpoint.socket = "../secret"
    receiver = transport.open_receiver(spec(transport, offers={"s": offer}), "r0")
    with pytest.raises(TransportError, match="no file name"):
        receiver.arm(TOKEN, [bucket(0)], soon())


@pytest.mark.parametrize(
    ("bind", "advertise", "insecure", "text"),
    [
        ("127.0.0.1:0", "", "", ""),
        ("[::1]:0", "", "", ""),
        ("nowhere", "", "", "expected host:port"),
        ("0.0.0.0:1", "", "1", "say what receivers dial"),
        ("10.0.0.1:1", "0.0.0.0:1", "1", "a wildcard address reaches nobody"),
        ("10.0.0.1:1", "", "", "WEIGHTPLANE_INSECURE=1"),
        ("10.0.0.1:1", "", "1", ""),
        ("0.0.0.0:1", "host:1", "1", ""),
    ],
)
def test_addresses_are_never_open_by_accident(
    bind: str, advertise: str, insecure: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTPLANE_INSECURE", insecure)
    found = pull_wire.problem_of(bind, advertise)
    assert text in found and bool(text) == bool(found)


def test_the_socket_is_private_and_stale_ones_are_swept(transport: MemoryTransport, home: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(home / "weightplane-pull-1-dead"))
    stale.close()
    name = transport.endpoint().socket
    assert os.listdir(home) == [name] and (home / name).stat().st_mode & 0o777 == 0o600
    other = MemoryTransport()
    other.endpoint()
    assert len(os.listdir(home)) == 2, "the living are left alone"
    other.shutdown()
