"""The contract's tooling: generate stubs, check for drift, keep the compatibility baseline.

Run by the Makefile with .venv-proto's Python (see tools/proto-requirements.txt):
    python tools/proto.py generate   format the .proto files, write the stubs beside them, remove stale ones
    python tools/proto.py check      fail on lint, format, incompatible changes, or stubs other than the committed ones
    python tools/proto.py baseline   accept the contract as it is now as what later changes are compared with
"""

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from reference import updated  # type: ignore[import-not-found]  # beside this script when it runs

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
BASELINE = PROTO / "baseline.binpb"
PAGE = ROOT / "docs" / "protocol.md"
BIN = Path(sys.executable).parent  # protoc's plugins and buf live beside this Python
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def proto_files() -> list[str]:
    """The .proto files, relative to proto/, in a fixed order."""
    return sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))


def stub_files(root: Path) -> set[str]:
    """The generated files under root, relative to it."""
    return {path.relative_to(root).as_posix() for pattern in STUB_PATTERNS for path in root.rglob(pattern)}


def run(*command: str) -> bool:
    """Run a command in the repository's root; say whether it succeeded. Its own output is the explanation."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode == 0


def buf(*arguments: str) -> bool:
    """Run the pinned buf."""
    return run(str(BIN / "buf"), *arguments)


def generate_into(target: Path) -> bool:
    """Write the stubs and their typing stubs of every .proto file under target."""
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    outputs += ["--mypy_opt=quiet", "--mypy_grpc_opt=quiet"]
    return run(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *proto_files())


def page_now() -> str | None:
    """docs/protocol.md as the comments of the .proto files make it now."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "image.binpb"
        options = [f"--descriptor_set_out={image}", "--include_source_info"]
        if not run(sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *options, *proto_files()):
            return None
        return str(updated(PAGE, descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())))


def generate() -> list[str]:
    """Format the contract, regenerate every stub in place, remove stubs whose .proto file is gone."""
    if not proto_files():
        return ["no .proto file under proto/"]
    if not buf("format", "--write"):
        return ["buf format failed"]
    # Generated apart first: a contract that does not compile must leave the stubs as they are.
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        if not generate_into(fresh):
            return ["protoc failed; the stubs are unchanged"]
        wanted = stub_files(fresh)
        for name in sorted(stub_files(PROTO) - wanted):
            print(f"removed stale {name}")
            (PROTO / name).unlink()
        for name in sorted(wanted):
            old, new = PROTO / name, (fresh / name).read_bytes()
            if not old.exists() or old.read_bytes() != new:
                old.write_bytes(new)
                print(f"wrote {name}")
    page = page_now()
    if page is None:
        return ["the reference could not be made"]
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        PAGE.write_text(page, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return []


def drift() -> list[str]:
    """What differs between the stubs in the tree and those the .proto files give now."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        if not generate_into(fresh):
            return ["protoc failed"]
        wanted, present = stub_files(fresh), stub_files(PROTO)
        _, differing, broken = filecmp.cmpfiles(fresh, PROTO, sorted(wanted & present), shallow=False)
    problems = [f"missing stub: {name}" for name in sorted(wanted - present)]
    problems += [f"stale stub, its .proto file is gone: {name}" for name in sorted(present - wanted)]
    problems += [f"stub differs from its .proto file: {name}" for name in sorted(differing + broken)]
    if problems:
        problems.append("run make proto and commit what it writes")
    return problems + untracked()


def untracked() -> list[str]:
    """Contract files that git does not track: they work here and are missing in every clone."""
    command = ["git", "ls-files", "--others", "--", "proto"]  # ignored files count too: no --exclude-standard
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        return []  # a source archive, not a clone
    names = [name for name in listing.stdout.splitlines() if "__pycache__" not in name]
    return [f"not tracked by git, run git add: {name}" for name in sorted(names)]


def check() -> list[str]:
    """Everything the contract must satisfy before it is committed."""
    if not proto_files():
        return ["no .proto file under proto/"]
    problems = []
    if not buf("lint"):
        problems.append("buf lint failed")
    if not buf("format", "--diff", "--exit-code"):
        problems.append("not formatted: run make proto")
    problems += drift()
    if not PAGE.exists() or page_now() != PAGE.read_text(encoding="utf-8"):
        problems.append("docs/protocol.md differs from the .proto files: run make proto and commit what it writes")
    if not BASELINE.exists():
        print(
            f"\n!!! {BASELINE.relative_to(ROOT)} IS ABSENT: INCOMPATIBLE CHANGES ARE NOT DETECTED !!!\n"
            "!!! run `make proto-baseline` and commit it !!!\n",
            file=sys.stderr,
        )
    elif not buf("breaking", "--against", str(BASELINE.relative_to(ROOT))):
        problems.append("incompatible with the baseline; if that is meant, say why and run make proto-baseline")
    return problems


def baseline() -> list[str]:
    """Record the contract as it is now, without comments and positions."""
    return [] if buf("build", "--exclude-source-info", "--output", str(BASELINE)) else ["buf build failed"]


def main() -> int:
    """Run one command; print every problem; exit 1 if there is any."""
    commands = {"generate": generate, "check": check, "baseline": baseline}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    problems = commands[sys.argv[1]]()
    for problem in problems:
        print(f"proto {sys.argv[1]}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
