"""What ``weightplane publish`` says when it cannot: the exit code of each error, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from weightplane.controlplane.core.reasons import Reason

from .client import LEADS, START_ONE, advice_on
from .exits import Exit
from .output import complain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightplane.trainer_agent.errors import PublishError

__all__ = ["Told", "check_transport", "how_to_convert", "next_for_replicas"]

_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_HELD = re.compile(r"(?P<replica>[^\s;]+): it is (?P<state>DRAINING|QUARANTINED|PINNED)\b")


def check_transport(name: str, as_json: bool) -> None:
    """End here if ``name`` is no transport (a wrong argument), or cannot work on this host (a precondition)."""
    from weightplane.transports import registry

    if not name:
        return
    if name not in registry.names():
        known = ", ".join(sorted(registry.names()))
        raise typer.BadParameter(f"--transport: expected one of {known}, found {name!r}")
    probe = registry.available()[name]
    if not probe.ok:
        text = f"transport {name!r} does not work on this host: {probe.reason}"
        complain(text, "NO_TRANSPORT", Exit.REFUSED, as_json, "weightplane transports lists those that do")


def how_to_convert(path: Path) -> str:
    """What to do with a checkpoint that is no safetensors file."""
    if path.is_dir():
        return "name a folder that holds .safetensors files (with an index, all that it names), or one such file"
    if path.suffix in _TORCH_FILES:
        out = path.with_suffix(".safetensors").name
        code = f"save_file(torch.load({path.name!r}, weights_only=True), {out!r})"
        return f"convert it (pip install safetensors): import torch; from safetensors.torch import save_file; {code}"
    return "name a .safetensors file that was written whole; safetensors.torch.save_file(state_dict, path) writes one"


def next_for_replicas(text: str, group: str) -> str:
    """What brings back the replicas that ``text`` says may not take part; empty if it names none that an operator
    took out."""
    todo = []
    for found in _HELD.finditer(text):
        verb = "unpin" if found["state"] == "PINNED" else "activate"
        todo.append(f"weightplane {verb} {found['replica']} -g {group}")
    return "; ".join(todo)


class Told:
    """Says what went wrong with one publish, and ends the command."""

    def __init__(self, address: str, group: str, timeout: float, as_json: bool) -> None:
        self._address, self._group, self._timeout, self._as_json = address, group, timeout, as_json
        self._doctor = f"weightplane doctor -g {group} names what stands against each transport"

    def too_few(self, text: str) -> NoReturn:
        """The replicas that were waited for did not come."""
        more = "start replicas of that group (weightplane inference-agent), or give them more time with --wait"
        todo = next_for_replicas(text, self._group) or more
        complain(text, Reason.NOT_ENOUGH_REPLICAS, Exit.REFUSED, self._as_json, todo)

    def out_of_reach(self, expected: int, found: Sequence[str], out: Mapping[str, str]) -> NoReturn:
        """Transports reach ``found``, too few replicas; ``out``: the others, each with the reason."""
        others = "".join(f"; {r}: {why}" for r, why in sorted(out.items()))
        seen = f"found {len(found)} ({', '.join(found) or 'none'}){others}"
        text = f"group {self._group!r}: expected {expected} replica(s), {seen}"
        complain(text, Reason.NOT_ENOUGH_REPLICAS, Exit.REFUSED, self._as_json, self._doctor)

    def failed(self, error: PublishError) -> NoReturn:
        """The publish was refused or failed."""
        code = exit_of(error)
        complain(_once(error), error.reason, code, self._as_json, self._next(error, code))

    def _next(self, error: PublishError, code: Exit) -> str:
        from weightplane.trainer_agent.errors import Unanswered

        group, reason = self._group, error.reason
        if code is Exit.UNREACHABLE:
            return LEADS if reason is Reason.COORDINATOR_RESTARTED else START_ONE
        if isinstance(error.__cause__, Unanswered):  # it went away meanwhile, and cannot be asked
            return (
                f"see that the control plane at {self._address} runs (weightplane controlplane, on the same --store), "
                f"then weightplane updates -g {group} says what became of it"
            )
        todo = {
            Reason.TRAINER_HELD: "wait for its lease to end, or, if you know that it is dead, take over: --takeover",
            Reason.NOT_ENOUGH_REPLICAS: next_for_replicas(str(error), group)
            or f"weightplane status -g {group} says why each may not take part",
            Reason.MANIFEST_MISMATCH: "publish tensors of the names, shapes and dtypes that the engine has",
            Reason.NO_TRANSPORT: self._doctor,
            Reason.DEADLINE: f"give it more time (--timeout, now {self._timeout:g} s), or weightplane watch -g {group} "
            "to see who is slow",
            Reason.UNAUTHENTICATED: "give a token with WEIGHTPLANE_TOKEN, or a certificate with WEIGHTPLANE_CERT, _KEY",
            Reason.PERMISSION_DENIED: advice_on(reason, str(error), group),
            Reason.INVALID_ARGUMENT: "weightplane publish --help",
        }.get(reason, "")
        return todo or f"weightplane status -g {group} and weightplane updates -g {group} show the fleet as it is"


def exit_of(error: PublishError) -> Exit:
    """The documented code."""
    from weightplane.trainer_agent.errors import (
        CallRefused,
        CoordinatorUnreachable,
        OutcomeUnknown,
        Unanswered,
        UpdateRefused,
    )

    if error.reason in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED):
        return Exit.DENIED
    if isinstance(error, CoordinatorUnreachable):
        return Exit.UNREACHABLE
    if isinstance(error, OutcomeUnknown):
        return Exit.UNKNOWN_OUTCOME
    if isinstance(error, UpdateRefused | CallRefused):
        if isinstance(error.__cause__, Unanswered):
            return Exit.UNREACHABLE
        return Exit.USAGE if error.reason is Reason.INVALID_ARGUMENT else Exit.REFUSED
    return Exit.FAILED


def _once(error: PublishError) -> str:
    """The error's text without the reason that is printed before it anyway."""
    member = error.failure.member
    said = f"{error.reason} [{member}]: " if member else f"{error.reason}: "
    return str(error).replace(said, f"{member}: " if member else "", 1)
