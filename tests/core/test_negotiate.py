"""Which transport reaches which worker, and the words for the others: from facts as members offer them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weightplane.controlplane.core.model import Channel, Choice, Offer, Rank, Replica, Worker
from weightplane.controlplane.core.negotiate import (
    PREFERENCE,
    bind,
    choose,
    members_of,
    out_of_reach,
    verify_by_default,
)
from weightplane.controlplane.core.states import Mode, Verify

ALL = ("cuda_ipc", "nccl", "ucx", "shm", "grpc", "external")
SEED = b"s" * 32


def offers(names: Sequence[str], local: Sequence[str] = ()) -> tuple[Offer, ...]:
    return tuple(Offer(n, n.encode(), n in local) for n in names)


def rank(number: int = 0, host: str = "h1", gpu: str = "", names: Sequence[str] = ALL) -> Rank:
    return Rank(number, host, gpu, offers(names))


def replica(name: str, *workers: Worker, modes: tuple[Mode, ...] = (Mode.STAGED, Mode.IN_PLACE)) -> Replica:
    return Replica(name, f"{name}-life", workers=workers, modes=modes)


def worker(
    index: int = 0, host: str = "h1", gpu: str = "", names: Sequence[str] = ALL, local: Sequence[str] = ()
) -> Worker:
    return Worker(index, host, gpu, offers(names, local))


# --- one worker -----------------------------------------------------------------------------------------------------


def test_on_one_host_without_gpus_shared_memory_comes_first() -> None:
    name, reason, refusals = choose([rank()], worker())
    assert name == "shm" and "preference" in reason and refusals == ()


def test_with_gpus_the_order_is_the_contracts() -> None:
    left = list(ALL)
    for expected in PREFERENCE:
        name, _, _ = choose([rank(gpu="g0", names=left)], worker(gpu="g1", names=left))
        assert name == expected
        left.remove(expected)
    assert choose([rank(names=left)], worker(names=left))[0] == "", "external is never chosen by itself"


def test_across_hosts_what_needs_one_host_is_refused_by_name() -> None:
    name, _, refusals = choose([rank(host="h1", gpu="g0")], worker(host="h2", gpu="g1"))
    assert name == "nccl" and dict(refusals)["cuda_ipc"] == "needs one host, and the members are on ['h1', 'h2']"


def test_one_gpu_for_two_members_is_no_case_for_nccl() -> None:
    name, _, refusals = choose([rank(gpu="g0", names=("nccl", "grpc"))], worker(gpu="g0"))
    said = "GPU g0 would be used by two members, rank/0 and the worker: use cuda_ipc"
    assert name == "grpc" and dict(refusals)["nccl"] == said
    ranks = [rank(0, gpu="g0", names=("nccl", "grpc")), rank(1, gpu="g0", names=("nccl", "grpc"))]
    name, _, refusals = choose(ranks, worker(gpu="g1"))
    assert name == "grpc" and "rank/0 and rank/1" in dict(refusals)["nccl"]


def test_an_address_of_one_host_is_not_offered_to_another() -> None:
    """A data port on loopback reaches its own host only."""
    theirs = worker(host="h2", names=("grpc", "ucx"), local=("grpc",))
    name, _, refusals = choose([rank(host="h1", names=("grpc",))], theirs)
    assert name == "" and dict(refusals)["grpc"] == (
        "is offered to its own host only (a data port on loopback: set WEIGHTPLANE_DATA_BIND at the replica), "
        "and the members are on ['h1', 'h2']"
    )
    assert choose([rank(host="h2", names=("grpc",))], theirs)[0] == "grpc"
    ours = Rank(0, "h1", "", offers(("grpc",), ("grpc",)))
    assert choose([ours], worker(host="h2", names=("grpc",)))[0] == "", "nor a rank's"


def test_a_gpu_out_of_reach_is_refused_with_both_uuids() -> None:
    far = Worker(0, "h1", "g3", (Offer("cuda_ipc", b"", False, ("g2",)), Offer("shm")))
    name, _, refusals = choose([rank(gpu="g0")], far)
    assert name == "shm"
    assert dict(refusals)["cuda_ipc"] == "the worker (GPU g3) cannot address the memory of rank/0 (GPU g0)"
    near = Worker(0, "h1", "g3", (Offer("cuda_ipc", b"", False, ("g2", "g0")),))
    assert choose([rank(gpu="g0")], near)[0] == "cuda_ipc"
    same = Worker(0, "h1", "g0", (Offer("cuda_ipc", b"", False, ("g2",)),))
    assert choose([rank(gpu="g0")], same)[0] == "cuda_ipc", "its own GPU needs no peer access"
    theirs = Rank(1, "h1", "g1", (Offer("cuda_ipc", b"", False, ("g0",)),))
    _, _, refusals = choose([rank(gpu="g0"), theirs], worker(gpu="g3", names=("cuda_ipc",)))
    assert dict(refusals)["cuda_ipc"] == "rank/1 (GPU g1) cannot address the memory of the worker (GPU g3)"
    _, _, refusals = choose([rank(gpu="")], Worker(0, "h1", "g3", (Offer("cuda_ipc", b"", False, ("g2",)),)))
    assert dict(refusals)["cuda_ipc"] == "the worker (GPU g3) cannot address the memory of rank/0 (host memory)"


def test_a_members_own_words_are_handed_on_and_a_forced_choice_is_honoured() -> None:
    w = Worker(0, "h1", "", offers(("grpc",)), (("shm", "no /dev/shm here"),))
    name, _, refusals = choose([rank()], w)
    assert name == "grpc" and dict(refusals)["shm"] == "the worker: no /dev/shm here"
    assert choose([rank()], w, forced="shm")[0] == ""
    name, reason, _ = choose([rank()], worker(), forced="grpc")
    assert (name, reason) == ("grpc", "forced by the trainer")
    third = worker(names=("carrier-pigeon",))
    assert choose([rank(names=(*ALL, "carrier-pigeon"))], third)[0] == "carrier-pigeon"


# --- a fleet --------------------------------------------------------------------------------------------------------


def fleet(
    *replicas: Replica, ranks: Sequence[Rank] = (), forced: str = "", old: Sequence[Channel] = (), seed: bytes = SEED
) -> tuple[tuple[Channel, ...], tuple[Choice, ...]]:
    ranks = ranks or (rank(gpu="g0", names=("nccl", "shm", "grpc")),)
    return bind({r.rank: r for r in ranks}, replicas, forced, 4096, old, seed)


def reached(channels: Sequence[Channel]) -> dict[str, str]:
    """The transport of each receiving member."""
    by_id = {c.channel_id: c.transport for c in channels}
    return {member: by_id[c] for member, c in members_of(channels).items()}


def test_each_worker_of_a_replica_gets_its_own_best() -> None:
    """CUDA IPC on the trainer's GPU, NCCL on the host's next, the network for a worker elsewhere: one update."""
    ranks = (rank(gpu="g0", names=("cuda_ipc", "nccl", "ucx", "shm", "grpc")),)
    near = Worker(0, "h1", "g0", offers(("cuda_ipc", "nccl", "grpc")))
    next_door = Worker(1, "h1", "g1", (*offers(("nccl", "grpc")),), (("cuda_ipc", "MIG is on"),))
    far = Worker(2, "h2", "", offers(("ucx", "grpc")))
    host = Worker(3, "h1", "", offers(("shm", "grpc")))
    channels, choices = fleet(replica("r0", near, next_door, far, host), ranks=ranks)
    assert reached(channels) == {"r0/0": "cuda_ipc", "r0/1": "nccl", "r0/2": "ucx", "r0/3": "shm"}
    assert [c.receivers for c in channels] == [("r0/0",), ("r0/1",), ("r0/3",), ("r0/2",)], "by transport's name"
    assert all(c.replicas == (("r0", "r0-life"),) and c.senders == ("rank/0",) for c in channels)
    assert all(set(c.offers) == {"rank/0", *c.receivers} for c in channels)
    assert [(c.workers, c.transport) for c in choices] == [
        ((0,), "cuda_ipc"),
        ((1,), "nccl"),
        ((2,), "ucx"),
        ((3,), "shm"),
    ]
    assert dict(choices[1].refusals) == {"cuda_ipc": "the worker: MIG is on"}
    assert {c.channel_id for c in choices} == {c.channel_id for c in channels}


def test_receivers_are_in_rank_order_and_workers_of_equal_fate_share_a_choice() -> None:
    two = [replica(n, *(worker(i, gpu=f"{n}g{i}") for i in range(3))) for n in ("r1", "r0")]
    channels, choices = fleet(*two)
    assert [c.receivers for c in channels] == [("r0/0", "r0/1", "r0/2", "r1/0", "r1/1", "r1/2")]
    assert [(c.replica_id, c.workers, c.transport) for c in choices] == [
        ("r0", (0, 1, 2), "nccl"),
        ("r1", (0, 1, 2), "nccl"),
    ]


def test_a_gpu_twice_in_one_collective_channel_sends_the_later_worker_to_its_next_choice() -> None:
    """Within one replica and across two: by replica and index, however the fleet is told of."""
    tight = replica("r0", worker(0, gpu="g1"), worker(1, gpu="g1"))
    beside = replica("r1", worker(0, gpu="g1"), worker(1, gpu="g2"))
    told = [fleet(tight, beside), fleet(beside, tight)]
    assert told[0] == told[1]
    channels, choices = told[0]
    assert reached(channels) == {"r0/0": "nccl", "r0/1": "shm", "r1/0": "shm", "r1/1": "nccl"}
    later = next(c for c in choices if c.replica_id == "r1" and c.workers == (0,))
    assert dict(later.refusals)["nccl"] == "GPU g1 would be used by two members, r0/0 and the worker: use cuda_ipc"


def test_another_channel_of_the_same_transport_has_seats_of_its_own() -> None:
    """Staged and in-place receivers are two communicators: one GPU may be in both."""
    one = replica("r0", worker(gpu="g1"), modes=(Mode.STAGED,))
    two = replica("r1", worker(gpu="g1"), modes=(Mode.IN_PLACE,))
    channels, _ = fleet(one, two)
    assert reached(channels) == {"r0/0": "nccl", "r1/0": "nccl"} and len(channels) == 2


def test_a_replica_that_is_partly_out_of_reach_takes_no_part_and_leaves_its_seat() -> None:
    lost = Worker(1, "h9", "", offers(("shm",)), (("grpc", "port in use"),))
    half = replica("r0", worker(0, gpu="g1"), lost)
    whole = replica("r1", worker(0, gpu="g1"))
    channels, choices = fleet(half, whole)
    assert reached(channels) == {"r1/0": "nccl"}, "the GPU that r0/0 would have used is free"
    mine = [c for c in choices if c.replica_id == "r0"]
    assert [(c.workers, c.transport, c.channel_id) for c in mine] == [((0,), "", ""), ((1,), "", "")]
    assert mine[0].reason == "nccl would do, but worker 1 of it cannot be reached, and a replica takes part whole"
    assert dict(mine[1].refusals)["grpc"] == "the worker: port in use"
    (told,) = out_of_reach(choices).items()
    assert told[0] == ("r0", "r0-life")
    assert told[1].startswith("no transport reaches worker 1 (") and "grpc: the worker: port in use" in told[1]
    assert "worker 0" not in told[1]


def test_a_forced_transport_is_taken_by_every_worker_or_the_replica_is_left_out() -> None:
    tight = replica("r0", worker(0, gpu="g1"), worker(1, gpu="g1"))
    channels, choices = fleet(tight, replica("r1", worker(0, gpu="g2")), forced="nccl")
    assert reached(channels) == {"r1/0": "nccl"}
    assert "r0/0 and the worker" in out_of_reach(choices)["r0", "r0-life"]
    channels, choices = fleet(tight, forced="grpc")
    assert reached(channels) == {"r0/0": "grpc", "r0/1": "grpc"}
    assert {c.reason for c in choices} == {"forced by the trainer"}


def test_channels_of_one_transport_are_numbered_and_kept_while_nothing_changes() -> None:
    one = replica("r0", worker(gpu="g1"))
    two = replica("r1", worker(gpu="g2"), modes=(Mode.IN_PLACE,))
    first, _ = fleet(one, two)
    assert [(c.transport, c.ordinal) for c in first] == [("nccl", 0), ("nccl", 1)]
    assert fleet(one, two, old=first, seed=b"t" * 32)[0] == first
    third, _ = fleet(one, old=first, seed=b"t" * 32)
    assert len({c.channel_id for c in (*first, *third)}) >= 2 and len({c.key for c in first}) == 2


@pytest.mark.parametrize("changed", ["r0/1", "r1/0"])
def test_only_channels_whose_members_changed_are_new(changed: str) -> None:
    """One worker's other offer does not touch the channels that it was no member of."""

    def replicas(other: str) -> list[Replica]:
        return [
            replica("r0", worker(0, names=("shm",)), worker(1, names=("grpc",), local=("grpc",) * (other == "r0/1"))),
            replica("r1", worker(0, names=("shm",), local=("shm",) * (other == "r1/0"))),
        ]

    ranks = (rank(names=("shm", "grpc")),)
    before, _ = fleet(*replicas(""), ranks=ranks)
    after, _ = fleet(*replicas(changed), ranks=ranks, old=before, seed=b"t" * 32)
    kept = {c.transport for c in after if c.channel_id in {x.channel_id for x in before}}
    assert kept == ({"shm"} if changed == "r0/1" else {"grpc"})


