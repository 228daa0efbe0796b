"""The agent as a program: ``weightplane inference-agent --engine module:factory`` calls ``run_agent``.

The factory takes no positional argument and returns an ``Engine``, or a ``Served`` when it can generate too. SIGTERM
and SIGINT leave in good order: no further update, the one under way is finished, goodbye.
"""

from __future__ import annotations

import importlib
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

from weightplane.controlplane.dial import Dial

from .agent import InferenceAgent
from .engines.base import Engine, RequestAborted
from .generate import GenerateServer, Generator
from .session import SessionStatus

__all__ = ["ENGINES", "Served", "load_engine", "run_agent"]

log = logging.getLogger("weightplane.inference_agent")

ENGINES = "weightplane.engines"


@dataclass(frozen=True)
class Served:
    """An engine and how it generates. ``stop_with``: see ``GenerateServer``."""

    engine: Engine
    generator: Generator | None = None
    stop_with: type[Exception] = RequestAborted


def load_engine(spec: str, options: Mapping[str, Any] | None = None) -> Served:
    """Call the factory that ``spec`` names: ``module:factory``, or the name of an entry point ``weightplane.engines``.

    ``options`` are its keyword arguments. ``ValueError`` if there is no such factory or it returns something else.
    """
    if ":" in spec:
        module, _, attribute = spec.partition(":")
        try:
            factory: Any = importlib.import_module(module)
            for part in attribute.split("."):
                factory = getattr(factory, part)
        except (ImportError, AttributeError) as e:
            raise ValueError(f"engine {spec!r}: {e}") from e
    else:
        found = {e.name: e for e in entry_points(group=ENGINES)}
        if spec not in found:
            raise ValueError(f"engine {spec!r}: expected module:factory, or one of {sorted(found)}")
        factory = found[spec].load()
    made = factory(**(options or {}))
    if isinstance(made, Engine):
        return Served(made)
    if isinstance(made, Served):
        return made
    raise ValueError(f"engine {spec!r}: its factory returned {type(made).__name__}, expected an Engine or a Served")


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
    on_ready: Callable[[InferenceAgent, GenerateServer | None], None] | None = None,
    install_signals: bool = True,
    stop: threading.Event | None = None,
) -> int:
    """Run one replica until a signal, ``stop``, or another agent taking its name over; returns the exit status.

    ``generate_port``: serve ``/generate`` there (0 = any free port, None = not at all). ``on_ready`` gets the running
    agent and server. Signals are installed on the main thread only, and put back.
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
