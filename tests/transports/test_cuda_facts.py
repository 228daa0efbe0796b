"""Who can use CUDA IPC with whom: judged from recorded facts, also those that no host here can show (MIG, no peers)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightplane.transports.cuda_facts import (
    Device,
    Facts,
    blocked,
    cannot_export,
    gather,
    pair_problem,
    reaches,
    settings,
)

A, B, C = "aaaa-0", "bbbb-1", "cccc-2"
H200 = "NVIDIA H200"


def pair(*uuids: str) -> frozenset[str]:
    return frozenset(uuids)


#: Two H200 that NVLink joins, both visible.
BOTH = Facts(
    torch_cuda="13.0",
    devices=(Device(A, 0, H200, (9, 0)), Device(B, 1, H200, (9, 0))),
    peers=frozenset({pair(A, B)}),
    complete=True,
    driver=13000,
    kernel="6.18.44",
)


def test_cards_that_are_peers_and_one_and_the_same_card() -> None:
    a, b = BOTH.devices
    assert pair_problem(a, b, BOTH) == pair_problem(b, a, BOTH) == pair_problem(a, a, BOTH) == ""
    assert reaches(BOTH) == (A, B)


def test_a_card_is_known_by_uuid_whatever_its_index() -> None:
    """CUDA_VISIBLE_DEVICES=1,0 here and 0,1 there: index 0 is not the same card."""
    turned = replace(BOTH, devices=(Device(B, 0, H200), Device(A, 1, H200)))
    assert pair_problem(Device(A, 0), turned.devices[1], turned) == ""
    apart = replace(turned, peers=frozenset())
    assert pair_problem(Device(A), apart.devices[1], apart) == "", "the same card"
    assert "no peer access" in pair_problem(Device(A), apart.devices[0], apart)


def test_a_hidden_card_is_judged_by_what_the_host_says() -> None:
    """CUDA_VISIBLE_DEVICES=1: the sender's card is hidden here, and can be read all the same."""
    mine = replace(BOTH, devices=(Device(B, 0, H200), Device(A, -1, H200)))
    assert reaches(mine) == (A, B) and pair_problem(Device(A), mine.devices[0], mine) == ""
    lonely = replace(mine, peers=frozenset())
    assert reaches(lonely) == (B,) and "no peer access" in pair_problem(Device(A), lonely.devices[0], lonely)
    unknown = replace(lonely, devices=(Device(B, 0, H200),), complete=False)
    assert reaches(unknown) == () and pair_problem(Device(A), unknown.devices[0], unknown) == "", "a try decides"


def test_two_islands() -> None:
    d = "dddd-3"
    host = replace(
        BOTH,
        devices=(*BOTH.devices, Device(C, 2, H200), Device(d, 3, H200)),
        peers=frozenset({pair(A, B), pair(C, d)}),
    )
    assert reaches(host) == (A, B, C, d), "of a process that sees them all: what any of its cards can"
    assert reaches(replace(host, devices=tuple(replace(x, index=-1 if x.index > 1 else x.index) for x in host.devices)))
    seen = replace(host, devices=tuple(replace(x, index=-1 if x.index > 1 else x.index) for x in host.devices))
    assert reaches(seen) == (A, B)
    said = pair_problem(host.devices[0], host.devices[2], host)
    assert A in said and C in said and "nccl" in said


def test_mig_slices() -> None:
    """Recorded, never run: slices read their own memory alone."""
    one, other = Device("m1", 0, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", mig=True), Device("m2", mig=True)
    here = replace(BOTH, devices=(one,), peers=frozenset(), complete=False)
    assert pair_problem(one, one, here) == ""
    for sender in (other, Device(A)):
        assert "MIG" in pair_problem(sender, one, here)
    assert "MIG" in pair_problem(one, BOTH.devices[0], replace(BOTH, devices=(*BOTH.devices, one)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_cuda": ""}, "built without CUDA"),
        ({"kernel": "5.15.90.1-microsoft-standard-WSL2"}, "WSL 2"),
        ({"control": False}, "/dev/nvidiactl"),
        ({"visible": ""}, "hides every GPU"),
        ({"visible": "-1"}, "hides every GPU"),
        ({"visible": "1,0"}, ""),
    ],
)
def test_what_stands_against_it_in_a_process(changes: dict[str, object], said: str) -> None:
    found = blocked(replace(BOTH, **changes))  # type: ignore[arg-type]
    assert said in found and bool(said) == bool(found)


def test_memory_that_cannot_be_shared() -> None:
    """M13: expandable segments."""
    assert cannot_export(BOTH) == ""
    for word in ("True", "true"):
        said = cannot_export(
            replace(BOTH, allocator=settings({"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{word}"}))
        )
        assert "expandable_segments:False" in said
    assert "cudaMallocAsync" in cannot_export(replace(BOTH, allocator={"backend": "cudaMallocAsync"}))


def test_settings_of_the_allocator() -> None:
    assert settings({}) == {}
    both = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, backend:native",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
    }
    assert settings(both) == {"expandable_segments": "False", "backend": "native"}
    odd = {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True,nonsense"}
    assert settings(odd)["expandable_segments"] == "True"


def test_gathering_never_fails_and_needs_no_card() -> None:
    import torch

    for deep in (False, True):
        found = gather(deep=deep)
        assert found.torch_cuda == (torch.version.cuda or "") and found.kernel
        if not torch.cuda.is_available():
            assert blocked(found) and found.devices == ()


@pytest.mark.gpu
def test_gathering_on_a_card() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = gather(deep=True)
    seen = [d for d in found.devices if d.index >= 0]
    assert [d.uuid for d in seen] == [str(torch.cuda.get_device_properties(d.index).uuid) for d in seen]
    assert len(seen) == torch.cuda.device_count() and not blocked(found)
    assert {d.uuid for d in seen} <= set(reaches(found) or {d.uuid for d in seen})
