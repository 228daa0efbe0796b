"""Every trainer of ours keeps every rule, and a bad one is found by the rule that it breaks."""

from __future__ import annotations

import sys

import pytest

from tests.clients import bad_client
from tests.clients.conformance import verdict
from tests.clients.needs import NODE, PROGRAM, need
from tests.clients.rules import RULES
from tests.clients.stage import Client

HERE = "tests.clients"
CLIENTS = {
    "python": Client([sys.executable, "-m", f"{HERE}.python_client"]),
    "node": Client(["node", str(NODE / "bin" / "publish.js")]),
    "cpp": Client([str(PROGRAM), "--transport", "grpc"]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("language", CLIENTS)
def test_a_trainer_keeps_the_rule(language: str, rule: str) -> None:
    if language != "python":
        need(language)
    assert verdict(rule, CLIENTS[language]) == ""


def bad(defect: str = "") -> Client:
    return Client([sys.executable, "-m", f"{HERE}.bad_client", *(["--defect", defect] if defect else [])])


@pytest.mark.parametrize("rule", RULES)
def test_the_bad_client_without_a_defect_keeps_the_rule(rule: str) -> None:
    assert verdict(rule, bad()) == ""


@pytest.mark.parametrize(("defect", "rule"), bad_client.DEFECTS.items(), ids=bad_client.DEFECTS)
def test_a_planted_defect_is_found_by_its_rule(defect: str, rule: str) -> None:
    assert verdict(rule, bad(defect)) != ""


def test_each_rule_has_a_defect_that_it_finds() -> None:
    assert set(bad_client.DEFECTS.values()) == set(RULES)
