"""``weightplane publish``: put a checkpoint on a fleet, from the command line."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .client import (
    DEFAULT_ADDRESS,
    AddressOption,
    GroupOption,
    JsonOption,
    dial,
    interrupted,
    one_of,
    open_channel,
    words,
)
from .exits import Exit
from .network import AdvertiseOption, DataOption, InterfaceOption, on_network
from .output import complain, console, emit_json, err, human_bytes, seconds, table
from .refusals import Told, check_transport, how_to_convert

__all__ = ["register"]

_SAY_S = 2.0  # what is waited for is said after so long
_AGAIN_S = 1.0  # seconds between two looks at who is within reach: each binds anew
_LATE_S = 0.5  # by which the lapse of a lease may be noticed late


def publish(
    checkpoint: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of them.", exists=True)],
    group: GroupOption,
    step: Annotated[int, typer.Option("--step", min=0, help="The trainer's number of this checkpoint.")] = 0,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="Wait until this many may take part; later ones join the next.")
    ] = 1,
    transport: Annotated[str, typer.Option("--transport", help="Use this one or fail; none = the best for each.")] = "",
    mode: Annotated[str, typer.Option("--mode", help="staged | in_place; none = each replica's choice.")] = "",
    verify: Annotated[str, typer.Option("--verify", help="off | sampled | full; none = the group's.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for the update.")] = 120.0,
    wait: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for them, and for a dead trainer's hold to end.")
    ] = 30.0,
    takeover: Annotated[bool, typer.Option("--takeover", help="Fence a trainer that still holds the group.")] = False,
    data: DataOption = "",
    advertise: AdvertiseOption = "",
    interface: InterfaceOption = None,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint: on every replica of the group that may take part then, or on none.

    It starts as soon as --replicas of them may (one by default): say how many you started. Ctrl-C aborts cleanly.
    """
    from weightplane.trainer_agent.errors import PublishError

    one_of("--mode", mode, ("", "staged", "in_place"))
    one_of("--verify", verify, ("", "off", "sampled", "full"))
    on_network("PULL", data, advertise, interface or ())
    how = dial(address)
    told = Told(address, group, timeout, as_json)
    handle: Any = None
    try:
        from weightplane.trainer_agent.naming import SourceError
        from weightplane.trainer_agent.publisher import Publisher
        from weightplane.trainer_agent.sources_safetensors import SafetensorsSource

        check_transport(transport, as_json)
        try:
            source = SafetensorsSource(checkpoint)
        except (SourceError, OSError) as error:
            complain(str(error), "INVALID_ARGUMENT", Exit.USAGE, as_json, how_to_convert(checkpoint))
        options: dict[str, Any] = {"mode": mode, "verify": verify, "update_timeout": timeout}
        with Publisher(
            how, group, source, trainer_id="weightplane publish", transport=transport, takeover=takeover, **options
        ) as publisher:
            if not as_json:
                err.print(f"waiting up to {wait:g} s for {replicas} replica(s) of group {group}", markup=False)
            end = time.monotonic() + wait
            _gather(publisher, told, replicas, end, as_json)
            handle = publisher.publish_async(step)
            receipt = _watched(handle, address, group, as_json)
    except KeyboardInterrupt:
        opened = handle is not None and handle.opened
        what = "the update was aborted" if opened else "no update was open yet"
        interrupted(f"{what}; replicas keep what they serve", as_json)
    except PublishError as error:
        told.failed(error)
    except TimeoutError as error:
        told.too_few(str(error))
    except ValueError as error:
        complain(str(error), "INVALID_ARGUMENT", Exit.USAGE, as_json, "weightplane publish --help")
    except OSError as error:
        complain(str(error), "", Exit.REFUSED, as_json, "")
    else:
        _show(receipt, as_json)


