"""``weightplane watch``: follow a group's updates live."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from weightplane.v1 import update_pb2, weight_transfer_pb2

from .client import DEFAULT_ADDRESS, AddressOption, GroupOption, JsonOption, connect
from .output import console, emit_json, err, phase_name, reason_name

__all__ = ["register"]

_OVER = (update_pb2.UPDATE_PHASE_COMMITTED, update_pb2.UPDATE_PHASE_ABORTED)


def watch(
    group: GroupOption,
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
    once: Annotated[bool, typer.Option("--once", help="End with the first update that ends.")] = False,
) -> None:
    """Follow a group's updates live: phase, bytes per replica, GB/s, ETA. Ctrl-C ends it and changes nothing."""
    with connect(address, as_json=as_json, group=group) as c:
        stream = c.transfer.WatchUpdate(weight_transfer_pb2.WatchUpdateRequest(group=group))
        picture = _Picture()
        try:
            old: str | None = None  # the update that was over when we came
            for event in stream:
                over = event.update.phase in _OVER
                if old is None:
                    old = event.update.update_id if over else ""
                    if not as_json and (over or not event.update.update_id):
                        err.print(f"waiting for an update of group {group}; Ctrl-C ends this", markup=False)
                if event.update.update_id in ("", old):
                    continue
                if as_json:
                    emit_json(event)
                else:
                    picture.draw(event)
                if once and over:
                    stream.cancel()
                    break
        finally:
            picture.close()


class _Picture:
    """The bars. They begin with the first update: an empty picture would leave a blank line behind."""

    def __init__(self) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(TextColumn("{task.description}"), *columns, console=console)
        self._tasks: dict[tuple[str, str], int] = {}
        self._ended: set[str] = set()

    def draw(self, event: weight_transfer_pb2.WatchUpdateResponse) -> None:
        """Show one event."""
        self._bars.start()
        u, bars, tasks = event.update, self._bars, self._tasks
        for p in event.progress:
            key = (u.update_id, p.replica_id)
            if key not in tasks:
                tasks[key] = bars.add_task(f"v{u.version} {p.replica_id}", total=p.bytes_planned or None)
            bars.update(tasks[key], completed=p.bytes, total=p.bytes_planned or None)  # type: ignore[arg-type]
        if u.phase in _OVER and u.update_id not in self._ended:
            self._ended.add(u.update_id)
            why = f": {reason_name(u.failure.reason)} {u.failure.message}" if u.failure.reason else ""
            bars.console.print(f"v{u.version} (step {u.trainer_step}) {phase_name(u.phase)}{why}", markup=False)
            for key in [k for k in tasks if k[0] == u.update_id]:
                bars.remove_task(tasks.pop(key))  # type: ignore[arg-type]

    def close(self) -> None:
        """Leave the screen as it is."""
        if self._bars.live.is_started:
            self._bars.stop()


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(watch)
