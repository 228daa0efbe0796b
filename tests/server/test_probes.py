"""What load balancers and orchestrators ask: over HTTP, and gRPC's own health service."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.server.certificates import HAS_OPENSSL, authority, certificate
from tests.server.scripted import FAST, dial, fleet, server
from weightplane.controlplane.server import probes
from weightplane.controlplane.server.app import Running, ServerConfig, serve
from weightplane.controlplane.server.probes import answer
from weightplane.controlplane.server.security import Security, Tls, parse_tokens
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import fleet_pb2 as fl
from weightplane.v1 import update_pb2 as up
from weightplane.v1 import weight_transfer_pb2 as wt

TOKEN = "viewer-s3cret-s3cret"


@contextlib.asynccontextmanager
async def probed(security: Security | None = None) -> AsyncIterator[Running]:
    config = ServerConfig(MemoryStore(), core=FAST, security=security or Security(), probes="127.0.0.1:0")
    async with server(config) as running:
        yield running


def _get(address: str, path: str, headers: dict[str, str], context: Any) -> tuple[int, dict[str, Any]]:
    host, _, port = address.rpartition(":")
    made = (
        http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
        if context is not None
        else http.client.HTTPConnection(host, int(port), timeout=10)
    )
    with contextlib.closing(made) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        said = answer.read()
        return answer.status, json.loads(said) if "json" in answer.headers["Content-Type"] else {"": said.decode()}


async def get(running: Running, path: str, context: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    return await asyncio.to_thread(_get, running.probes, path, headers, context)


async def test_alive_ready_and_routable_are_three_answers() -> None:
    async with probed() as running, fleet(running.address, 2) as (trainer, replicas):
        assert await get(running, "/livez") == (200, {"ok": True})
        assert (await get(running, "/readyz"))[0] == 200
        r0 = "/groups/g/replicas/r0"
        assert (await get(running, f"{r0}/livez"))[0] == 200
        status, said = await get(running, f"{r0}/readyz")
        assert status == 503 and "JOINING" in said["reason"]
        await trainer.publish()
        assert await get(running, f"{r0}/routable?min_version=1") == (200, {"ok": True, "reason": "", "version": 1})
        status, said = await get(running, f"{r0}/routable?min_version=2")
        assert status == 503 and said["reason"] == "it holds version 1, below 2" and said["version"] == 1
        status, said = await get(running, "/groups/g/routable")
        assert status == 200 and sorted(said["replicas"]) == ["r0", "r1"] and not said["others"]
        drain = fl.DrainReplicaRequest(request_id="d", group="g", replica_id="r0")
        await trainer.fleet.DrainReplica(drain, timeout=5)
        status, said = await get(running, "/groups/g/routable")
        assert status == 200 and list(said["replicas"]) == ["r1"] and said["others"] == {"r0": "it is DRAINING"}
        assert (await get(running, f"{r0}/readyz"))[0] == 200, "a replica that drains is ready, and not to be sent more"
        await replicas[1].kill()
        end = time.monotonic() + 10
        while (await get(running, "/groups/g/routable"))[0] == 200:
            assert time.monotonic() < end
        assert (await get(running, "/groups/g/replicas/r1/livez"))[0] == 503


async def test_an_update_changes_none_of_them() -> None:
    async with probed() as running, fleet(running.address, 1) as (trainer, replicas):
        await trainer.publish()
        paths = [f"/groups/g/replicas/r0/{what}" for what in ("livez", "readyz", "routable?min_version=1")]  # held
        seen: list[int] = []

        async def look(_: Any) -> None:
            seen.extend([(await get(running, p))[0] for p in paths])

        replicas[0].hooks = dict.fromkeys(("join", "arm", "prepare", "apply"), look)
        await trainer.publish()
        assert seen == [200] * 12


async def test_what_is_not_there_is_said() -> None:
    async with probed() as running, fleet(running.address, 1) as (trainer, _):
        del trainer
        for path, status, word in (
            ("/", 404, "/livez"),
            ("/groups/g", 404, "expected"),
            ("/groups/h/readyz", 404, "no group 'h'"),
            ("/groups/g/replicas/r9/readyz", 404, "no replica 'r9'"),
            ("/groups/g/workers/r0/readyz", 404, "no replica"),
            ("/groups/g/routable?min_version=x", 400, "min_version"),
            ("/groups/g/routable?min_version=-1", 400, "min_version"),
            ("/groups/g/routable?minimum=1", 400, "min_version"),
            ("/groups/g/readyz?min_version=1", 400, "routable alone"),
        ):
            found, said = await get(running, path)
            assert found == status and word in said["reason"] and said["ok"] is False, path
        assert answer(running.coordinator, "http://[/livez")[0] == 400


async def test_gauges_tell_of_each_replica_what_its_newest_parity_check_found() -> None:
    async with probed() as running, fleet(running.address, 2) as (trainer, _):
        u = await trainer.publish()
        bad = up.ParityResult(replica_id="r0", version=u.version, verdict=up.PARITY_VERDICT_NOT_AT_PARITY, mean_abs=0.5)
        nothing = up.ParityResult(replica_id="r1", version=u.version, verdict=up.PARITY_VERDICT_NOT_MEASURED)
        nothing.mean_abs = float("nan")
        again = wt.StartUpdateResponse(update_id=u.update_id, epoch=u.epoch)
        await trainer.finish(again, request_id="checked", parity=[bad, nothing])
        status, said = await get(running, "/metrics")
        lines = said[""].splitlines()
        assert status == 200
        assert 'weightplane_committed_version{group="g"} 1.0' in lines
        assert 'weightplane_parity_ok{group="g",replica="r0"} 0.0' in lines
        assert 'weightplane_parity_mean_abs{group="g",replica="r0"} 0.5' in lines
        assert 'weightplane_parity_mean_abs{group="g",replica="r1"} NaN' in lines
        assert 'weightplane_parity_ok{group="g",replica="r1"} NaN' in lines
        kept = (await trainer.get(u.update_id)).parity
        assert [(p.replica_id, p.verdict) for p in kept] == [("r0", bad.verdict), ("r1", nothing.verdict)]


async def test_gauges_are_told_of_the_callers_own_groups() -> None:
    async with probed(Security(tokens=parse_tokens(f"viewer@other {TOKEN}"))) as running:
        for name in ("g", "other"):
            running.coordinator.ensure(name)
        assert (await get(running, "/metrics"))[0] == 401
        status, said = await get(running, "/metrics", authorization=f"Bearer {TOKEN}")
        assert status == 200 and 'group="other"' in said[""] and 'group="g"' not in said[""]


async def test_groups_are_told_to_those_who_may_know_and_life_to_everybody() -> None:
    tokens = parse_tokens(f"viewer {TOKEN}\nviewer@other {TOKEN}-2")
    async with probed(Security(tokens=tokens)) as running:
        running.coordinator.ensure("g")
        for path in ("/livez", "/readyz"):
            assert (await get(running, path))[0] == 200
        assert (await get(running, "/groups/g/livez"))[0] == 401
        assert (await get(running, "/groups/g/livez", authorization="Bearer wrong-wrong-wrong-wrong"))[0] == 401
        status, said = await get(running, "/groups/g/livez", authorization=f"Bearer {TOKEN}")
        assert status == 503 and said["replicas"] == {}
        status, said = await get(running, "/groups/g/livez", authorization=f"Bearer {TOKEN}-2")
        assert status == 403 and "other" in said["reason"]
        # what one reading takes for the group, and another for a host
        for target in (
            "http://other/groups/g/livez",
            "//other/groups/g/livez",
            "https://other/groups/nothing/routable",
        ):
            status, said = await get(running, target, authorization=f"Bearer {TOKEN}-2")
            assert (status, "confined to group other" in said["reason"]) == (403, True), (target, said)
        assert (await get(running, "http://any/livez"))[0] == 200


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_tls_serves_probes_too_and_a_certificate_names_the_caller(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    tls = Tls(*certificate(tmp_path, "server", "server"), client_ca=ca)
    async with probed(Security(tls=tls)) as running:
        running.coordinator.ensure("g")
        nobody, viewer = ssl.create_default_context(cafile=str(ca)), ssl.create_default_context(cafile=str(ca))
        viewer.load_cert_chain(*certificate(tmp_path, "viewer", "viewer/v"))
        assert (await get(running, "/livez", nobody))[0] == 200
        status, said = await get(running, "/groups/g/readyz", nobody)
        assert status == 401 and "expected a client certificate" in said["reason"]
        assert (await get(running, "/groups/g/readyz", viewer))[0] == 503
        with pytest.raises((OSError, http.client.HTTPException)):
            await get(running, "/livez")


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_half_a_rotation_makes_no_probe_fail_and_a_whole_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = authority(tmp_path)
    files = certificate(tmp_path, "server", "server")
    trusting = ssl.create_default_context(cafile=str(ca))

    async with probed(Security(tls=Tls(*files, client_ca=ca))) as running:

        def shown() -> bytes | None:
            with socket.create_connection(("127.0.0.1", int(running.probes.rpartition(":")[2])), 5) as plain:
                with trusting.wrap_socket(plain, server_hostname="localhost") as wrapped:
                    return wrapped.getpeercert(True)

        before = await asyncio.to_thread(shown)
        for file in (*files, ca):
            whole = file.read_bytes()
            for half in (whole[: len(whole) // 2], b""):
                file.write_bytes(half)
                for _ in range(2):
                    assert await get(running, "/livez", trusting) == (200, {"ok": True}), (file.name, half)
            file.unlink()
            assert (await get(running, "/readyz", trusting))[0] == 200, file.name
            file.write_bytes(whole)
            assert (await get(running, "/readyz", trusting))[0] == 200
        assert caplog.text.count("the certificates read before stay in use") == 9, "each is told of once"
        assert await asyncio.to_thread(shown) == before
        certificate(tmp_path, "server", "server")
        assert await asyncio.to_thread(shown) != before


async def test_silent_clients_hold_up_nobody_and_who_asks_for_longest_makes_room() -> None:
    async with probed() as running:
        host, _, port = running.probes.rpartition(":")
        with contextlib.ExitStack() as stack:
            silent = []
            for _ in range(3 * 64):
                made = stack.enter_context(contextlib.closing(socket.create_connection((host, int(port)))))
                made.sendall(b"GET /livez HTTP/1.1\r\n")  # and no more
                silent.append(made)
            for _ in range(10):
                assert (await get(running, "/livez"))[0] == 200
            silent[0].settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(silent[0].recv, 1) == b"", "closed, for those who came later"


@pytest.mark.parametrize(
    "tls",
    [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command"))],
    ids=["plain", "tls"],
)
async def test_a_client_that_drips_is_closed_all_the_same(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_IDLE_S", 1.0)
    context, security = None, Security()
    if tls:
        ca = authority(tmp_path)
        security = Security(tls=Tls(*certificate(tmp_path, "server", "server"), client_ca=ca))
        context = ssl.create_default_context(cafile=str(ca))
    async with probed(security) as running:
        host, _, port = running.probes.rpartition(":")

        def drip() -> bytes:
            with contextlib.closing(socket.create_connection((host, int(port)), timeout=10)) as made:
                made.settimeout(0.1)
                with context.wrap_socket(made, server_hostname="localhost") if context else made as wrapped:
                    wrapped.sendall(b"GET /livez HTTP/1.1\r\n")
                    while True:
                        try:
                            wrapped.sendall(b"x")
                            return wrapped.recv(1)
                        except TimeoutError:
                            continue
                        except OSError:
                            return b""

        began = time.monotonic()
        assert await asyncio.wait_for(asyncio.to_thread(drip), 20) == b""
        assert time.monotonic() - began < 10
        assert (await get(running, "/livez", context=context))[0] == 200


async def test_a_blocked_event_loop_is_not_alive() -> None:
    async with probed() as running:
        asked = asyncio.create_task(get(running, "/livez"))
        await asyncio.sleep(0)  # the thread is on its way
        time.sleep(3.5)  # noqa: ASYNC251 - what is tested
        status, said = await asked
        assert status == 503 and "event loop" in said["reason"]
        assert (await get(running, "/livez"))[0] == 200


async def test_a_taken_port_is_an_error_and_a_stopped_server_lets_go_of_its_own() -> None:
    async with probed() as running:
        config = ServerConfig(MemoryStore(), core=FAST, probes=running.probes)
        with pytest.raises(OSError):
            await serve(config)
        address = running.probes
    host, _, port = address.rpartition(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 2)


def test_probes_in_the_open_need_protection_as_the_rest_does() -> None:
    with pytest.raises(ValueError, match="not loopback"):
        asyncio.run(serve(ServerConfig(MemoryStore(), probes="0.0.0.0:0")))


async def test_grpc_health_says_of_each_service_whether_this_coordinator_leads() -> None:
    async with server(
        ServerConfig(MemoryStore(), core=FAST, security=Security(tokens=parse_tokens(f"viewer {TOKEN}")))
    ) as r:
        async with dial(r.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            for service in ("", *(f"weightplane.v1.{n}Service" for n in ("WeightTransfer", "Fleet", "Agent"))):
                asked = health_pb2.HealthCheckRequest(service=service)
                assert (await health.Check(asked)).status == serving  # no token, no deadline
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health.Check(health_pb2.HealthCheckRequest(service="weightplane.v1.Other"), timeout=5)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watched = health.Watch(health_pb2.HealthCheckRequest(service="weightplane.v1.FleetService"), timeout=20)
            assert (await watched.read()).status == serving
            r.coordinator.step_down("a test")
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (await watched.read()).status == serving, "it took over again"
            watched.cancel()
