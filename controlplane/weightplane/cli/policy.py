"""``weightplane policy``: what a group's updates do and what its engines must be, shown and changed."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
import typer

from weightplane.v1 import fleet_pb2
from weightplane.v1.common_pb2 import CachePolicy, PauseMode, VerifyLevel

from .client import DEFAULT_ADDRESS, AddressOption, Connection, GroupOption, JsonOption, connect, one_of, request_id
from .fleet import print_replicas
from .output import emit_json, seconds, short_name, table

__all__ = ["register"]

#: Of each policy that is one word: its field, its enum, and the prefix of the enum's names.
_WORDS: dict[str, tuple[Any, str]] = {
    "cache": (CachePolicy, "CACHE_POLICY"),
    "pause": (PauseMode, "PAUSE_MODE"),
    "failure": (fleet_pb2.FailurePolicy, "FAILURE_POLICY"),
    "verify": (VerifyLevel, "VERIFY_LEVEL"),
    "parity": (fleet_pb2.ParityPolicy, "PARITY_POLICY"),
}


def _option(help_: str, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, help=help_, min=least, show_default=False)


def policy(
    group: GroupOption,
    min_replicas: Annotated[int | None, _option("Fewest participants of an update.", "--min-replicas", least=1)] = None,
    at_least: Annotated[
        int | None, _option("Commit once so many are prepared; 0 = all must be.", "--at-least", least=0)
    ] = None,
    cache: Annotated[str, _option("clear, keep or salt: the engines' caches after an update.", "--cache")] = "",
    pause: Annotated[str, _option("keep, wait or abort: requests in flight.", "--pause")] = "",
    failure: Annotated[str, _option("raise, retry or continue_stale: a failed publish.", "--on-failure")] = "",
    max_stale: Annotated[
        int | None,
        _option("Failed publishes in a row that continue_stale forgives: 1 or more.", "--max-stale", least=0),
    ] = None,
    verify: Annotated[str, _option("off, sampled or full: how much is hashed.", "--verify")] = "",
    timeout: Annotated[
        float | None, _option("Seconds an update may take, by default.", "--update-timeout", least=1)
    ] = None,
    parity: Annotated[str, _option("record or quarantine: a parity check that failed.", "--parity")] = "",
    declare: Annotated[
        list[str] | None, _option("NAME=VALUE of the engines' settings; NAME= takes it back. Repeatable.", "--declare")
    ] = None,
    block: Annotated[
        list[str] | None, _option("A condition that a replica must meet to be ready. Repeatable.", "--block")
    ] = None,
    unblock: Annotated[
        list[str] | None, _option("One that it need not meet any more, or 'all'. Repeatable.", "--unblock")
    ] = None,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Show a group's policies, or change those that are named; a group that is not there yet is made with them."""
    words = {"cache": cache, "pause": pause, "failure": failure, "verify": verify, "parity": parity}
    for name, word in words.items():
        option = "--on-failure" if name == "failure" else f"--{name}"
        one_of(option, word, ("", *(w for w in map(_short(name), _WORDS[name][0].values()) if w != "unspecified")))
    numbers = {"min_replicas": min_replicas, "max_stale_versions": max_stale}
    milliseconds = None if timeout is None else round(timeout * 1000)
    lists = (declare, block, unblock)
    changes = any(words.values()) or any(lists) or any(n is not None for n in (*numbers.values(), at_least, timeout))
    with connect(address, as_json=as_json, group=group, changes=changes) as c:
        known = _known(c, group, changes)
        wanted = fleet_pb2.GroupPolicy()
        wanted.CopyFrom(known.policy)
        for name, word in words.items():
            if word:
                enum, prefix = _WORDS[name]
                setattr(wanted, name, enum.Value(f"{prefix}_{word.upper()}"))
        for name, number in (*numbers.items(), ("update_timeout_ms", milliseconds)):
            if number is not None:
                setattr(wanted, name, number)
        if changes:
            _bounded(wanted)
        if at_least is not None:
            wanted.commit.at_least = at_least
            if not at_least:
                wanted.commit.all = True
        _declare(wanted, declare or [])
        _block(wanted, block or [], unblock or [])
        if block:
            _known_types(c, group if known.group else "", block)
        if changes:
            known = _change(c, known, wanted, group)
        judged = fleet_pb2.ListReplicasRequest(group=group)
        replicas = c.fleet.ListReplicas(judged, timeout=c.timeout).replicas if block else []
    if as_json:
        emit_json(known)
        return
    table(f"policies of {group}", ["policy", "in force"], _rows(known.policy))
    if replicas:  # a condition that nobody tells takes the whole fleet out of routing: seen at once
        print_replicas(list(replicas), as_json)


