"""Tensor content: names. Each is one that the engine knows, or the update fails before it has written a byte."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.cases.base import TRANSPORTS, Small, bits, case, check, differing, holds, must, refused, site, wired
from tests.trainer_agent.fleet import fill
from weightplane.controlplane.core.reasons import Reason
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.sources import ModuleSource, StateDictSource


def mismatch(what: str, publisher: Any, step: int) -> UpdateFailed:
    """Publishing is refused because the manifest does not fit."""
    e: UpdateFailed = refused(what, lambda: publisher.publish(step), UpdateFailed)
    check(what, e.reason is Reason.MANIFEST_MISMATCH, e.reason, e)
    return e


@case
def T14_an_update_of_which_no_name_binds_is_an_error_whatever_the_lists_allow() -> None:
    module = Small(1)
    strangers = {f"adapter.{n}": t for n, t in module.state_dict().items()}
    everything: dict[str, Any] = {"allow_extra": ["*"], "allow_missing": ["*"]}
    nothing: dict[str, Any] = {}
    for what, allowed in (("by default", nothing), ("also if the lists allow all", everything)):
        with site("r0", **allowed) as f:
            engine = f.engines["r0"]
            before = bits(engine.modules[0])
            publisher = f.publisher(StateDictSource(strangers))
            e = mismatch(f"no name matches: an error {what}", publisher, 1)
            check("names are given", "adapter." in str(e), e)
            check("nothing was written", not differing(before, bits(engine.modules[0])))
            check("no version was taken", engine.held()[0].version == 0 and f.state().committed.version == 0)
            publisher.source = ModuleSource(module)
            with must("names that match commit"):
                publisher.publish(2)
            check("they hold", holds(engine, module))


def _target_and_draft() -> nn.Module:
    return nn.ModuleDict({"target": Small(), "draft": nn.Linear(32, 32)})


@case
def T16_every_transport_updates_the_same_names() -> None:
    """Of the case the part that is about names; updates of a draft model by itself (target DRAFT) are not built."""
    module = _target_and_draft()
    with site("r0", make=_target_and_draft) as f, wired("r0/0"):
        engine = f.engines["r0"]
        updated: dict[str, list[str]] = {}
        why: dict[str, str] = {}
        for step, transport in enumerate(TRANSPORTS, 1):
            fill(module, step)
            with f.publisher(module, transport=transport) as publisher:
                try:
                    publisher.publish(step, update_timeout=10)
                except UpdateFailed as failed:
                    why[transport] = str(failed)
            stale = differing(bits(engine.modules[0]), bits(module))
            updated[transport] = sorted(bits(module).keys() - set(stale))
        sets = {tuple(names) for names in updated.values()}
        check("every transport updates the same names", len(sets) == 1, updated, why)
        check("and these are all", set().union(*sets) == set(bits(module)), updated, why)
        only = {n: t for n, t in module.state_dict().items() if n.startswith("target.")}
        publisher = f.publisher(StateDictSource(only))
        e = mismatch("unsent names are refused", publisher, 9)
        check("unsent names are named", "2 missing" in str(e) and "draft.weight" in str(e), e)


@case
def T23_names_that_match_nothing_are_an_error_with_count_and_examples() -> None:
    def make(expert: str = "experts.e{}") -> nn.Module:
        module = nn.Module()
        for name in ("dense", "experts", "mlp"):
            module.add_module(name, nn.Module())
        for i in range(300):
            path, leaf = ("experts", f"e{i}") if i < 96 else ("dense", f"d{i}")
            getattr(module, path).register_buffer(leaf, torch.zeros(2))
        return module

    module = make()
    fill(module, 5)
    with site("r0", make=make) as f:
        live: Any = f.engines["r0"].modules[0]
        before = bits(live)
        other = ModuleSource(module, rename=lambda n: n.replace("experts.e", "mlp.expert_"))
        publisher = f.publisher(other)
        e = mismatch("unknown names are an error by default", publisher, 1)
        text = str(e)
        check("they are counted", "96 missing, 96 extra" in text, text)
        check("examples are given", all(f"mlp.expert_{i}" in text for i in range(5)) and "more" in text, text)
        check("nothing was written", not differing(before, bits(live)) and f.engines["r0"].held()[0].version == 0)
        publisher.source = ModuleSource(module)
        with must("the same names commit"):
            publisher.publish(2)
        check("they hold", holds(f.engines["r0"], module))
