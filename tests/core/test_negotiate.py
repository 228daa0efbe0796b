"""Which transport reaches which replica, and the words for the others: from facts as members offer them."""

from __future__ import annotations

from collections.abc import Sequence

from weightplane.controlplane.core.model import Channel, Mode, Offer, Rank, Replica, Worker
from weightplane.controlplane.core.negotiate import PREFERENCE, bind, choose

ALL = ("cuda_ipc", "nccl", "ucx", "shm", "grpc", "external")


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


def test_on_one_host_without_gpus_shared_memory_comes_first() -> None:
    name, reason, refusals = choose([rank()], replica("r", worker()))
    assert name == "shm" and "preference" in reason and refusals == ()


def test_with_gpus_the_order_is_the_contracts() -> None:
    left = list(ALL)
    for expected in PREFERENCE:
        name, _, _ = choose([rank(gpu="g0", names=left)], replica("r", worker(gpu="g1", names=left)))
        assert name == expected
        left.remove(expected)
    assert choose([rank(names=left)], replica("r", worker(names=left)))[0] == "", "external is never chosen by itself"


def test_across_hosts_what_needs_one_host_is_refused_by_name() -> None:
    name, _, refusals = choose([rank(host="h1", gpu="g0")], replica("r", worker(host="h2", gpu="g1")))
    assert name == "nccl" and dict(refusals)["cuda_ipc"] == "needs one host, and the members are on ['h1', 'h2']"


def test_one_gpu_for_two_members_is_no_case_for_nccl() -> None:
    name, _, refusals = choose([rank(gpu="g0", names=("nccl", "grpc"))], replica("r", worker(gpu="g0")))
    assert name == "grpc" and dict(refusals)["nccl"] == "GPU g0 would be used by two members: use cuda_ipc"


def test_an_address_of_one_host_is_not_offered_to_another() -> None:
    """A data port on loopback reaches its own host only."""
    theirs = replica("r", worker(host="h2", names=("grpc", "ucx"), local=("grpc",)))
    name, _, refusals = choose([rank(host="h1", names=("grpc",))], theirs)
    assert name == "" and dict(refusals)["grpc"] == "needs one host, and the members are on ['h1', 'h2']"
    assert choose([rank(host="h2", names=("grpc",))], theirs)[0] == "grpc"


def test_a_gpu_out_of_reach_is_refused_with_both_uuids() -> None:
    far = Worker(0, "h1", "g3", (Offer("cuda_ipc", b"", False, ("g2",)), Offer("shm")))
    name, _, refusals = choose([rank(gpu="g0")], replica("r", far))
    assert name == "shm"
    assert dict(refusals)["cuda_ipc"] == "worker 0 (GPU g3) cannot address the memory of rank/0 (GPU g0)"
    near = Worker(0, "h1", "g3", (Offer("cuda_ipc", b"", False, ("g2", "g0")),))
    assert choose([rank(gpu="g0")], replica("r", near))[0] == "cuda_ipc"
    same = Worker(0, "h1", "g0", (Offer("cuda_ipc", b"", False, ("g2",)),))
    assert choose([rank(gpu="g0")], replica("r", same))[0] == "cuda_ipc", "its own GPU needs no peer access"


def test_a_members_own_words_are_handed_on_and_a_forced_choice_is_honoured() -> None:
    w = Worker(0, "h1", "", offers(("grpc",)), (("shm", "no /dev/shm here"),))
    name, _, refusals = choose([rank()], replica("r", w))
    assert name == "grpc" and dict(refusals)["shm"] == "worker 0: no /dev/shm here"
    assert choose([rank()], replica("r", w), forced="shm")[0] == ""
    name, reason, _ = choose([rank()], replica("r", worker()), forced="grpc")
    assert (name, reason) == ("grpc", "forced by the trainer")


def bound(*replicas: Replica, old: Sequence[Channel] = (), seed: bytes = b"s" * 32) -> tuple[Channel, ...]:
    return bind({0: rank(names=("nccl",), gpu="g0")}, replicas, "", 4096, old, seed)[0]


def test_channels_of_one_transport_are_numbered_and_kept_while_nothing_changes() -> None:
    one = replica("r0", worker(gpu="g1"))
    two = replica("r1", worker(gpu="g2"), modes=(Mode.IN_PLACE,))
    first = bound(one, two)
    assert [(c.transport, c.ordinal) for c in first] == [("nccl", 0), ("nccl", 1)]
    assert bound(one, two, old=first, seed=b"t" * 32) == first
    third = bound(one, old=first, seed=b"t" * 32)
    assert len({c.channel_id for c in (*first, *third)}) >= 2 and len({c.key for c in first}) == 2
