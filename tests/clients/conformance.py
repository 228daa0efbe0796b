"""Whether a trainer, written in any language, keeps the rules: pass or fail for each.

``python -m tests.clients.conformance node clients/node/bin/publish.js``: the command is given --address, --group,
--file, --step and, where a rule asks for it, --takeover; it ends with 0 once it has committed. ``--only RULE,...``
before it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.clients.rules import RULES
from tests.clients.stage import Client, staged


def verdict(name: str, client: Client) -> str:
    """Empty if the client keeps the rule, else how it does not."""
    with tempfile.TemporaryDirectory(prefix="weightplane-conformance-") as folder, staged(Path(folder)) as stage:
        try:
            RULES[name](stage, client)
        except AssertionError as e:
            return str(e) or "failed"
    return ""


def main(words: list[str]) -> int:
    """Run every rule."""
    names = list(RULES)
    if words[:1] == ["--only"]:
        names, words = words[1].split(","), words[2:]
    if not words or set(names) - set(RULES):
        print(__doc__, f"Rules: {', '.join(RULES)}", sep="\n")
        return 2
    failed = 0
    for name in names:
        began = time.monotonic()
        why = verdict(name, Client(words))
        failed += bool(why)
        print(f"{'FAIL' if why else 'pass'}  {name:10} {time.monotonic() - began:5.1f} s  {why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