def _gather(publisher: Any, told: Told, replicas: int, end: float, as_json: bool) -> None:
    """Wait until transports reach ``replicas`` that may take part, and take the hold. Ends the command, before anything
    is opened, where there are fewer by ``end``; of one alone the publish itself says why it is out of reach."""
    said = False
    while True:
        ready = _wait(publisher, replicas, end - time.monotonic(), as_json)
        _hold(publisher, end, as_json)
        out = publisher.out_of_reach()
        found = [r for r in ready if r not in out]
        if len(found) >= replicas:
            return
        if time.monotonic() + _AGAIN_S >= end:
            if replicas == 1:
                return
            told.out_of_reach(replicas, found, out)
        if not said and not as_json:
            said = True
            others = "; ".join(f"{r}: {why}" for r, why in sorted(out.items()))
            err.print(f"still waiting: no transport reaches {others}", markup=False, soft_wrap=True)
        time.sleep(_AGAIN_S)  # who is out of reach may be joined by who is not, or be taken in as it takes part


def _wait(publisher: Any, replicas: int, seconds_: float, as_json: bool) -> tuple[str, ...]:
    """Wait for the replicas, and say meanwhile what stands in their way (another publish, say); those that came."""
    from weightplane.trainer_agent.errors import CoordinatorUnreachable

    end, said = time.monotonic() + seconds_, ""
    while True:
        left = end - time.monotonic()
        try:
            found: tuple[str, ...] = publisher.wait_for_replicas(replicas, timeout=max(0.0, min(_SAY_S, left)))
            return found
        except (TimeoutError, CoordinatorUnreachable) as error:
            if left <= _SAY_S:
                raise
            if str(error) != said and not as_json:
                said = str(error)
                err.print(f"still waiting: {said}", markup=False, soft_wrap=True)


def _hold(publisher: Any, end: float, as_json: bool) -> None:
    """Take the hold; that of a trainer that died lapses, and is waited for until ``end``."""
    from weightplane.trainer_agent.errors import TrainerHeld

    lapsed = None
    while True:
        try:
            publisher.init()
            return
        except TrainerHeld as error:
            now = time.monotonic()
            if error.ends_in is None or now >= end or (lapsed is not None and now >= lapsed):
                raise  # it was renewed meanwhile: its trainer lives
            if lapsed is None:
                lapsed = now + error.ends_in + _LATE_S
                if not as_json:
                    err.print(f"still waiting: {error}", markup=False, soft_wrap=True)
        time.sleep(0.2)


def _watched(handle: Any, address: str, group: str, as_json: bool) -> Any:
    """Draw the progress of a publish that has a thread of its own, so that Ctrl-C is noticed at once."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    over = threading.Event()
    off = as_json or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=off, transient=True) as bars:
        if not off:
            threading.Thread(target=_follow, args=(bars, address, group, over), daemon=True).start()
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
                bars.console.print(f"progress is not shown: {words(error)}", markup=False)


def _show(receipt: Any, as_json: bool) -> None:
    """Ends with ``Exit.FAILED`` where no replica serves the version, committed or not."""
    replicas = [
        {
            "replica_id": r.replica_id,
            "state": r.state,
            "version": r.held,
            "mode": r.mode,
            "failure": r.failure.message if r.failure else "",
        }
        for r in receipt.replicas
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
    else:
        _tell(receipt, replicas)
    if not receipt.committed or all(r["state"] == "DIRTY" for r in replicas):
        raise typer.Exit(Exit.FAILED)


def _tell(receipt: Any, replicas: list[dict[str, Any]]) -> None:
    m = receipt.metrics()
    if receipt.committed:
        console.print(
            f"version {receipt.version} is committed: {human_bytes(m['bytes'])} in {seconds(m['wire_s'])} "
            f"({m['gbps']:.2f} GB/s), pause {seconds(m['pause_s'])}, total {seconds(m['total_s'])}"
        )
    else:
        why = receipt.failure.message if receipt.failure else "the update failed"
        console.print(f"nothing was committed: {why}", markup=False, soft_wrap=True)
    rows = [[r["replica_id"], str(r["state"]).lower(), str(r["version"]), str(r["mode"]).lower()] for r in replicas]
    rows += [[rid, "absent", "-", why] for rid, why in receipt.absent.items()]
    table("replicas", ["replica", "weights", "version", "mode"], rows)
    for r in replicas:
        if r["state"] == "DIRTY":
            why = r["failure"] or "an earlier update broke off there"
            text = f"{r['replica_id']} is DIRTY and serves nobody: {why}; the next full publish brings it back"
            err.print(text, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(publish)
