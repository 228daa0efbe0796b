"""What a replica says of itself as it opens its session: the engine's abilities, and each worker's transports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from weightplane.controlplane.host import host_id
from weightplane.transports import registry
from weightplane.transports.base import Transport, TransportError
from weightplane.v1 import agent_pb2
from weightplane.v1.transport_pb2 import Rendezvous

from . import codec
from .engines.base import Engine, WorkerDevice

__all__ = ["enabled_transports", "hello_message", "worker_offers"]

_MAX_REASON = 900


def enabled_transports(
    wanted: Sequence[str] | Mapping[str, Transport] | None,
) -> tuple[dict[str, Transport], dict[str, str]]:
    """(transports that work here, why the others do not). A name that was asked for and is unknown is a ValueError."""
    if isinstance(wanted, Mapping):
        return dict(wanted), {}
    names = registry.names() if wanted is None else tuple(wanted)
    unknown = sorted(set(names) - set(registry.names()))
    if unknown:
        raise ValueError(f"unknown transport(s) {unknown}; registered: {list(registry.names())}")
    works: dict[str, Transport] = {}
    refused = {n: "not enabled on this agent" for n in registry.names() if n not in names}
    for name in names:
        try:
            transport = registry.get(name)
            probe = transport.probe()
        except TransportError as e:
            refused[name] = str(e)
            continue
        except Exception as e:
            refused[name] = f"its probe failed: {type(e).__name__}: {e}"
            continue
        if probe.ok:
            works[name] = transport
        else:
            refused[name] = probe.reason
    if wanted is not None and not works:
        raise ValueError(f"none of the transports asked for works here: {refused}")
    return works, refused


def hello_message(
    group: str,
    replica_id: str,
    incarnation: str,
    engine: Engine,
    labels: Mapping[str, str],
    transports: Mapping[str, Transport],
    refused: Mapping[str, str],
    serving_address: str,
) -> agent_pb2.Hello:
    """The control session's hello."""
    try:
        software = f"weightplane {version('weightplane')}"
    except PackageNotFoundError:
        software = "weightplane (not installed)"
    replica = agent_pb2.ReplicaHello(
        labels={**engine.labels, **labels},
        modes=[codec.number(m) for m in engine.modes],
        staging_refusal=engine.staging_refusal[:_MAX_REASON],
        pause_modes=[codec.number(m) for m in engine.pause_modes],
        cache_policies=[codec.number(p) for p in engine.cache_policies],
        engine=engine.name[:256],
        evidence=codec.number(engine.evidence),
        serving_address=serving_address,
        sleep_levels=engine.sleep_levels,
        sleep_refusal=engine.sleep_refusal[:_MAX_REASON],
    )
    for index, device in enumerate(engine.workers):
        member = f"{replica_id}/{index}"
        elsewhere = engine.offers(index, member, tuple(transports))
        offers, why = worker_offers(member, device, transports) if elsewhere is None else elsewhere
        info = replica.workers.add(index=index, device_uuid=device.uuid, host_id=host_id(), offers=offers)
        for name, reason in sorted({**refused, **why}.items()):
            info.refusals.add(transport=name, reason=reason[:_MAX_REASON])
    return agent_pb2.Hello(
        group=group,
        agent_id=replica_id,
        incarnation=incarnation,
        kind=agent_pb2.SESSION_KIND_CONTROL,
        replica=replica,
        software=software,
    )


def worker_offers(
    member: str, device: WorkerDevice, transports: Mapping[str, Transport]
) -> tuple[list[Rendezvous], dict[str, str]]:
    """What a worker that lives in this process offers, and why not of every transport."""
    offers: list[Rendezvous] = []
    why: dict[str, str] = {}
    with _current(device):
        for name, transport in transports.items():
            # One that moves host memory reaches a GPU through a pinned bucket (receipts.Sink).
            if not {device.kind, "cpu"} & transport.capabilities.device_kinds:
                why[name] = f"does not reach {device.kind} memory"
                continue
            try:
                offers.append(transport.offer(member))
            except Exception as e:
                why[name] = f"its offer failed: {type(e).__name__}: {e}"
    return offers, why


@contextmanager
def _current(device: WorkerDevice) -> Iterator[None]:
    """The worker's GPU is this thread's: what is offered is the calling thread's (``Transport.offer``), else GPU 0."""
    if device.kind != "cuda":
        yield
        return
    import torch  # whose weights lie on a GPU has it

    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    with torch.cuda.device(seen.index(device.uuid) if device.uuid in seen else -1):  # -1: as it is
        yield
