"""``Popen`` and ``run`` for Python processes that begin with torch imported: that is most of what starting one costs.

``Popen([sys.executable, "-m", ...])`` asks a process that has imported torch, and nothing else, to fork; the fork
becomes what a new interpreter would be: arguments, environment, folder, descriptors, ``__main__``. It is a child of the
caller (waited for, killed and found by its pid as any other), shares no state with its siblings, and imports grpc and
weightplane itself. What a fork cannot be is started the slow way: other programs, options of the interpreter, what is
read before ``main`` (``PYTHON*``, ``LD_*``, ``MALLOC_*`` ..., a ``sitecustomize``). ``WEIGHTPLANE_TEST_COLD=1`` starts
everything so, and so does a machine with a CUDA device.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Popen", "run"]

ROOT = Path(__file__).resolve().parents[1]
_SUBREAPER, _ARENA_MAX = 36, -8  # PR_SET_CHILD_SUBREAPER, M_ARENA_MAX
_EARLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENBLAS_", "KMP_", "MKL_", "TORCH_")
_HANDLED = ("PYTHONPATH", "MALLOC_ARENA_MAX", "MKL_NUM_THREADS")  # what the fork makes up for
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_libc = ctypes.CDLL(None, use_errno=True)


class _Parent:
    """The process that has imported ``preload``. ``fork`` may be called from any thread."""

    def __init__(self, preload: str) -> None:
        self._lock = threading.Lock()
        self.early = _early(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", preload, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        atexit.register(self.close)

    def fork(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """The new child's pid. Raises ``ConnectionError`` where this process cannot fork."""
        data = json.dumps(order).encode()
        with self._lock:
            _prctl(_SUBREAPER, 1)  # the fork's own parent ends at once: for so long, it is we who inherit it
            try:
                socket.send_fds(self._socket, [len(data).to_bytes(4, "little")], descriptors)
                self._socket.sendall(data)
                answer = self._socket.recv(4)
            finally:
                _prctl(_SUBREAPER, 0)
        if len(answer) != 4:
            raise ConnectionError(f"the process that forks ended with {self.process.wait(10)}")
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        self.process.wait(10)


_parents: dict[str, _Parent] = {}
_starting = threading.Lock()
_signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def _parent(preload: str) -> _Parent:
    with _starting:
        found = _parents.get(preload)
        if found is not None and found.process.poll() is not None:
            found.close()
            found = None
        if found is None:
            found = _parents[preload] = _Parent(preload)
        return found


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _early(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_EARLY) and k not in _HANDLED}


def _can_fork(asked: dict[str, Any]) -> bool:
    args = asked["args"]
    if os.environ.get("WEIGHTPLANE_TEST_COLD") or os.path.exists("/dev/nvidiactl"):
        return False
    if not isinstance(args, list) or len(args) < 3 or str(args[0]) != sys.executable or args[1] not in ("-m", "-c"):
        return False
    plain = ("executable", "preexec_fn", "shell", "gid", "gids", "uid", "pass_fds")
    return asked["umask"] < 0 and asked["close_fds"] and not any(asked[name] for name in plain)


def _customized(environment: Any) -> bool:
    """Whether the interpreter would run code of the caller's before ``main``."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return any(Path(folder, "sitecustomize.py").exists() for folder in filter(None, folders))


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``. ``preload``: the modules, with commas between, that what it starts may find imported."""

    def __init__(self, args: Any, *, preload: str = "torch", **options: Any) -> None:
        self._preload = preload
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        asked = _signature.bind(self, *given).arguments
        environment = os.environ if asked["env"] is None else asked["env"]
        parent = _parent(self._preload) if _can_fork(asked) and not _customized(environment) else None
        if parent is None or parent.early != _early(environment):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        order = {
            "args": [os.fspath(a) for a in asked["args"]],
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "env": dict(environment),
            "session": asked["start_new_session"],
            "group": asked["process_group"],
            "parent": os.getpid(),
        }
        ends = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        self.pid = parent.fork(order, [i if end == -1 else end for i, end in enumerate(ends)])
        self._child_created = True
        every = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in every))  # type: ignore[attr-defined]


def run(args: list[Any], *, timeout: float | None = None, check: bool = False, **options: Any) -> Any:
    """``subprocess.run``, for what gives no input."""
    if options.pop("capture_output", False):
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# --- the process that forks


def _serve(preload: str, connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In this process: None, at the connection's end. In each fork: what to become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those that wait for us
    for name in preload.split(","):
        importlib.import_module(name)
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        if not data:
            return None
        length = int.from_bytes(data, "little")
        order = b""
        while len(order) < length:
            order += connection.recv(length - len(order))
        said, say = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if child:
                os.write(say, child.to_bytes(4, "little"))
                os._exit(0)
            os.close(said)
            os.close(say)
            return json.loads(order), descriptors
        os.close(say)
        pid = os.read(said, 4)
        os.close(said)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(pid)


def _become(order: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """What happens between ``exec`` and ``main``, and then ``main``."""
    until = time.monotonic() + 10
    while os.getppid() != order["parent"]:
        if time.monotonic() > until:
            os._exit(1)  # it has died
        time.sleep(0.0005)  # nothing tells of it
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    if order["session"]:
        os.setsid()
    if order["group"] >= 0:
        os.setpgid(0, order["group"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arenas := os.environ.get("MALLOC_ARENA_MAX"):
        _libc.mallopt(_ARENA_MAX, int(arenas))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
    _, how, what, *arguments = order["args"]
    for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:
        del sys.modules[name]
    roots = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    sys.path[:1] = [order["cwd"] if how == "-m" else "", *roots]
    importlib.invalidate_caches()
    sys.orig_argv[:] = order["args"]
    sys.argv[:] = [how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = vars(sys.modules["__main__"])
        for name in [n for n in main if not (n.startswith("__") and n.endswith("__"))]:
            del main[name]
        main.pop("__file__", None)
        exec(compile(what, "<string>", "exec"), main)


if __name__ == "__main__":
    connection_ = socket.socket(fileno=int(sys.argv[2]))
    found_ = _serve(sys.argv[1], connection_)
    if found_ is not None:
        _become(*found_, connection_)
