"""Where the conformance kit puts members' tensors, and what it says where devices are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightplane.transports.conformance import models
from weightplane.transports.conformance.harness import NotHere, placed

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("device", "collective", "gpus", "wanted"),
    [
        ("cpu", True, 0, ["cpu"] * 5),
        ("cuda:0", False, 1, ["cuda:0"] * 5),
        ("cuda", False, 2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:1"]),
        ("cuda", False, 3, ["cuda:0", "cuda:0", "cuda:1", "cuda:2", "cuda:1"]),
        ("cuda", True, 5, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
        ("cuda", False, 1, "needs 2 CUDA devices, torch sees 1"),
        ("cuda", True, 4, "needs 5 CUDA devices, torch sees 4"),
    ],
)
def test_two_senders_and_three_receivers(
    device: str, collective: bool, gpus: int, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if isinstance(wanted, str):
        with pytest.raises(NotHere, match=wanted):
            placed(2, 3, device, collective)
    else:
        assert placed(2, 3, device, collective) == wanted


def test_dtypes_that_a_device_lacks_are_named() -> None:
    assert models.lacking("cpu") == {}
    lacking = models.lacking("cuda:99")
    assert "bfloat16" in lacking and ":" in lacking["bfloat16"]
    assert {e.dtype for e in models.model("nan", ["bfloat16"])} == {e.dtype for e in models.model("nan")} - {"bfloat16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is shown is a machine without a card")
def test_cases_on_a_gpu_are_marked_and_skipped_without_one(pytester: pytest.Pytester) -> None:
    module = """
    TRANSPORT, DEVICES = "shm", ("cuda", "cuda:0")
    pytest_plugins = ["weightplane.transports.conformance.plugin"]
    from weightplane.transports.conformance.cases_data import test_unicode_names
    """
    pytester.makepyfile(module)
    ran = pytester.runpytest_subprocess("-rs", "-v", "-p", "no:cacheprovider")
    ran.stdout.fnmatch_lines(["*test_unicode_names?shm-cuda? SKIPPED*", "*test_unicode_names?shm-cuda:0? SKIPPED*"])
    ran.stdout.fnmatch_lines(["*needs a CUDA device*"])
    ran.assert_outcomes(skipped=2)
    chosen = pytester.runpytest_subprocess("-m", "not gpu", "-p", "no:cacheprovider")
    chosen.assert_outcomes(deselected=2)


def test_somebody_elses_parameter_of_the_same_name_stays_theirs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
    import pytest
    pytest_plugins = ["weightplane.transports.conformance.plugin"]
    @pytest.mark.parametrize(("transport_name", "n"), [("mine", 1), ("yours", 2)])
    def test_it(transport_name, n):
        assert (transport_name, n) in {("mine", 1), ("yours", 2)}
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
