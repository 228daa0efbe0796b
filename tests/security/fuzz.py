"""Mutated messages for every service and raw bytes for every port of a real process, while a fleet publishes in it.

``python -m tests.security.fuzz --messages 200000`` (of each service), or ``--seconds 20``; ``--seed``. It prints one
summary line, and fails if the process died, hung, grew or answered INTERNAL, or if a port served nobody afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from tests import warm
from tests.security import after
from tests.security.mutation import Maker, mutated
from tests.security.target import KEY
from tests.server.scripted import fleet
from weightplane.transports.pull_wire import PROTOCOL, proof
from weightplane.v1 import agent_pb2, fleet_pb2, transport_pb2, weight_transfer_pb2

ROOT = Path(__file__).resolve().parents[2]
_GROWTH_MIB = 400
_CALL_S = 0.25
_HANG_S = 10.0
_LATE_S = 30.0  # for all to end in, after the end
_TASKS = 12  # a service
#: What fields may well hold, so that a message gets past the first check of them.
_STEADY: dict[str, list[Any]] = {
    **{"replica_id": ["r0", "r1"], "agent_id": ["r0", "r1", "rank/0"], "member": ["r0/0", "r1/0", "rank/0"]},
    **{"rank": [0], "world_size": [1], "trainer_id": ["job"], "host_id": ["h"], "transport": ["grpc", "shm", ""]},
    **{
        "seq": [1, 2],
        "first": [0, 1],
        "total": [1, 3],
        "page": [0],
        "update_timeout_ms": [500, 8000],
        "min_replicas": [1],
    },
    **{"holder": ["operator", "trainer"], "reason": ["fuzz"], "coverage": [0], "encoding": [0], "mode": [0, 1, 2]},
}
_RAW = (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: ")
_OWN_SIDE = "Internal error from Core"  # what the client's library says when its write meets the end of a stream
_NOISE = ("control connection of", "was not let in")
_SERVICES = {
    "WeightTransferService": weight_transfer_pb2,
    "FleetService": fleet_pb2,
    "AgentService": agent_pb2,
}


class Fuzz:
    """One run."""

    def __init__(self, where: dict[str, str], seed: int, messages: int, seconds: float) -> None:
        self.where, self.rng = where, random.Random(seed)
        self.messages, self.seconds, self.end = messages, seconds, 0.0
        self.sent: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.hangs: list[str] = []
        self.internal: list[str] = []
        self.raw_bytes = 0
        self.published, self.begun = 0, asyncio.Event()
        self.live: dict[str, list[Any]] = {"group": ["g0"], **_STEADY}
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channels = [grpc.aio.insecure_channel(where["plane"], options) for _ in range(16)]
        self.data = [grpc.aio.insecure_channel(where["data"], options) for _ in range(2)]

    def more(self, what: str) -> bool:
        return self.sent[what] < self.messages and time.monotonic() < self.end

    async def run(self) -> None:
        background = asyncio.create_task(self._publish())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.begun.wait(), 15)
        self.end = time.monotonic() + self.seconds
        work: list[Any] = []
        for name, file in _SERVICES.items():
            methods = file.DESCRIPTOR.services_by_name[name].methods
            work += [self._calls(name, methods) for _ in range(_TASKS)]
        work += [self._tensors() for _ in range(_TASKS)]
        work += [self._json() for _ in range(4)]
        work += [self._pulls(port) for port in ("pull", "pull_tcp") for _ in range(3)]
        work += [self._raw(port) for port in self.where]
        tasks = [asyncio.create_task(w) for w in work]
        await asyncio.wait(tasks, timeout=max(0.0, self.end - time.monotonic()) + _LATE_S)
        for task in tasks:
            if task.done():
                task.result()
            else:
                self.hangs.append(standing(task))
                task.cancel()
        await self._stop(background)
        for channel in (*self.channels, *self.data):
            await self._stop(asyncio.create_task(channel.close()), ask=False)

    async def _stop(self, task: asyncio.Task[None], ask: bool = True) -> None:
        """Wait until it has ended, which is asked again each second: ``wait_for`` may lose a cancellation."""
        for _ in range(int(_LATE_S)):
            if ask:
                task.cancel()
            if (await asyncio.wait([task], timeout=1))[0]:
                return
        self.hangs.append(standing(task))

    # --- a fleet that goes on, so that messages meet live state

    async def _publish(self) -> None:
        for n in range(1 << 30):
            with contextlib.suppress(grpc.aio.AioRpcError, AssertionError, TimeoutError):
                async with fleet(self.where["plane"], 2) as (trainer, agents):
                    self.live["manifest_id"] = [trainer.manifest.id]
                    self.live["incarnation"] = [trainer.incarnation, *(a.incarnation for a in agents)]
                    self.live["generation"] = [trainer.generation]
                    self.live["group"] = ["g", f"g{n % 20}"]
                    while True:
                        u = await trainer.start()
                        self.live["update_id"] = [u.update_id, *self.live.get("update_id", [])[:4]]
                        self.live["epoch"] = [u.epoch]
                        self.live["plan_id"] = [c.plan_id for c in u.channels]
                        self.live["channel_id"] = [c.channel_id for c in u.channels]
                        await asyncio.sleep(0.3)
                        await trainer.weights(u)
                        await trainer.rest(u)
                        self.published += 1
                        self.begun.set()
            await asyncio.sleep(0.2)

    # --- calls

    async def _calls(self, service: str, methods: Any) -> None:
        maker = Maker(self.rng, self.live)
        while self.more(service):
            method: MethodDescriptor = self.rng.choice(methods)
            channel = self.rng.choice(self.channels)
            path = f"/weightplane.v1.{service}/{method.name}"
            assert method.input_type is not None
            raw: Any = maker.make(method.input_type)
            if method.client_streaming:
                work = self._stream(service, channel, path, [raw, *(maker.make(method.input_type) for _ in range(7))])
            elif method.server_streaming:
                work = self._first(service, channel.unary_stream(path)(raw, timeout=_CALL_S))
            else:
                work = self._one(service, channel.unary_unary(path)(raw, timeout=_CALL_S))
            await self._bounded(path, work)

    async def _bounded(self, what: str, work: Any) -> None:
        """It ends in time, whatever it is told."""
        try:
            await asyncio.wait_for(work, _HANG_S)
            self.codes["OK"] += 1
        except grpc.aio.AioRpcError as e:
            own = e.code() is grpc.StatusCode.INTERNAL and e.details() == _OWN_SIDE
            self.codes["ended before all was sent" if own else e.code().name] += 1
            if e.code() is grpc.StatusCode.INTERNAL and not own:
                self.internal.append(f"{what}: {e.details()}")
        except TimeoutError:
            self.hangs.append(what)

    async def _one(self, service: str, call: Any) -> None:
        self.sent[service] += 1
        await call

    async def _first(self, service: str, call: Any) -> None:
        self.sent[service] += 1
        async for _ in call:
            call.cancel()
            return

    async def _stream(self, service: str, channel: Any, path: str, messages: list[bytes], metadata: Any = ()) -> None:
        call = channel.stream_stream(path)(timeout=2 * _CALL_S, metadata=metadata)
        try:
            for message in messages:
                await call.write(message)
                self.sent[service] += 1
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.InternalError):
            self.sent[service] += 1  # it had ended
        async for _ in call:
            pass

    async def _tensors(self) -> None:
        """The data port: mostly with the key, and with openings that fit."""
        live: dict[str, list[Any]] = {
            **{"channel_id": ["c"], "update_id": ["u"], "epoch": [1], "generation": [1]},
            **{"sender": ["rank/0"], "receiver": ["r0/0"], "bucket": [*range(8)], "offset": [0, 1024, 4095, 4096]},
        }
        maker, name = Maker(self.rng, live), "TensorService"
        opening = transport_pb2.TransferOpen(
            channel_id="c", update_id="u", epoch=1, generation=1, sender="rank/0", receiver="r0/0"
        )
        valid = transport_pb2.TransferRequest(open=opening).SerializeToString()
        while self.more(name):
            key = KEY if self.rng.random() < 0.8 else self.rng.randbytes(self.rng.choice((0, 31, 32)))
            first = valid if self.rng.random() < 0.7 else mutated(self.rng, valid)
            rest = [maker.make(transport_pb2.TransferRequest.DESCRIPTOR) for _ in range(self.rng.randrange(12))]
            metadata = (("weightplane-channel-key-bin", key),)
            path = "/weightplane.v1.TensorService/Transfer"
            work = self._stream(name, self.rng.choice(self.data), path, [first, *rest], metadata)
            await self._bounded(path, work)

    # --- bytes

    async def _open(self, port: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(_HANG_S):
                return await opened(self.where[port])
        except TimeoutError:
            self.hangs.append(f"connecting to {port}")
            raise

    async def _pulls(self, port: str) -> None:
        """Control connections of transports that pull: some prove themselves first."""
        maker, name = Maker(self.rng, {"bucket": [0, 1], "number": [1], "region": [1]}), "PullMessage"
        while self.more(name):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await self._open(port)
                try:
                    if self.rng.random() < 0.7:
                        await asyncio.wait_for(prove(reader, writer), 5)
                    for _ in range(self.rng.randrange(1, 12)):
                        data = maker.make(transport_pb2.PullMessage.DESCRIPTOR)
                        size = len(data) if self.rng.random() < 0.95 else self.rng.getrandbits(32)
                        writer.write(struct.pack("<I", size) + data)
                        self.sent[name] += 1
                        await asyncio.wait_for(writer.drain(), 5)
                finally:
                    writer.close()

    async def _json(self) -> None:
        """Calls by the gateway: of every method, with bodies that are nearly right."""
        maker, name = Maker(self.rng, self.live), "gateway"
        methods = [m for n, file in _SERVICES.items() for m in file.DESCRIPTOR.services_by_name[n].methods]
        while any(self.more(s) for s in _SERVICES) and self.more(name):
            method = self.rng.choice(methods)
            body = maker.make_json(method.input_type)
            head = f"POST /{method.full_name.rpartition('.')[0]}/{method.name} HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nWeightplane-Timeout: {_CALL_S}\r\nConnection: close\r\n"
            with contextlib.suppress(OSError):
                reader, writer = await self._open("gateway")
                try:
                    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                    said = await asyncio.wait_for(reader.read(), _HANG_S)
                    self.sent[name] += 1
                    self.codes[said[:12].decode()] += 1
                    if said.startswith(b"HTTP/1.1 500") or b'"code": "INTERNAL"' in said:
                        self.internal.append(f"{method.full_name} by JSON: {said[:500]!r} to {body[:300]!r}")
                except TimeoutError:
                    self.hangs.append(f"{method.full_name} by JSON")
                finally:
                    writer.close()

    async def _raw(self, port: str) -> None:
        while any(self.more(s) for s in (*_SERVICES, "TensorService")):
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await self._open(port)
                junk = self.rng.choice(_RAW) + self.rng.randbytes(self.rng.choice((1, 4, 9, 100, 3000, 70_000)))
                writer.write(junk)
                await asyncio.wait_for(writer.drain(), 5)
                self.sent[f"raw {port}"] += 1
                self.raw_bytes += len(junk)
                writer.close()
            await asyncio.sleep(0.02)


async def opened(at: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a socket's path or to ``host:port``."""
    if at.startswith("/"):
        return await asyncio.open_unix_connection(at)
    host, _, number = at.rpartition(":")
    return await asyncio.open_connection(host, int(number))


