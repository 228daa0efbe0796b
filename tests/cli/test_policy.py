"""``weightplane policy``: a group's policies shown, changed one by one, and taken back."""

from __future__ import annotations

from typing import Any

from .site import GROUP, Site


def said(site: Site, *words: str, group: str = GROUP) -> dict[str, Any]:
    policy: dict[str, Any] = site.json("policy", "-g", group, *words)["policy"]
    return policy


def test_what_is_not_named_stays_as_it_is(site: Site) -> None:
    before = said(site)
    words = ["--cache", "salt", "--pause", "wait", "--on-failure", "continue_stale", "--max-stale", "2"]
    words += ["--verify", "full", "--parity", "quarantine", "--min-replicas", "1", "--at-least", "1"]
    changed = said(site, *words, "--update-timeout", "30")
    assert changed == {
        **before,
        "cache": "CACHE_POLICY_SALT",
        "pause": "PAUSE_MODE_WAIT",
        "failure": "FAILURE_POLICY_CONTINUE_STALE",
        "max_stale_versions": 2,
        "verify": "VERIFY_LEVEL_FULL",
        "parity": "PARITY_POLICY_QUARANTINE",
        "commit": {"at_least": 1},
        "update_timeout_ms": "30000",
    }
    assert said(site, "--at-least", "0") == {**changed, "commit": {"all": True}} == said(site)
    said(site, "--cache", "clear", "--pause", "keep", "--on-failure", "raise", "--max-stale", "0", "--parity", "record")
    assert "all participants prepared" in site.run("policy", "-g", GROUP)


def test_a_condition_that_nobody_tells_takes_the_replica_out_of_routing_and_that_is_shown_at_once(site: Site) -> None:
    text = site.run("policy", "-g", GROUP, "--declare", "dtype=bfloat16", "--block", "HeadDtype", "--block", "Dtype")
    assert "dtype=bfloat16" in text and "HeadDtype, Dtype" in text and "condition HeadDtype is not told" in text
    assert said(site, "--unblock", "HeadDtype")["blocking"] == ["Dtype"]
    back = said(site, "--unblock", "all", "--declare", "dtype=")
    assert (back["blocking"], back["declared"]) == ([], {})
    assert site.json("status", "-g", GROUP)["replicas"][0]["routable"] is True


def test_a_group_is_made_by_its_first_policy_and_not_by_a_look(site: Site) -> None:
    assert "UNKNOWN_GROUP" in site.run("policy", "-g", "new", code=7)
    made = said(site, "--min-replicas", "3", group="new")
    assert made["min_replicas"] == 3 and said(site, group="new") == made


def test_what_cannot_be_is_refused_and_changes_nothing(site: Site) -> None:
    before = said(site)
    for words, expected in (
        (("--cache", "none"), "expected one of clear, keep, salt"),
        (("--declare", "colour=red"), "head_dtype"),
        (("--declare", "dtype"), "expected NAME=VALUE"),
        (("--declare", "dtype="), "it is not declared"),
        (("--unblock", "Dtype"), "none blocks"),
        (("--block", "LogprobMode"), "LogprobsMode, "),
        (("--update-timeout", "0"), "greater than or equal to 1"),
    ):
        assert expected in site.run("policy", "-g", GROUP, *words, "--min-replicas", "5", code=2)
    assert said(site) == before


def test_continue_stale_without_a_number_of_failures_that_it_forgives_is_refused(site: Site) -> None:
    before = said(site)
    stale = ("--on-failure", "continue_stale")
    for words in (stale, (*stale, "--max-stale", "0")):
        text = site.run("policy", "-g", GROUP, *words, code=2)
        assert "--max-stale of at least 1" in text and "found 0" in text
    assert said(site) == before
    assert said(site, *stale, "--max-stale", "2")["max_stale_versions"] == 2
    assert "--max-stale of at least 1" in site.run("policy", "-g", GROUP, "--max-stale", "0", code=2)
    said(site, "--on-failure", "raise", "--max-stale", "0")
