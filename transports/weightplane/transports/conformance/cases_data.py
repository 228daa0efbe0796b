"""Conformance: the right bytes arrive, whatever the tensors look like, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .harness import Fleet, PeerError

MakeFleet = Callable[..., Fleet]
BUCKET = 64 << 10

__all__ = [
    "test_bucket_edges",
    "test_every_dtype_shape_and_stride",
    "test_mismatched_tokens_move_nothing",
    "test_more_than_two_gib_in_one_tensor",
    "test_nan_payloads",
    "test_quarters_to_halves",
    "test_several_calls_of_one_update",
    "test_source_may_be_spoiled_after_flush",
    "test_stale_bytes_are_never_delivered",
    "test_ten_thousand_tiny_tensors",
    "test_tied_names",
    "test_two_channels_at_once",
    "test_unicode_names",
]


@pytest.mark.parametrize("receivers", [1, 8])
@pytest.mark.parametrize("layout", ["", "plain"], ids=["into-strided", "into-plain"])
def test_every_dtype_shape_and_stride(fleet: MakeFleet, receivers: int, layout: str) -> None:
    """All dtypes: contiguous, 0-dim, empty, transposed, strided, at an offset; senders' digests stay equal."""
    f = fleet("dtypes", receivers=["full"] * receivers, bucket_bytes=1000, layout=layout)
    f.open()
    f.update(1)
    f.update(2)


def test_nan_payloads(fleet: MakeFleet) -> None:
    """NaN payloads of every floating dtype arrive as they are."""
    f = fleet("nan")
    f.open()
    f.update(3)


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_tied_names(fleet: MakeFleet, shared: bool) -> None:
    """Both names of a tied pair hold the value, in one storage or in two; its bytes travel once."""
    f = fleet("tied", bucket_bytes=1000, shared_ties=shared)
    f.open()
    f.update(4)
    landed = f.peers["r0"].call("landed", channel=f.channel)
    assert landed == 64 * 32 * 2 + 32 * 4


def test_unicode_names(fleet: MakeFleet) -> None:
    """Any Unicode name."""
    f = fleet("names", bucket_bytes=100)
    f.open()
    f.update(5)


@pytest.mark.parametrize("bucket", [4096, 1 << 20, (1 << 20) + 8192])
def test_bucket_edges(fleet: MakeFleet, bucket: int) -> None:
    """Tensors of one byte less than a bucket, a bucket, one more, and four."""
    f = fleet(f"edges:{bucket}", receivers=["full"] * 2, bucket_bytes=bucket, fit=True)
    f.open()
    f.update(6)


def test_ten_thousand_tiny_tensors(fleet: MakeFleet) -> None:
    """10,000 tensors of a few bytes, fast."""
    f = fleet("tiny")
    f.open()
    f.update(7)
    assert f.update(8) < 5


def test_quarters_to_halves(fleet: MakeFleet) -> None:
    """Four senders with quarters, two receivers with halves cut the other way, and two with whole copies."""
    f = fleet(
        "matrix:64:48",
        senders=[f"rows:{i}/4" for i in range(4)],
        receivers=["cols:0/2", "cols:1/2", "full", "full"],
        bucket_bytes=500,
    )
    f.open()
    f.update(9)
    f.update(10)


def test_several_calls_of_one_update(fleet: MakeFleet) -> None:
    """One update in three calls, armed one after another with the same token."""
    f = fleet(f"blob:9:{BUCKET}", receivers=["full"] * 2, bucket_bytes=BUCKET, fit=True)
    f.open()
    for future in f.each("fill", f.senders, seed=11).values():
        future.result(60)
    for first in (0, 3, 6):
        f.arm("u-calls", first=first, stop=first + 3)
        for future in f.move(first=first, stop=first + 3).values():
            future.result(60)
    f.check(11)