def standing(task: asyncio.Task[None]) -> str:
    """Where a task that does not end stands."""
    text = io.StringIO()
    task.print_stack(file=text)
    return text.getvalue()


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Show the key, as a receiver does; returns once welcome."""
    hello = transport_pb2.PullHello(
        protocol=PROTOCOL, channel_id="c", sender="rank/0", receiver="r0/0", nonce=bytes(32)
    )

    async def ask(message: transport_pb2.PullMessage) -> transport_pb2.PullMessage:
        data = message.SerializeToString()
        writer.write(struct.pack("<I", len(data)) + data)
        (size,) = struct.unpack("<I", await reader.readexactly(4))
        return transport_pb2.PullMessage.FromString(await reader.readexactly(size))

    challenge = await ask(transport_pb2.PullMessage(hello=hello))
    shown = proof(KEY, "receiver", hello, challenge.challenge.nonce)
    welcome = await ask(transport_pb2.PullMessage(proof=transport_pb2.PullProof(proof=shown)))
    assert welcome.WhichOneof("message") == "welcome", welcome


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


def fuzz(messages: int = 1 << 40, seconds: float = 7200.0, seed: int = 0) -> tuple[str, list[str]]:
    """(the summary line, what went wrong)."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # which says so whenever a port has closed on us
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="wp-fuzz-") as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "tests.security.target", folder]
        with log.open("wb") as out:
            process = warm.Popen(command, stdout=subprocess.PIPE, stderr=out, cwd=ROOT)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            where = json.loads(line)
            before = rss_mib(process.pid)

            async def run() -> tuple[Fuzz, list[str]]:
                await after.prepare(where["plane"])
                made = Fuzz(where, seed, messages, seconds)
                await made.run()
                return made, await after.check(where)

            made, wrong = asyncio.run(run())
            if process.poll() is not None:
                wrong.append(f"the process died: {process.returncode}: {log.read_text()[-3000:]}")
                grown = 0.0
            else:
                grown = rss_mib(process.pid) - before
            if grown > _GROWTH_MIB:
                wrong.append(f"memory grew by {grown:.0f} MiB")
            wrong += [f"no end within {_HANG_S} s: {h}" for h in made.hangs[:5]]
            wrong += [f"INTERNAL: {i}" for i in made.internal[:5]]
            if wrong:
                kept = [x for x in log.read_text().splitlines() if not any(noise in x for noise in _NOISE)]
                wrong.append("the target's log ends so:\n" + "\n".join(kept)[-8000:])
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    services = ", ".join(f"{made.sent[s]} {s}" for s in (*_SERVICES, "TensorService", "PullMessage", "gateway"))
    raw = sum(n for s, n in made.sent.items() if s.startswith("raw"))
    codes = ", ".join(f"{n} {code}" for code, n in made.codes.most_common())
    text = (
        f"fuzz: seed {seed}, {time.monotonic() - began:.0f} s: {services} messages; {raw} raw connections with "
        f"{made.raw_bytes >> 10} KiB on {len(where)} ports; {made.published} updates committed meanwhile; "
        f"{len(made.internal)} INTERNAL, {len(made.hangs)} hangs, memory {before:.0f} -> {before + grown:.0f} MiB; "
        f"afterwards every port serves: {'no' if wrong else 'yes'} ({codes})"
    )
    return text, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    summary, trouble = fuzz(given.messages, given.seconds, given.seed)
    print(summary)
    print("\n".join(trouble))
    sys.exit(bool(trouble))
