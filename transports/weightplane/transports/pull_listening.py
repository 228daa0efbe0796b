"""Where a sender listens for control connections: a unix socket of its own, and a TCP address if it is given one."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Final

from weightplane.controlplane.addresses import is_loopback_host

from .base import TransportError
from .pull_wire import problem_of, socket_path

__all__ = ["listen_tcp", "listen_unix"]

_PREFIX: Final = "weightplane-pull-"
_HALF_MADE_S: Final = 60.0  # a socket without its name may be one that is being made

log = logging.getLogger(__name__)


def listen_tcp(bind: str, advertise: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address to tell receivers. ``TransportError`` says what does not do."""
    problem = problem_of(bind, advertise)
    if problem:
        raise TransportError(problem)
    host, _, port = bind.rpartition(":")
    try:
        made = socket.create_server(
            (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as e:
        raise TransportError(f"WEIGHTPLANE_PULL_BIND={bind!r}: cannot listen there: {e.strerror or e}") from e
    if not is_loopback_host(host):
        log.warning("INSECURE, as asked for: control connections on %s are plaintext off loopback", bind)
    return made, advertise or f"{host}:{made.getsockname()[1]}"


def listen_unix(directory: Path) -> tuple[socket.socket, Path]:
    """A listening socket of this process, private, and its path. Those of dead processes are removed first."""
    _sweep(directory)
    path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    unnamed = directory / f".{path.name}"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_path(directory, unnamed.name) as at:  # complete and private before it has its name
            made.bind(at)
            os.chmod(at, 0o600)
        made.listen(128)
        os.rename(unnamed, path)
    except BaseException as e:
        made.close()
        unnamed.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise TransportError(f"cannot listen in {directory}: {e.strerror or e}; set WEIGHTPLANE_SHM_DIR") from e
        raise
    atexit.register(_remove, path, os.getpid())  # a process ends without shutting its transports down
    return made, path


def _remove(path: Path, pid: int) -> None:
    """Take our own name away; a forked child leaves it to its parent."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Remove sockets whose listener died."""
    try:
        names = [n for n in os.listdir(directory) if n.lstrip(".").startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        path = directory / name
        with contextlib.suppress(OSError), socket_path(directory, name) as at:
            if name.startswith(".") and time.time() - path.stat().st_mtime < _HALF_MADE_S:
                continue  # one that is being made
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(at)
                except ConnectionRefusedError:
                    path.unlink(missing_ok=True)
