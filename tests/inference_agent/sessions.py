"""A server that answers control sessions as a test says, and an agent's session with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from weightplane.controlplane.dial import Dial
from weightplane.inference_agent.session import ControlSession
from weightplane.v1 import agent_pb2

Answer = Callable[[Any, Any], Iterator[agent_pb2.SessionResponse]]


@contextmanager
def session_with(answer: Answer, agent_id: str, incarnation: str) -> Iterator[ControlSession]:
    """A session that is not started yet; stopped with the block. ``answer`` is called for each stream."""
    server = grpc.server(ThreadPoolExecutor(4))
    method = grpc.stream_stream_rpc_method_handler(
        answer, agent_pb2.SessionRequest.FromString, agent_pb2.SessionResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("weightplane.v1.AgentService", {"Session": method})
    server.add_generic_rpc_handlers((service,))
    dial = Dial(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    with dial.channel() as channel:
        hello = agent_pb2.Hello(group="g", agent_id=agent_id, incarnation=incarnation)
        session = ControlSession(dial, channel, hello, lambda _: None, lambda _: None, lambda _: None)
        try:
            yield session
        finally:
            session.stop()
    server.stop(None).wait()
