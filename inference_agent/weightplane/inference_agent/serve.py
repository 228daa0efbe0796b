"""The agent as a program: ``weightplane inference-agent --engine module:factory`` calls ``run_agent``.

The factory takes no positional argument and returns an ``Engine``, or a ``Served`` when it can generate too. SIGTERM
and SIGINT leave in good order: no further update, the one under way is finished, goodbye.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

from weightplane.controlplane.dial import Dial
from weightplane.transports.retained import Retainer

from .agent import InferenceAgent
from .engines.base import Engine, RequestAborted
from .generate import GenerateServer, Generator
from .session import SessionStatus

__all__ = ["ENGINES", "EngineFailed", "Served", "load_engine", "run_agent"]

log = logging.getLogger("weightplane.inference_agent")

ENGINES = "weightplane.engines"


@dataclass(frozen=True)
class Served:
    """An engine and how it generates. ``stop_with``: see ``GenerateServer``."""

    engine: Engine
    generator: Generator | None = None
    stop_with: type[Exception] = RequestAborted


class EngineFailed(ValueError):
    """An engine that could not be made. ``frames``: where, in the code that the user gave; ours is left out."""

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.frames = _own_frames(cause) if cause is not None else ""


def _own_frames(error: BaseException) -> str:
    """The traceback from the first frame that is neither ours nor the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, "<frozen importlib", importlib.__file__ or "importlib")
    own = [f for f in frames if not f.filename.startswith(ours)]
    return "".join(traceback.format_list(own)).rstrip()


def load_engine(spec: str, options: Mapping[str, Any] | None = None) -> Served:
    """Call the factory that ``spec`` names: ``module:factory``, or the name of an entry point ``weightplane.engines``.

    ``options`` are its keyword arguments. ``EngineFailed`` if there is no such factory, or if it takes other arguments,
    raises, or returns something else.
    """
    factory = _factory(spec)
    _fits(spec, factory, options or {})
    try:
        made = factory(**(options or {}))
    except (Exception, SystemExit) as e:
        raise EngineFailed(f"engine {spec!r}: its factory raised {type(e).__name__}: {e}", e) from e
    if isinstance(made, Engine):
        return Served(made)
    if isinstance(made, Served):
        return made
    raise EngineFailed(f"engine {spec!r}: its factory returned {type(made).__name__}, expected an Engine or a Served")


def _factory(spec: str) -> Any:
    """What ``spec`` names."""
    module, colon, attribute = spec.partition(":")
    found = {e.name: e for e in entry_points(group=ENGINES)}
    if not colon and spec not in found:
        raise EngineFailed(f"engine {spec!r}: expected module:factory, or one of {sorted(found)}")
    try:
        if not colon:
            return found[spec].load()
        thing: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        name = e.name or "?"
        if module == name or module.startswith(f"{name}."):
            text = f"there is no module {name!r} in the current folder, on PYTHONPATH or installed"
            raise EngineFailed(f"engine {spec!r}: {text}") from e
        raise EngineFailed(f"engine {spec!r}: importing it needs the module {name!r}, which is not installed", e) from e
    except (Exception, SystemExit) as e:
        raise EngineFailed(f"engine {spec!r}: importing it raised {type(e).__name__}: {e}", e) from e
    for part in attribute.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError as e:
            there = ", ".join(sorted(n for n in vars(thing) if not n.startswith("_"))[:8]) or "nothing public"
            raise EngineFailed(f"engine {spec!r}: {module} has no {part!r}; it has {there}") from e
    if not callable(thing):
        raise EngineFailed(f"engine {spec!r}: expected a function that returns an engine, found {type(thing).__name__}")
    return thing


def _fits(spec: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments that the factory does not take, and the lack of one that it needs, before it runs."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # one written in C need not say what it takes
        return
    try:
        signature.bind(**options)
    except TypeError as e:
        takes = f"it takes ({', '.join(signature.parameters)}), each given with --engine-option key=value"
        raise EngineFailed(f"engine {spec!r}: its factory cannot be called: {e}; {takes}") from None


def run_agent(
    engine: str | Engine | Served | Callable[[], Engine | Served],
    dial: Dial | str,
    group: str,
    replica_id: str,
    *,
    engine_options: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    transports: Sequence[str] | None = None,
    generate_host: str = "127.0.0.1",
    generate_port: int | None = None,
    serving_address: str = "",
    serve_unsynced: bool = False,
    insecure_generate: bool = False,
    retain: Retainer | None = None,
    on_ready: Callable[[InferenceAgent, GenerateServer | None], None] | None = None,
    install_signals: bool = True,
    stop: threading.Event | None = None,
) -> int:
    """Run one replica until a signal, ``stop``, or another agent taking its name over; returns the exit status.

    ``generate_port``: serve ``/generate`` there (0 = any free port, None = not at all). ``on_ready`` gets the running
    agent and server. ``retain``: see ``InferenceAgent``. Signals are installed on the main thread only, and put back.
    """
    served = _served(engine, engine_options)
    stop = stop or threading.Event()
    server: GenerateServer | None = None
    if generate_port is not None:
        if served.generator is None:
            raise ValueError("this engine's factory returned no generator: it cannot serve /generate")
        server = GenerateServer(
            served.engine,
            served.generator,
            host=generate_host,
            port=generate_port,
            stop_with=served.stop_with,
            serve_unsynced=serve_unsynced,
            insecure=insecure_generate,
        ).start()
        serving_address = serving_address or server.address
    agent = InferenceAgent(
        dial,
        group,
        replica_id,
        served.engine,
        labels=labels,
        transports=transports,
        serving_address=serving_address or served.engine.serving_address,
        retain=retain,
    )
    restore = _signals(stop) if install_signals else {}
    why = "it was asked to stop"
    status = 0
    try:
        agent.start()
        if on_ready is not None:
            on_ready(agent, server)
        while not stop.wait(0.2):
            if agent.status().session is SessionStatus.SUPERSEDED:
                log.error("replica %s: another agent has taken this name over; leaving", replica_id)
                why, status = "superseded", 1
                break
    finally:
        agent.stop(why)
        if server is not None:
            server.stop()
        served.engine.close()
        if server is not None and not server.stop(1.0):
            log.warning("replica %s: a request is still being generated; the process ends all the same", replica_id)
        for number, handler in restore.items():
            signal.signal(number, handler)
    return status


def _served(engine: Any, options: Mapping[str, Any] | None) -> Served:
    if isinstance(engine, str):
        return load_engine(engine, options)
    if isinstance(engine, Engine):
        return Served(engine)
    if isinstance(engine, Served):
        return engine
    made = engine(**(options or {}))
    return made if isinstance(made, Served) else Served(made)


def _signals(stop: threading.Event) -> dict[int, Any]:
    """SIGTERM and SIGINT set ``stop``. Returns what was installed before."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number: int, _: FrameType | None) -> None:
        log.info("signal %d: leaving", number)
        stop.set()

    return {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGINT)}
