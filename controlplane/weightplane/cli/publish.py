"""``weightplane publish``: put a checkpoint on a fleet, from the command line."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .client import DEFAULT_ADDRESS, AddressOption, GroupOption, JsonOption, dial, open_channel
from .exits import Exit
from .output import console, emit_json, err, human_bytes, seconds, table

__all__ = ["register"]


def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.", exists=True)],
    group: GroupOption,
    step: Annotated[int, typer.Option("--step", min=0, help="The trainer's number of this checkpoint.")] = 0,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Wait for at least this many.")] = 1,
    transport: Annotated[str, typer.Option("--transport", help="Use this one or fail; none = the best for each.")] = "",
    mode: Annotated[str, typer.Option("--mode", help="staged | in_place; none = each replica's choice.")] = "",
    verify: Annotated[str, typer.Option("--verify", help="off | sampled | full; none = the group's.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for the update.")] = 120.0,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the replicas.")] = 30.0,
    takeover: Annotated[bool, typer.Option("--takeover", help="Fence a trainer that still holds the group.")] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint: on every replica of the group, or on none. Ctrl-C aborts cleanly."""
    from weightplane.controlplane.core.reasons import Reason
    from weightplane.trainer_agent.errors import CoordinatorUnreachable, OutcomeUnknown, PublishError
    from weightplane.trainer_agent.publisher import Publisher
    from weightplane.trainer_agent.sources_safetensors import SafetensorsSource

    how = dial(address)
    try:
        source = SafetensorsSource(checkpoint)
        options: dict[str, Any] = {"mode": mode, "verify": verify, "update_timeout": timeout}
        with Publisher(
            how, group, source, trainer_id="weightplane publish", transport=transport, takeover=takeover, **options
        ) as publisher:
            if not as_json:
                err.print(f"waiting up to {wait:g} s for {replicas} replica(s) of group {group}", markup=False)
            publisher.wait_for_replicas(replicas, timeout=wait)
            receipt = _watched(publisher, step, address, group, as_json)
    except KeyboardInterrupt:
        err.print("interrupted: the update was aborted, replicas keep what they serve")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except PublishError as error:
        code = Exit.FAILED
        if isinstance(error, CoordinatorUnreachable):
            code = Exit.UNREACHABLE
        elif isinstance(error, OutcomeUnknown):
            code = Exit.UNKNOWN_OUTCOME
        elif error.reason in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED):
            code = Exit.DENIED
        _complain(str(error), error.reason.value, code, as_json)
    except TimeoutError as error:
        todo = "start replicas of that group (weightplane status lists the groups), or give them more time with --wait"
        _complain(str(error), "NOT_ENOUGH_REPLICAS", Exit.REFUSED, as_json, todo)
    except (ValueError, OSError) as error:
        _complain(str(error), "INVALID_ARGUMENT", Exit.REFUSED, as_json, "mend the argument named above")
    else:
        _show(receipt, as_json)


_LOOK = "weightplane status and weightplane updates show the fleet as it is"


def _complain(text: str, reason: str, code: Exit, as_json: bool, todo: str = _LOOK) -> None:
    if as_json:
        emit_json({"error": {"reason": reason, "message": text, "next": todo, "exit": int(code)}})
    else:
        err.print(f"[bold red]error[/] {reason}: ", end="")
        err.print(text, markup=False)
        err.print(f"  next: {todo}", markup=False)
    raise typer.Exit(code)


def _watched(publisher: Any, step: int, address: str, group: str, as_json: bool) -> Any:
    """Publish in a thread of its own while this one draws progress, so that Ctrl-C is noticed at once."""
    handle = publisher.publish_async(step)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    over = threading.Event()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=as_json, transient=True) as bars:
        watcher = threading.Thread(target=_follow, args=(bars, address, group, over), daemon=True)
        watcher.start()
        try:
            while not handle.done():
                time.sleep(0.05)
        except KeyboardInterrupt:
            handle.cancel("interrupted at the command line")
            _ended(handle)
        finally:
            over.set()
    return handle.result()


def _ended(handle: Any) -> None:
    """After Ctrl-C: back if the update was decided before (it stands), else KeyboardInterrupt once it is aborted."""
    from weightplane.trainer_agent.errors import OutcomeUnknown, PublishError

    try:
        handle.result(30)
    except OutcomeUnknown:
        raise
    except PublishError:
        raise KeyboardInterrupt from None
    err.print("interrupted, but the update was decided before: it stands")


def _follow(bars: Progress, address: str, group: str, over: threading.Event) -> None:
    """Draw the update's progress. What goes wrong here is only a missing picture; the publish itself reports."""
    import grpc

    from weightplane.v1 import weight_transfer_pb2
    from weightplane.v1.weight_transfer_pb2_grpc import WeightTransferServiceStub

    tasks: dict[str, Any] = {}
    with open_channel(address) as channel:
        stream = WeightTransferServiceStub(channel).WatchUpdate(weight_transfer_pb2.WatchUpdateRequest(group=group))
        threading.Thread(target=lambda: (over.wait(), stream.cancel()), daemon=True).start()
        try:
            for event in stream:
                for p in event.progress:
                    if p.replica_id not in tasks:
                        tasks[p.replica_id] = bars.add_task(p.replica_id, total=p.bytes_planned or None)
                    bars.update(tasks[p.replica_id], completed=p.bytes, total=p.bytes_planned or None)
        except grpc.RpcError as error:
            if not over.is_set():
                bars.console.print(f"progress is not shown: {error}", markup=False)


def _show(receipt: Any, as_json: bool) -> None:
    replicas = [
        {"replica_id": r.replica_id, "state": r.state, "version": r.held, "mode": r.mode} for r in receipt.replicas
    ]
    if as_json:
        emit_json(
            {
                "version": receipt.version,
                "update_id": receipt.update_id,
                "step": receipt.step,
                "committed": receipt.committed,
                "replicas": replicas,
                "absent": dict(receipt.absent),
                "metrics": receipt.metrics(),
            }
        )
        return
    m = receipt.metrics()
    console.print(
        f"version {receipt.version} is committed: {human_bytes(m['bytes'])} in {seconds(m['wire_s'])} "
        f"({m['gbps']:.2f} GB/s), pause {seconds(m['pause_s'])}, total {seconds(m['total_s'])}"
    )
    rows = [[r["replica_id"], str(r["state"]).lower(), str(r["version"]), str(r["mode"]).lower()] for r in replicas]
    rows += [[rid, "absent", "-", why] for rid, why in receipt.absent.items()]
    table("replicas", ["replica", "weights", "version", "mode"], rows)


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(publish)