def test_two_channels_at_once(fleet: MakeFleet) -> None:
    """Two channels between the same kind of members, moving at the same time."""
    a = fleet("blob:8:1000000", receivers=["full"] * 2, fit=True)
    b = fleet("blob:8:1000000", receivers=["full"] * 2, fit=True)
    for f in (a, b):
        f.open()
    for round_ in (1, 2):
        for k, f in enumerate((a, b)):
            for future in f.each("fill", f.senders, seed=20 + 2 * round_ + k).values():
                future.result(60)
            f.arm()
        moves = [*a.move().values(), *b.move().values()]
        for future in moves:
            future.result(60)
        for k, f in enumerate((a, b)):
            f.check(20 + 2 * round_ + k)


def test_source_may_be_spoiled_after_flush(fleet: MakeFleet) -> None:
    """What the sender writes over its tensors right after flush reaches nobody."""
    f = fleet(f"blob:40:{BUCKET}", receivers=["full"] * 2, bucket_bytes=BUCKET, fit=True)
    f.open()
    for seed in (30, 31, 32):
        for future in f.each("fill", f.senders, seed=seed).values():
            future.result(60)
        f.arm()
        for future in [*f.move(f.senders, mutate=True).values(), *f.move(f.receivers).values()]:
            future.result(60)
        f.check(seed, f.receivers)


def test_stale_bytes_are_never_delivered(fleet: MakeFleet) -> None:
    """Bytes that an update left in flight do not reach the next one.

    What a collective was told cannot be taken back: its channel refuses to go on, and a new one has nothing of it.
    """
    f = fleet("blob:6:1000", receivers=["full"] * 2, bucket_bytes=1000, fit=True)
    f.open()
    if f.collective:
        f.update(39)
        for future in f.each("fill", f.senders, seed=40).values():
            future.result(60)
        f.arm()
        f.move(f.senders, stop=3, flush=False)["s0"].result(60)
        with pytest.raises(PeerError, match="unfinished") as caught:
            f.arm("u-next", f.senders)
        assert caught.value.kind == "ChannelAborted"
        for member in f.receivers:
            f.peers[member].call("abort", channel=f.channel, reason="the sender left")
        f.close_channel()
        f.open()
        f.update(41)
        return
    for seed in (40, 42, 44):
        for future in f.each("fill", f.senders, seed=seed).values():
            future.result(60)
        f.arm()
        sent = f.move(f.senders, stop=3, flush=False)
        f.move(["r0"], stop=1)["r0"].result(60)  # r0 takes one of three, r1 none
        sent["s0"].result(60)
        f.update(seed + 1)


def test_mismatched_tokens_move_nothing(fleet: MakeFleet) -> None:
    """Sides armed for different updates: nothing is written, and both are out soon after the deadline."""
    f = fleet("blob:2:1000", bucket_bytes=1000)
    f.open()
    f.update(49)  # the first connection may take longer than the short deadline below
    for future in f.each("fill", seed=-1).values():
        future.result(60)
    f.arm("u-new", ["r0"], deadline_s=1.5)
    f.arm("u-old", ["s0"], deadline_s=1.5)
    f.peers["s0"].call("fill", seed=50)
    for member, future in f.move().items():
        with pytest.raises(PeerError) as caught:
            future.result(10)
        assert caught.value.kind in {"ChannelTimeout", "PeerLost", "ChannelAborted", "TransportError"}, member
    f.check(-1, ["r0"])


@pytest.mark.large
@pytest.mark.timeout(900)
def test_more_than_two_gib_in_one_tensor(fleet: MakeFleet) -> None:
    """One tensor of 2**31 + 4097 bytes."""
    f = fleet("large", bucket_bytes=256 << 20, deadline_s=600)
    f.open()
    f.peers["s0"].call("fill", 300, seed=60)
    f.arm()
    for future in f.move().values():
        future.result(600)
    digests = [d.result(600).value for d in f.each("digests").values()]
    assert digests[0] == digests[1]
