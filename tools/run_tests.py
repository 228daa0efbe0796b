"""Runs pytest for ``make test``: in processes side by side, then what needs quiet; what failed is looked at once more.

``python tools/run_tests.py [--jobs N] [pytest's arguments]``. Many tests start processes and have deadlines. A few
(``AGAIN``) that failed are run once more when nothing else runs, to tell whoever reads the output what to look for:
those that pass then are listed as unsteady, each a race in the product or in the test. They have failed all the same.

Ends with 0, or with pytest's status of the first run that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

AGAIN = 4
CACHE = ".pytest_cache/again"
_PASSED, _FAILED, _NOTHING = 0, 1, 5  # pytest's exit statuses


def run(*words: str) -> int:
    """pytest, with what failed kept apart from what a person's own runs left in the cache."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}", *words]
    # Hundreds of processes import the same modules, and each run every test file: compiled once, not each time.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, check=False, env=env).returncode


def failed() -> list[str]:
    """The tests that failed in the runs since the cache was cleared."""
    try:
        found: dict[str, bool] = json.loads(Path(CACHE, "v/cache/lastfailed").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return list(found)


def first_runs(jobs: int, words: Sequence[str]) -> list[int]:
    """The statuses of the parts. One may be empty (``tests/core``), not both."""
    if not jobs:
        return [run("--cache-clear", *words)]
    spread = ("-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder")  # in the order of tests/conftest.py
    shared = run("--cache-clear", *spread, "--part", "shared", *words)
    if shared not in (_PASSED, _FAILED, _NOTHING):
        return [shared]  # interrupted, or pytest could not start: there is nothing to go on with
    print("== marked alone", flush=True)
    alone = run("--part", "alone", *words)
    return [shared, alone] if shared == alone else [s for s in (shared, alone) if s != _NOTHING]


def main(words: Sequence[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=0, help="processes side by side; default 0: one, and no parts")
    asked, rest = parser.parse_known_args(words)
    worst = next((s for s in first_runs(asked.jobs, rest) if s != _PASSED), _PASSED)
    suspects = failed()
    if worst != _FAILED or not suspects:
        return worst
    if len(suspects) > AGAIN:
        print(f"== {len(suspects)} tests failed: too many to be races, none is looked at again", flush=True)
        return worst
    print(f"== {len(suspects)} failed: once more, alone, to tell races from the rest", flush=True)
    run("--last-failed", "--last-failed-no-failures=none", *rest)
    still = failed()
    unsteady = [name for name in suspects if name not in still]
    if unsteady:
        print("== UNSTEADY: failed above, passed alone. A race of the product or of the test: see CONTRIBUTING.md")
        for name in unsteady:
            print(f"==   {name}")
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
