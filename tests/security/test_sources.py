"""What the product's source must not hold: a way to unpickle or to run what a message names, the wall clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("controlplane", "transports", "inference_agent", "trainer_agent")
#: Modules that make objects out of bytes, or code out of text.
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "yaml"}
SPAWNS = {"multiprocessing"}  # its queues, pipes and arguments are pickles
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load")}
#: Who may import by a name, and whose name it is: never a message's.
IMPORTERS = {
    "inference_agent/weightplane/inference_agent/serve.py": "the user's, on the command line: --engine module:factory",
    "inference_agent/weightplane/inference_agent/vllm_plugin/compat.py": "vLLM's own modules, by constants",
    "trainer_agent/weightplane/parity/running.py": "the user's, on the command line: --scorer module:function",
    "transports/weightplane/transports/conformance/peer.py": "the test's, through a pipe of its own",
    "transports/weightplane/transports/ucx_agent.py": "NIXL's own modules, by constants",
}
#: Who may look at the wall clock, and why a step of it does no harm.
CLOCKS = {
    "controlplane/weightplane/controlplane/server/convert.py": "a time for people, in an answer",
    "controlplane/weightplane/controlplane/server/logs.py": "a time for people, in the log",
    "transports/weightplane/transports/pull_listening.py": "how old a half-made socket of somebody else's is",
}


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    files = [f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*.py")) if not f.stem.endswith("_pb2")]
    assert len(files) > 150
    return tuple((str(f.relative_to(ROOT)), ast.parse(f.read_text())) for f in files)


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield name, node


def test_nothing_unpickles() -> None:
    found = []
    for name, node in nodes(ast.Import):
        assert isinstance(node, ast.Import)
        found += [(name, a.name) for a in node.names if a.name.partition(".")[0] in PICKLES | SPAWNS]
    for name, node in nodes(ast.ImportFrom):
        assert isinstance(node, ast.ImportFrom)
        if (node.module or "").partition(".")[0] in PICKLES | SPAWNS:
            found.append((name, node.module or ""))
    for name, node in nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in LOADS:
            found.append((name, f"{node.value.id}.{node.attr}"))
    assert found == []


def test_nothing_runs_or_imports_what_a_message_names() -> None:
    found = []
    for name, node in nodes(ast.Call):
        assert isinstance(node, ast.Call)
        called = node.func
        if isinstance(called, ast.Name) and called.id in CALLS:
            found.append((name, called.id))
        if isinstance(called, ast.Attribute) and called.attr == "import_module" and name not in IMPORTERS:
            found.append((name, "import_module"))
        if isinstance(called, ast.Attribute) and called.attr in ("system", "popen") and _of(called) == "os":
            found.append((name, f"os.{called.attr}"))
        if any(k.arg == "shell" for k in node.keywords):
            found.append((name, "shell="))
    assert found == []


def test_no_decision_hangs_on_the_wall_clock() -> None:
    found = set()
    for name, node in nodes(ast.Attribute):
        assert isinstance(node, ast.Attribute)
        wall = (_of(node), node.attr) in {("time", "time"), ("time", "time_ns"), ("time", "localtime")}
        if wall or node.attr in ("utcnow", "fromtimestamp") or (_of(node) == "datetime" and node.attr == "now"):
            found.add(name)
    assert found == set(CLOCKS)


def _of(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""
