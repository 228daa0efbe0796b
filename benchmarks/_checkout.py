"""The checkout as an installed package, without pip: ``python benchmarks/_checkout.py FOLDER`` prints the PYTHONPATH.

The import roots are those of the checkout, so what runs is what travelled; entry points (transports, engines) are found
through a dist-info in FOLDER, made of ``pyproject.toml``. Standard library only, Python 3.11 or later.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def install(folder: Path) -> str:
    """Write the dist-info; returns the value of PYTHONPATH."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = told["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    roots = [str(ROOT / name) for name in told["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    return os.pathsep.join([*roots, str(folder)])


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).resolve()))
