"""What the tests of the gateway share: a server that has one, and calls by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.server.scripted import FAST, server
from weightplane.controlplane.server.app import Running, ServerConfig
from weightplane.controlplane.server.security import Role, Security, parse_tokens
from weightplane.controlplane.store.memory import MemoryStore

__all__ = ["FLEET", "TOKENS", "TRANSFER", "Answer", "bearer", "connection", "eventually", "gated", "post", "tokens"]

FLEET, TRANSFER = "/weightplane.v1.FleetService/", "/weightplane.v1.WeightTransferService/"
TOKENS = {role: f"{role.value}-{'s3cret' * 4}" for role in Role}
Answer = tuple[int, dict[str, Any]]


@contextlib.asynccontextmanager
async def gated(security: Security | None = None) -> AsyncIterator[Running]:
    config = ServerConfig(MemoryStore(), core=FAST, security=security or Security(), gateway="127.0.0.1:0")
    async with server(config) as running:
        yield running


def connection(address: str, context: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    if context is not None:
        return http.client.HTTPSConnection(address, timeout=20, context=context)
    return http.client.HTTPConnection(address, timeout=20)


def _post(address: str, path: str, body: Any, headers: dict[str, str], context: Any) -> Answer:
    asking = connection(address, context)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        asking.request("POST", path, data, {"Content-Type": "application/json", **headers})
        answer = asking.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        asking.close()


async def post(running: Running, path: str, body: Any = b"{}", context: Any = None, **headers: str) -> Answer:
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return await asyncio.to_thread(_post, running.gateway, path, body, named, context)


def bearer(role: Role) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[role]}"}


def tokens(extra: str = "") -> Security:
    return Security(tokens=parse_tokens("\n".join(f"{r.value}{extra} {t}" for r, t in TOKENS.items())))


def eventually(look: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Look until it is so, from a thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if look():
            return True
        time.sleep(0.05)
    return False
