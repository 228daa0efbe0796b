"""The examples run as they stand, and the README shows the one that it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, timeout: float = 100) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_minimal_example_computes_with_the_published_weights() -> None:
    said = run("minimal.py")
    assert said.strip() == "version 1 on ('replica-a',): computed by version 1, same outputs: True"


def test_the_readme_shows_the_minimal_example() -> None:
    code = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8").split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_transport_of_the_docs_is_one_sitting() -> None:
    code = (ROOT / "examples" / "my_transport.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip()]) <= 110, "docs/transports.md says about 100 lines"
