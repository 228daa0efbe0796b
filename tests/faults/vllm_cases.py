"""Faults of a replica that is a real vLLM: ``v0`` is its agent, ``v0-engine`` the process that holds the model."""

from __future__ import annotations

from tests.faults.case import Case
from tests.faults.cases import LOST, RESTARTED

__all__ = ["VLLM_CASES"]

_ENGINE = ("ENGINE", "TRANSPORT", "MEMBER_RESTARTED", "DEADLINE", *LOST)
NTH = 10

#: Those that run as tests end no engine: to start one takes half a minute.
VLLM_CASES: tuple[Case, ...] = (
    Case("SIGKILL", "v0", "arm", "kill", "ABORTED", LOST, ("v0",), dies=True, left=("v0",), timeout=20, ci=True),
    Case("SIGKILL", "v0", "decided", "kill", "COMMITTED", dies=True, left=("v0",), timeout=20),
    Case("SIGSTOP", "v0-engine", "update", "stop", "ABORTED", (*LOST, "DEADLINE"), ("v0",), NTH, left=("v0",),
         timeout=8, ci=True),
    Case("exception", "v0-engine", "applying", "raise", "COMMITTED", left=("v0",), nth=NTH, timeout=20, ci=True),
    Case("exception", "v0-engine", "applying as bytes come", "raise", "ABORTED", _ENGINE, ("v0",), nth=NTH,
         left=("v0",), mode="in_place", timeout=20),
    Case("SIGKILL, restarted", "plane", "finish", "kill", "ABORTED", RESTARTED, ("",), dies=True, timeout=30, ci=True),
    Case("SIGKILL, restarted", "plane", "decide, after the write", "kill", "COMMITTED", RESTARTED, ("",), dies=True,
         timeout=30),
    Case("SIGKILL", "v0-engine", "update", "kill", "ABORTED", _ENGINE, ("v0",), NTH, dies=True, left=("v0",),
         timeout=20),
)  # fmt: skip
