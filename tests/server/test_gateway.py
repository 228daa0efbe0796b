"""The contract over HTTP and JSON: the same answers, errors and identities as over gRPC."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cli.fleet import weightplane
from tests.server.by_http import FLEET, TRANSFER, bearer, eventually, gated, post, tokens
from tests.server.certificates import HAS_OPENSSL, authority, certificate
from tests.server.scripted import Trainer, dial, digest_of, fleet, offer, reason_of, server
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.handshake import NO_GRPC, trouble
from weightplane.controlplane.server import gateway_call
from weightplane.controlplane.server.app import Running, ServerConfig
from weightplane.controlplane.server.authorisation import RPC_TABLE
from weightplane.controlplane.server.security import Role, Security, Tls
from weightplane.controlplane.store.memory import MemoryStore
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt


async def test_who_dials_its_port_or_that_of_probes_by_gRPC_is_told_so() -> None:
    async with server(ServerConfig(MemoryStore(), gateway="127.0.0.1:0", probes="127.0.0.1:0")) as running:
        for address in (running.gateway, running.probes):
            for command in ("status", "doctor"):
                done = await asyncio.to_thread(weightplane, command, "-a", address, env={"COLUMNS": "900"})
                said = done.stdout + done.stderr
                assert done.returncode == 3 and NO_GRPC in said and "start one" not in said, said
        assert await asyncio.to_thread(trouble, Dial(running.address)) == ""


# --- calls ----------------------------------------------------------------------------------------------------------


class JsonTrainer(Trainer):
    """A trainer whose every call is JSON over HTTP."""

    def __init__(self, running: Running) -> None:
        super().__init__(running.address)
        self.running = running

    async def say(self, method: str, **fields: Any) -> dict[str, Any]:
        status, said = await post(self.running, TRANSFER + method, {"group": self.group, **fields})
        assert status == 200, said
        return said


async def test_a_whole_update_by_JSON_and_64_bit_numbers_are_strings() -> None:
    async with gated() as running, fleet(running.address, 2) as (other, replicas):
        t, n = JsonTrainer(running), iter(range(1000))
        ours: dict[str, Any] = {"generation": str(other.generation)}

        def named() -> dict[str, Any]:
            return {**ours, "request_id": f"q{next(n)}"}

        manifest = other.manifest
        u = await t.say("StartUpdate", **named(), manifest_id=manifest.id, trainer_step="7", update_timeout_ms=8000)
        assert u["version"] == "1" and len(u["participants"]) == 2
        ours |= {"update_id": u["update_id"], "epoch": u["epoch"]}
        await t.say("UpdateWeights", **named(), seq=1)
        for c in u["channels"]:
            regions = (await other.plan(c["plan_id"])).sent_by("rank/0")
            digests = [str(digest_of(r)) for r in regions]
            await t.say("PutDigests", **named(), plan_id=c["plan_id"], digests=digests, total=len(digests))
        done = (await t.say("FinishUpdate", **named()))["update"]
        assert [o["state"] for o in done["outcomes"]] == ["WEIGHTS_STATE_READY"] * 2
        assert (done["version"], done["trainer_step"], done["phase"]) == ("1", "7", "UPDATE_PHASE_COMMITTED")
        _, group = await post(running, FLEET + "GetGroup", {"group": "g"})
        assert group["group"]["committed"] == {"version": "1", "update_id": u["update_id"]}
        assert replicas[0].held.version == 1
        await t.channel.close()


async def test_a_trainer_may_begin_with_nothing_but_JSON() -> None:
    async with gated() as running:
        asked = {"request_id": "i", "trainer_id": "curl", "incarnation": "1", "world_size": 1, "host_id": "h"}
        given = {**asked, "offers": [{"transport": "grpc", "grpc": {}}], "group": "new"}
        status, said = await post(running, TRANSFER + "InitTransfer", given, weightplane_timeout="5")
        assert (status, said["generation"]) == (200, "1") and offer().transport
        assert running.coordinator.group("new").state.trainer is not None


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        ("GetGroup", {"group": "nobody"}, 404),
        ("GetGroup", {"group": "a b"}, 400),
        ("CreateGroup", {"group": "g", "request_id": "q", "policy": {"min_replicas": 2}}, 409),
        ("DrainReplica", {"group": "g", "request_id": "q", "replica_id": "r9"}, 404),
    ],
)
async def test_errors_are_gRPCs_own_in_full(method: str, body: dict[str, Any], status: int) -> None:
    async with gated() as running, dial(running.address) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        await stub.CreateGroup(fleet_pb2.CreateGroupRequest(group="g", request_id="first"), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(stub, method)(getattr(fleet_pb2, f"{method}Request")(**body), timeout=5)
        found, said = await post(running, FLEET + method, body)
        assert found == status
        assert (said["code"], said["reason"]) == (raised.value.code().name, reason_of(raised.value))
        assert said["message"] == raised.value.details()
        kinds = [d["@type"].rpartition(".")[2] for d in said["details"]]
        assert kinds[:2] == ["ErrorInfo", "Failure"] and said["details"][1]["reason"] == f"REASON_{said['reason']}"


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "told"),
    [
        (FLEET + "ListGroups", b"{", {}, 400, "expected the JSON of a ListGroupsRequest"),
        (FLEET + "ListGroups", b"[]", {}, 400, "expected the JSON of a ListGroupsRequest"),
        (FLEET + "GetGroup", {"grup": "g"}, {}, 400, "'group'"),
        (FLEET + "GetGroup", {"group": 7}, {}, 400, "GetGroupRequest"),
        (FLEET + "GetGroup", b'{"group": "\xff"}', {}, 400, "GetGroupRequest"),
        (FLEET + "GetGroup", b'{"group":' * 5000, {}, 400, "GetGroupRequest"),
        (TRANSFER + "GetUpdate", {"group": "g", "update_id": "u", "request_id": "q"}, {}, 400, "oneof"),
        (FLEET + "GetAll", {}, {}, 404, "no method"),
        ("/", {}, {}, 404, "expected POST /weightplane.v1.Service/Method"),
        (FLEET + "ListGroups/", {}, {}, 404, "expected POST /weightplane.v1.Service/Method"),
        ("/weightplane.v1.AgentService/Session", {}, {}, 501, "dial gRPC"),
        (FLEET + "ListGroups", {}, {"Content-Type": "text/plain"}, 415, "application/json"),
        (FLEET + "ListGroups", {}, {"Host": "evil.example"}, 403, "host"),
        (FLEET + "ListGroups", {}, {"Weightplane-Timeout": "soon"}, 400, "seconds"),
        (FLEET + "ListGroups", {}, {"Weightplane-Timeout": "nan"}, 400, "seconds"),
        (FLEET + "ListGroups", b" " * ((4 << 20) + 1), {}, 413, "4194304 bytes"),
        (FLEET + "ListGroups", b" " * (15 << 20), {}, 413, "4194304 bytes"),
    ],
)
async def test_what_is_no_call_is_refused_in_words(
    path: str, body: Any, headers: dict[str, str], status: int, told: str
) -> None:
    async with gated() as running:
        found, said = await post(running, path, body, **headers)
        assert found == status and told in said["message"], said
        assert (await post(running, FLEET + "ListGroups"))[0] == 200


# --- identities -----------------------------------------------------------------------------------------------------


async def test_every_method_asks_who_calls_as_gRPC_does() -> None:
    """The table's own walk: without identity, with every role; only the right ones get as far as their request."""
    async with gated(tokens()) as running:
        for path, row in RPC_TABLE.items():
            status, said = await post(running, path, b"no JSON at all")
            both = path.endswith("/Session")
            assert (status, said["code"]) == ((501, "UNIMPLEMENTED") if both else (401, "UNAUTHENTICATED")), path
            for role in () if both else Role:
                status, said = await post(running, path, b"no JSON at all", **bearer(role))
                assert status == (400 if role in row.roles else 403), (path, role, said)


