"""The benchmarks' pure parts: what is measured is the model it is called, and verdicts are drawn as the issue says."""

from pathlib import Path

import pytest

from benchmarks._bare_ring import BareRing
from benchmarks._models import MODELS, model, model_bytes
from benchmarks._targets import TARGETS
from benchmarks._test_ids import collected_ids, outcomes, summary
from benchmarks._ways import FLOORS, bucket_bytes, limit_of
from benchmarks.transports import size, size_text
from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.transports.base import Capabilities
from weightplane.transports.collective_layout import Tuning

_PULLS = Capabilities(frozenset({"cpu", "cuda"}), one_to_many=False, one_sided=True, cross_host=True, buffered=False)
_STREAMS = Capabilities(frozenset({"cpu"}), one_to_many=False, one_sided=False, cross_host=True, buffered=True)
_COLLECTIVE = Capabilities(
    frozenset({"cuda"}), one_to_many=True, one_sided=False, cross_host=True, buffered=False, collective=True
)


@pytest.mark.parametrize(
    "name, tensors, gigabytes",
    [
        ("dense", 339, 15.23),
        ("moe", 4719, 16.20),
        ("dense-cpu", 339, 15.23 / 16),
        ("moe-cpu", 4719, 16.20 / 16),
        ("tiny", 10_000, 0.0003325),
    ],
)
def test_real_lists_have_their_counts_and_bytes(name: str, tensors: int, gigabytes: float) -> None:
    assert len(model(name)) == tensors
    assert model_bytes(name) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_every_list_is_a_manifest_without_repeated_names() -> None:
    for name in MODELS:
        shapes = model(name)
        manifest = Manifest.of(TensorMeta(n, dtype, shape, "") for n, dtype, shape in shapes)
        assert len(manifest) == len(shapes)


def test_limits_follow_from_what_a_transport_declares() -> None:
    assert [limit_of(c, "cpu") for c in (_PULLS, _STREAMS)] == ["memcpy", "socket"]
    assert [limit_of(c, "across") for c in (_PULLS, _COLLECTIVE)] == ["peer copy", "broadcast 1GiB"]
    assert limit_of(_PULLS, "colocated") == "same-GPU copy"
    assert bucket_bytes(_STREAMS, "cpu") < bucket_bytes(_PULLS, "cpu") < bucket_bytes(_PULLS, "across") <= 1 << 30
    assert bucket_bytes(_COLLECTIVE, "across") == 1 << 30
    assert Tuning().slots * Tuning().pack < 0.5e9  # no more memory than an update may take


def test_floors_and_targets_are_those_of_the_issue() -> None:
    floors = {(f.transport, f.layout, name): f.share for f in FLOORS for name in f.models}
    assert floors["cuda_ipc", "across", "dense"] == 0.95 and floors["cuda_ipc", "across", "moe"] == 0.93
    assert floors["cuda_ipc", "colocated", "moe"] == 0.92 and floors["ucx", "cpu", "256MiB"] == 0.80
    assert floors["nccl", "across", "dense"] == 0.90 and floors["nccl", "across", "moe"] == 0.80
    across = next(t for t in TARGETS if t.layout == "across")
    assert across.met(0.048, 0.81)[0] and not across.met(0.048, 0.79)[0]
    colocated = next(t for t in TARGETS if t.layout == "colocated")
    assert colocated.met(0.017, 0.4)[0] and not colocated.met(0.019, 0.4)[0]


@pytest.mark.parametrize("text", ["4096", "64KiB", "512MiB", "1GiB"])
def test_sizes_are_said_as_they_are_read(text: str) -> None:
    assert size_text(size(text)) in (text, "4KiB")


def test_passed_ids_are_compared_with_collected_ones() -> None:
    collected = collected_ids("tests/a.py::one\ntests/a.py::two[x y]\n\n2/9 tests collected (7 deselected)\n")
    assert collected == {"tests/a.py::one", "tests/a.py::two[x y]"}
    ran = outcomes("tests/a.py::one PASSED [ 50%]\ntests/a.py::two[x y] PASSED [100%]\n== 2 passed ==\n")
    assert summary(collected, ran)[0]
    good, lines = summary(collected, outcomes("tests/a.py::one PASSED\ntests/a.py::two[x y] SKIPPED (no card)\n"))
    assert not good and any("SKIPPED: tests/a.py::two[x y]" in line for line in lines)
    good, lines = summary(collected, outcomes("tests/a.py::one PASSED\ntests/a.py::one ERROR\n"))
    assert not good and sum("no outcome" in line for line in lines) == 1
    assert summary(
        collected, outcomes("[gw0] [ 50%] PASSED tests/a.py::one \n[gw1] [100%] PASSED tests/a.py::two[x y] \n")
    )[0]
    assert not summary(set(), {})[0]


def test_a_ring_without_python_moves_what_it_is_asked_and_leaves_nothing() -> None:
    if why := BareRing.missing():
        pytest.skip(why)
    ring = BareRing((64 << 20) + 1)  # the last slot is one byte
    try:
        for said in (ring.run(), ring.run()):
            assert said["bytes"] == (64 << 20) + 1 and 0 < said["end"] - said["start"] < 60 and said["cpu"] > 0
        folder = ring._folder
    finally:
        ring.close()
    assert folder is not None and not Path(folder.name).exists()
