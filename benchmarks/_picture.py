"""A benchmark's JSON as a picture, bars beside limits: ``python benchmarks/_picture.py FIGURES.json FILE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_LIMIT, _PLAIN, _DIGESTS = "#c9cdd2", "#2f6f9f", "#8fb8d3"
_PHASES = {
    "gather": "#d9a441",
    "wire": "#2f6f9f",
    "verify": "#6aa84f",
    "apply": "#8e5ea2",
    "decide": "#b0532f",
    "rest": "#c9cdd2",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw what the file holds. Needs matplotlib (the dev extra)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not any("model" in r["details"] for r in document["results"]):
        print("nothing was measured that could be drawn")
        return
    make = _updates if document["benchmark"] == "updates" else _transports
    figure = make(pyplot, document)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    print(f"drawn: {path}")


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    cards = machine.get("cards") or []
    what = f"{len(cards)} × {cards[0]['name']}" if cards else f"{machine['cpu']}, {machine['cores']} cores"
    return f"{what}, {document['date'][:10]}, commit {document['commit']}"


def _transports(pyplot: Any, document: dict[str, Any]) -> Any:
    by_case: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in document["results"]:
        d = r["details"]
        if "model" in d:
            by_case.setdefault((d["model"], d["receivers"], d["layout"]), []).append(r)
    rows = [len(found) for found in by_case.values()]
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(9, 1.0 + 0.31 * sum(rows) + 0.75 * len(rows)), squeeze=False, height_ratios=rows
    )
    for axis, ((name, n, layout), found) in zip(axes[:, 0], by_case.items(), strict=True):
        nbytes = max(r["details"]["bytes"] for r in found if "transport" in r["details"]) if found else 0
        where = "" if layout == "cpu" else f", {layout}"
        axis.set_title(
            f"{name}: {nbytes / 1e9:.3g} GB to {n} receiver{'s' if n > 1 else ''}{where}", loc="left", fontsize=10
        )
        _bars(axis, found)
    axes[-1, 0].legend(handles=_legend(), loc="upper center", bbox_to_anchor=(0.5, -0.6 / rows[-1] - 0.12), ncol=4)
    figure.suptitle(f"Transports beside their limits\n{_caption(document)}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    return figure


def _bars(axis: Any, found: list[dict[str, Any]]) -> None:
    # A card reads ten times what it copies to another: such a bar is cut, so that the others can be told apart.
    wires = [r for r in found if "transport" in r["details"]] or found
    edge = 1.1 * max(max([r["value"], r["limit"], *r["samples"]]) for r in wires)
    for y, r in enumerate(found):
        d = r["details"]
        colour = _LIMIT if "transport" not in d else _DIGESTS if d["digests"] else _PLAIN
        axis.barh(y, min(edge, r["value"]), color=colour, height=0.72)
        text = f" {r['value']:.3g}"
        if r["value"] > edge:
            axis.text(edge, y, f"⋯ {text}", va="center", fontsize=8)
            continue
        low, high = min(r["samples"]), min(edge, max(r["samples"]))
        axis.plot([low, high], [y, y], color="#333333", linewidth=0.8)
        if r["limit"]:
            axis.plot([r["limit"]] * 2, [y - 0.44, y + 0.44], color="#b02a2a", linewidth=2)
            text += f"  ({r['ratio']:.2f} of {r['limit_name']})"
        right = min(edge, max([r["value"], r["limit"], *r["samples"]]))
        axis.text(right, y, text, va="center", fontsize=8)
    axis.set_yticks(range(len(found)), [r["case"].partition("/")[0] for r in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.3 * edge)
    axis.set_xlabel(found[0]["unit"], fontsize=8, loc="right", labelpad=1)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=_PLAIN, label="wire"),
        Patch(color=_DIGESTS, label="wire and digests"),
        Patch(color=_LIMIT, label="what the machine does"),
        Line2D([], [], color="#b02a2a", linewidth=2, label="its limit"),
    ]


def _updates(pyplot: Any, document: dict[str, Any]) -> Any:
    panels: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in document["results"]:
        d = r["details"]
        if "phases" in d:
            panels.setdefault((d["model"], d["receivers"], d["layout"]), []).append(r)
    rows = [len(found) for found in panels.values()]
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(10, 1.2 + 0.34 * sum(rows) + 0.8 * len(rows)), squeeze=False, height_ratios=rows
    )
    for axis, ((name, n, layout), found) in zip(axes[:, 0], panels.items(), strict=True):
        where = "" if layout == "cpu" else f", {layout}"
        nbytes = found[0]["details"]["bytes"] / 1e9
        axis.set_title(f"{name}: {nbytes:.3g} GB to {n} replica{'s' if n > 1 else ''}{where}", loc="left", fontsize=10)
        _stacks(axis, found)
    handles = [_patch(colour, name) for name, colour in _PHASES.items()]
    handles.append(_legend()[-1])
    axes[-1, 0].legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.5 / rows[-1] - 0.14), ncol=4)
    figure.suptitle(f"Updates from start to commit, beside one copy of the bytes\n{_caption(document)}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    return figure


def _patch(colour: str, name: str) -> Any:
    from matplotlib.patches import Patch

    words = {"rest": "rest: calls, hashing at the trainer, reading back what was applied"}
    return Patch(color=colour, label=words.get(name, name))


def _stacks(axis: Any, found: list[dict[str, Any]]) -> None:
    from statistics import median

    right = max(r["value"] for r in found)
    for y, r in enumerate(found):
        at = 0.0
        for phase, colour in _PHASES.items():
            width = median(r["details"]["phases"][phase]) if phase != "rest" else max(0.0, r["value"] - at)
            axis.barh(y, width, left=at, color=colour, height=0.7)
            at += width
        axis.plot([r["limit"]] * 2, [y - 0.44, y + 0.44], color="#b02a2a", linewidth=2)
        axis.text(max(at, r["limit"]), y, f" {r['value']:.3g} s  ({r['ratio']:.2f})", va="center", fontsize=8)
        right = max(right, at, r["limit"])
    axis.set_yticks(range(len(found)), [", ".join(r["case"].split("/")[:3]) for r in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * right)
    axis.set_xlabel("s", fontsize=8, loc="right", labelpad=1)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
