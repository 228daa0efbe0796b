"""What others say is shown on an operator's terminal, and orders nothing there."""

from __future__ import annotations

import json

import pytest

from weightplane.cli import output

EVIL = "evil \x1b[2J\x1b]0;title\x07\r \x9b31m [bold red]red[/] [/none] [link=x]\ntwo\tthree"
SHOWN = r"evil \x1b[2J\x1b]0;title\x07\r \x9b31m [bold red]red[/] [/none] [link=x]"


def test_control_characters_and_markup_of_others_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(f"of {EVIL}", ["a", "b"], [[EVIL, "x"]])
    said = capsys.readouterr().out
    assert said.count(SHOWN) == 2 and "two" in said
    assert not {c for c in said if ord(c) < 32 or 0x7F <= ord(c) < 0xA0} - {"\n"}


def test_a_line_too_and_json_escapes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    output.console.print(EVIL, markup=False, soft_wrap=True)
    output.err.print(EVIL, markup=False, soft_wrap=True)
    output.emit_json({"text": EVIL})
    said = capsys.readouterr()
    assert said.out.startswith(SHOWN) and said.err.startswith(SHOWN)
    assert "\x1b" not in said.out and json.loads(said.out.splitlines()[-1])["text"] == EVIL
