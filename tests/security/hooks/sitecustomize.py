"""Loaded by every Python process that has this folder on PYTHONPATH: notes what unpickles, in ``WEIGHTPLANE_AUDIT``.

Every unpickled class or function raises the audit event ``pickle.find_class``; plain values do not, so that the ways in
are wrapped too. ``started`` is noted for each process, so that a test sees that the hook was there.
"""

import os
import sys
import types

_PATH = os.environ.get("WEIGHTPLANE_AUDIT", "")


def _note(text: str) -> None:
    fd = os.open(_PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{os.getpid()} {text}\n".encode())
    finally:
        os.close(fd)


def _where() -> str:
    frame: types.FrameType | None = sys._getframe(2)
    out: list[str] = []
    while frame is not None and len(out) < 6:
        out.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(out)


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _note(f"find_class {args[0]}.{args[1]} {_where()}")


if _PATH:
    import pickle  # noqa: TID251 - to see that nobody else uses it

    def _wrap(name: str) -> None:
        real = getattr(pickle, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            _note(f"{name} {_where()}")
            return real(*args, **kwargs)

        setattr(pickle, name, wrapped)

    _wrap("load")
    _wrap("loads")
    sys.addaudithook(_hook)
    _note(f"started {' '.join(sys.orig_argv[1:4])}")