async def test_a_scope_of_groups_holds_here_too() -> None:
    async with gated(tokens("@g")) as running:
        made = {"request_id": "q", "group": "h"}
        assert (await post(running, FLEET + "CreateGroup", made, **bearer(Role.OPERATOR)))[0] == 403
        assert (await post(running, FLEET + "CreateGroup", {**made, "group": "g"}, **bearer(Role.OPERATOR)))[0] == 200


def trusting(ca: Path, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(ca))
    if pair is not None:
        made.load_cert_chain(*pair)
    return made


@pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")
async def test_a_certificate_names_the_caller_and_renewed_ones_need_no_restart(tmp_path: Path) -> None:
    ca, own = authority(tmp_path), certificate(tmp_path, "server", "weightplane")
    operator = trusting(ca, certificate(tmp_path, "ops", "operator/ops"))
    viewer = trusting(ca, certificate(tmp_path, "see", "viewer/see"))
    async with gated(Security(tls=Tls(*own, ca))) as running:
        made = {"request_id": "q", "group": "g"}
        assert (await post(running, FLEET + "CreateGroup", made, trusting(ca)))[0] in (401, 403)
        assert (await post(running, FLEET + "CreateGroup", made, viewer))[0] == 403
        assert (await post(running, FLEET + "CreateGroup", made, operator))[0] == 200

        def shown() -> str:
            with socket.create_connection(("127.0.0.1", int(running.gateway.rpartition(":")[2])), 5) as plain:
                with operator.wrap_socket(plain, server_hostname="localhost") as wrapped:
                    return ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(True) or b"")

        before = await asyncio.to_thread(shown)
        certificate(tmp_path, "server", "weightplane")
        assert await asyncio.to_thread(eventually, lambda: shown() != before), "the new certificate is not shown"
        assert (await post(running, FLEET + "ListGroups", {}, operator))[0] == 200


def test_an_answer_that_JSON_cannot_say_is_an_error_of_its_own() -> None:
    """A third party's rendezvous is an Any, of a type that this process does not know."""
    answer = wt.InitTransferResponse()
    offer_ = answer.channels.add(transport="theirs").offers["rank/0"]
    offer_.any.type_url, offer_.any.value = "type.example/theirs.Rendezvous", b"x"
    with pytest.raises(gateway_call.Ended) as ended:
        gateway_call.body_of(answer)
    assert "cannot be said in JSON" in ended.value.status.message and "gRPC" in ended.value.status.message