# --- what follows from where members are ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("shm", ("", ""), 16 << 20),
        ("grpc", ("g0", "g1"), 16 << 20),
        ("ucx", ("", ""), 64 << 20),
        ("ucx", ("g0", ""), 64 << 20),
        ("ucx", ("g0", "g1"), 256 << 20),
        ("nccl", ("g0", "g1"), 1 << 30),
        ("cuda_ipc", ("g0", "g1"), 1 << 30),
    ],
)
def test_buckets_are_as_large_as_suits_the_channel_unless_the_trainer_says(
    name: str, gpus: tuple[str, str], expected: int
) -> None:
    for asked, found in ((0, expected), (4096, 4096)):
        ranks, replicas = {0: rank(gpu=gpus[0])}, [replica("r", worker(gpu=gpus[1]))]
        ((channel,), _) = bind(ranks, replicas, name, asked, (), SEED)
        assert channel.bucket_bytes == found


def test_a_sample_is_hashed_by_default_only_where_all_share_one_gpu() -> None:
    def level(*gpus: str, forced: str = "") -> Verify:
        ranks = {0: rank(gpu="g0")}
        replicas = [replica(f"r{i}", worker(gpu=g)) for i, g in enumerate(gpus)]
        channels, _ = bind(ranks, replicas, forced, 0, (), SEED)
        return verify_by_default(ranks, replicas, channels)

    assert level("g0") is Verify.SAMPLED and level("g0", "g0") is Verify.SAMPLED
    assert level("g1") is Verify.FULL and level("g0", "g1") is Verify.FULL
    assert level("g0", forced="ucx") is Verify.FULL, "not by cuda_ipc"
    two = {0: rank(0, gpu="g0"), 1: rank(1, gpu="g1")}
    channels, _ = bind(two, [replica("r", worker(gpu="g0"))], "", 0, (), SEED)
    assert verify_by_default(two, [replica("r", worker(gpu="g0"))], channels) is Verify.FULL, "a rank elsewhere"
