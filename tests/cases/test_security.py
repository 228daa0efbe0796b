"""Cases of kind security that no other folder shows, by id. The others: ``tests/security``, ``tests/server``."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from typing import Any

import grpc
import pytest

from tests.cases.base import QUIET, Small
from tests.inference_agent.server import eventually, server
from tests.trainer_agent.fleet import hook
from weightplane.controlplane import failpoints
from weightplane.controlplane.dial import Dial
from weightplane.controlplane.server.security import Security, parse_tokens
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.generate import GenerateServer
from weightplane.trainer_agent.errors import UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc
from weightplane.v1 import weight_transfer_pb2 as wt
from weightplane.v1 import weight_transfer_pb2_grpc as wt_grpc

ROLES = ("trainer", "inference", "operator", "viewer")


def test_S07_what_is_told_and_logged_names_no_token_key_or_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every RPC that informs, asked after an update that went well and one that failed; the replica's HTTP endpoint;
    every log at its finest; and what stands in errors and in reprs."""
    tokens = {role: f"{role}-{'s3cr3t' * 4}" for role in ROLES}
    secret = "environment-s3cr3t-7c1f"
    for name in ("WEIGHTPLANE_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, secret)
    said: list[str] = []
    text = "\n".join(f"{role} {token}" for role, token in tokens.items())

    def fails(n: int) -> None:
        raise failpoints.FailpointError("the receiver broke")

    with caplog.at_level(logging.DEBUG), server(QUIET, security=Security(tokens=parse_tokens(text))) as plane:
        dials = {role: Dial(plane.address, token=token) for role, token in tokens.items()}
        engine = TorchModuleEngine(Small())
        agent = InferenceAgent(dials["inference"], "g", "r0", engine, heartbeat=False)
        agent.start()
        http = GenerateServer(engine, lambda *a, **k: []).start()
        publisher = Publisher(dials["trainer"], "g", ModuleSource(Small(1)), transport="shm", bucket_bytes=4096)
        try:
            eventually(lambda: "r0" in plane.state().replicas and plane.state().replicas["r0"].reported)
            update_id = publisher.publish(1).update_id
            with hook("replica.receive.inside", fails), pytest.raises(UpdateFailed) as failed:
                publisher.publish(2)
            keys = [c.spec.key for c in publisher._hold.pool._open.values()]
            publisher.publish(3)
            keys += [c.spec.key for c in publisher._hold.pool._open.values()]
            said += [
                str(failed.value),
                repr(failed.value),
                repr(publisher),
                repr(agent.status()),
                *map(repr, dials.values()),
            ]
            viewer: Any = [("authorization", f"Bearer {tokens['viewer']}")]
            with dials["viewer"].channel() as channel:
                fleet, transfer = fleet_pb2_grpc.FleetServiceStub(channel), wt_grpc.WeightTransferServiceStub(channel)
                calls: tuple[tuple[Any, Any], ...] = (
                    (fleet.ListGroups, fleet_pb2.ListGroupsRequest()),
                    (fleet.GetGroup, fleet_pb2.GetGroupRequest(group="g")),
                    (fleet.ListReplicas, fleet_pb2.ListReplicasRequest(group="g", transports=True)),
                    (fleet.ListUpdates, fleet_pb2.ListUpdatesRequest(group="g")),
                    (fleet.CheckReplica, fleet_pb2.CheckReplicaRequest(group="g", replica_id="r0")),
                    (transfer.GetUpdate, wt.GetUpdateRequest(group="g", update_id=update_id)),
                )
                for call, request in calls:
                    said.append(call(request, timeout=10, metadata=viewer).SerializeToString().decode("latin-1"))
                watch = fleet.WatchGroup(fleet_pb2.WatchGroupRequest(group="g"), metadata=viewer)
                said.append(next(iter(watch)).SerializeToString().decode("latin-1"))
                watch.cancel()
                with pytest.raises(grpc.RpcError) as denied:
                    fleet.ListGroups(fleet_pb2.ListGroupsRequest(), timeout=10)
                said.append(str(denied.value))
            for path in ("/version", "/routable", "/livez", "/readyz", "/digests"):
                try:
                    with urllib.request.urlopen(f"http://{http.address}{path}", timeout=10) as answer:
                        said += [answer.read().decode("latin-1"), str(answer.headers)]
                except urllib.error.HTTPError as e:
                    said += [e.read().decode("latin-1"), str(e.headers)]
        finally:
            publisher.close()
            agent.stop()
            http.stop()
    everything = "\n".join([*said, caplog.text])
    assert "r0" in everything and len(caplog.text) > 1000 and keys
    for kind, value in {**tokens, "environment": secret}.items():
        assert value not in everything, f"the {kind}'s secret is told"
    for key in keys:
        assert key.decode("latin-1") not in everything and key.hex() not in everything, "a channel's key is told"
