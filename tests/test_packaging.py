"""What is published: the wheel's content, its metadata, and that the core works where torch is absent."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STUBS = sorted((ROOT / "proto" / "weightplane" / "v1").glob("*_pb2*.py"))
# Runs alone: no optional package can be imported, as on a machine with the core dependencies only.
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("torch", "numpy", "matplotlib", "pytest", "hypothesis", "safetensors", "starlette", "uvicorn"):
    sys.modules[name] = None
import weightplane
assert weightplane.__path__ and getattr(weightplane, "__file__", None) is None, "weightplane is not a namespace"
for package in ("weightplane.v1", "weightplane.controlplane", "weightplane.cli"):
    module = importlib.import_module(package)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith((".server.gateway", ".server.gateway_listener")):  # of the extra of that name
            importlib.import_module(found.name)
            print(found.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[PurePosixPath]:
    return {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}


def test_wheel_publishes_one_namespace_and_nothing_else(names: set[PurePosixPath]) -> None:
    dist_info = f"weightplane-{PROJECT['version']}.dist-info"
    assert {name.parts[0] for name in names} == {"weightplane", dist_info}
    assert PurePosixPath("weightplane/__init__.py") not in names, "it would hide the other import roots"
    assert PurePosixPath(f"{dist_info}/licenses/LICENSE") in names


def test_every_package_is_typed_and_documented(wheel: Path, names: set[PurePosixPath]) -> None:
    packages = {name.parent for name in names if name.suffix in (".py", ".pyi")}
    assert packages >= {PurePosixPath("weightplane") / name for name in ("v1", "controlplane", "cli", "transports")}
    assert {package for package in packages if package / "py.typed" not in names} == set()
    archive = zipfile.ZipFile(wheel)
    docs = {package: ast.get_docstring(ast.parse(archive.read(f"{package}/__init__.py"))) for package in packages}
    assert {package for package, doc in docs.items() if not doc} == set()


def test_wheel_carries_every_source_file_and_the_contract(names: set[PurePosixPath]) -> None:
    listing = ["git", "ls-files", "*/weightplane/*", ":!clients/*"]
    tracked = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in tracked} - names == set()
    assert any(name.suffix == ".proto" for name in names)


def test_core_dependencies_are_the_small_set(wheel: Path) -> None:
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(zipfile.ZipFile(wheel).read(metadata).decode())
    required = [entry for entry in message.get_all("Requires-Dist", []) if "extra ==" not in entry]
    core = {re.split(r"[^\w-]", entry)[0] for entry in required}
    assert core == {"grpcio", "grpcio-health-checking", "grpcio-status", "protobuf", "rich", "typer", "xxhash"}
    wanted = {"torch", "nccl", "ucx", "vllm", "etcd", "gateway", "otel", "demo", "dev"}
    assert set(message.get_all("Provides-Extra", [])) == wanted


def test_entry_points_name_what_is_in_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    groups = [PROJECT["scripts"], *PROJECT["entry-points"].values()]
    for target in (target for group in groups for target in group.values()):
        module, attribute = target.split(":")
        tree = ast.parse(archive.read(module.replace(".", "/") + ".py"))
        defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assigned = {
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for name in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(name, ast.Name)
        }
        assert attribute in defined | assigned, target


def test_control_plane_contract_and_cli_import_without_torch(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    # -S drops the editable install's path; the dependencies' folder is given back by name.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    code = f"import sys; sys.path[:0] = [{str(site)!r}, {dependencies!r}]\n{IMPORT_ALL}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 5, done.stdout


def test_stubs_exist_and_import_on_the_oldest_declared_protobuf_and_grpcio() -> None:
    assert STUBS, "no stubs committed under proto/weightplane/v1"
    floors = {re.split(">=", entry)[0]: re.split(">=", entry)[1] for entry in PROJECT["dependencies"] if ">=" in entry}
    for stub in STUBS:
        text = stub.read_text()
        if stub.name.endswith("_pb2_grpc.py"):
            assert f"GRPC_GENERATED_VERSION = '{floors['grpcio']}'" in text, stub.name
        else:
            assert f"Protobuf Python Version: {floors['protobuf']}\n" in text, stub.name