def _known(c: Connection, group: str, changes: bool) -> fleet_pb2.GroupInfo:
    """The group, or, if it is to be changed and is not there, one without a name."""
    try:
        return c.fleet.GetGroup(fleet_pb2.GetGroupRequest(group=group), timeout=c.timeout).group
    except grpc.RpcError as error:
        if changes and isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
            return fleet_pb2.GroupInfo()
        raise


def _change(
    c: Connection, known: fleet_pb2.GroupInfo, wanted: fleet_pb2.GroupPolicy, group: str
) -> fleet_pb2.GroupInfo:
    if known.group:
        update = fleet_pb2.UpdateGroupRequest(request_id=request_id(), group=group, policy=wanted)
        return c.fleet.UpdateGroup(update, timeout=c.timeout).group
    create = fleet_pb2.CreateGroupRequest(request_id=request_id(), group=group, policy=wanted)
    return c.fleet.CreateGroup(create, timeout=c.timeout).group


def _bounded(wanted: fleet_pb2.GroupPolicy) -> None:
    """Whoever asks that failures be forgiven says how many: with none forgiven each is raised all the same."""
    if wanted.failure == fleet_pb2.FAILURE_POLICY_CONTINUE_STALE and not wanted.max_stale_versions:
        raise typer.BadParameter(
            "--on-failure continue_stale: expected with it a --max-stale of at least 1, the failed publishes in a row "
            "that are forgiven; found 0, which would be --on-failure raise"
        )


def _declare(wanted: fleet_pb2.GroupPolicy, pairs: list[str]) -> None:
    from weightplane.inference_agent.engines.vllm.settings import declared_from

    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--declare: expected NAME=VALUE, found {pair!r}")
        if value:
            try:
                declared_from([pair])
            except ValueError as error:
                raise typer.BadParameter(f"--declare {error}") from None
            wanted.declared[name] = value
        elif name in wanted.declared:
            del wanted.declared[name]
        else:
            raise typer.BadParameter(f"--declare {name}=: it is not declared, so it cannot be taken back")


def _known_types(c: Connection, group: str, block: list[str]) -> None:
    """A misspelt condition is told by nobody and would take every replica out of routing. Other engines than ours have
    others: one that a replica of the group tells is one."""
    from weightplane.inference_agent.engines.vllm.audit import audit
    from weightplane.inference_agent.engines.vllm.settings import Declared, EngineSettings

    ours = {"Audit", *(condition.type for condition in audit(EngineSettings(), Declared()))}
    if not (others := set(block) - ours):
        return
    asked = fleet_pb2.ListReplicasRequest(group=group, conditions=True)
    replicas = c.fleet.ListReplicas(asked, timeout=c.timeout).replicas if group else []
    if unknown := sorted(others - {condition.type for r in replicas for condition in r.conditions}):
        expected = f"one of {', '.join(sorted(ours))}, or one that a replica of the group tells"
        raise typer.BadParameter(f"--block: expected {expected}; found {unknown[0]!r}")


def _block(wanted: fleet_pb2.GroupPolicy, block: list[str], unblock: list[str]) -> None:
    kept = [] if "all" in unblock else list(wanted.blocking)
    for kind in unblock:
        if kind != "all" and kind not in kept:
            there = f"all, {', '.join(kept)}" if kept else "no --unblock, since none blocks"
            raise typer.BadParameter(f"--unblock: expected {there}; found {kind!r}")
    del wanted.blocking[:]
    wanted.blocking.extend(dict.fromkeys([*(k for k in kept if k not in unblock), *block]))


def _short(name: str) -> Any:
    enum, prefix = _WORDS[name]
    return lambda value: short_name(enum.Name(value), prefix)


def _rows(p: fleet_pb2.GroupPolicy) -> list[list[str]]:
    commit = f"at least {p.commit.at_least} prepared" if p.commit.at_least else "all participants prepared"
    by_word = {name: _short(name)(getattr(p, name)) for name in _WORDS}
    if not p.verify:
        by_word["verify"] = "by transport: full, or sampled where hashing costs more"
    return [
        ["fewest participants (--min-replicas)", str(p.min_replicas)],
        ["commit (--at-least)", commit],
        ["caches after an update (--cache)", by_word["cache"]],
        ["requests in flight (--pause)", by_word["pause"]],
        ["a failed publish (--on-failure, --max-stale)", f"{by_word['failure']}, {p.max_stale_versions} forgiven"],
        ["digests (--verify)", by_word["verify"]],
        ["an update takes at most (--update-timeout)", seconds(p.update_timeout_ms / 1000)],
        ["a failed parity check (--parity)", by_word["parity"]],
        ["declared of engines (--declare)", ", ".join(f"{k}={v}" for k, v in sorted(p.declared.items())) or "-"],
        ["conditions that block (--block)", ", ".join(p.blocking) or "none: they warn"],
    ]


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(policy)
