"""A device as a collective channel uses it: two streams of its own, events between them, packed buffers, copy tables.

On the *wire* stream the library's operations run, one after another; on the *copy* stream small tensors are packed and
unpacked meanwhile. Neither waits for other streams unless told to (``behind``). Made on ``cuda_driver``, as
``cuda_ipc`` is. The data thread, but ``passed`` and ``idle``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cuda_driver import Batch, Cuda
from .gather_table import Copies, Rows, rows_of

__all__ = ["Lanes", "Mark", "Slot", "Table"]


class Mark:
    """A place on a stream, passed once what was queued before has run. Its event is used again when nobody holds it."""

    __slots__ = ("_pool", "event")

    def __init__(self, event: int, pool: list[int]) -> None:
        self.event, self._pool = event, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Copies inside the device's memory, ready to be queued."""

    rows: Rows | None
    columns: torch.Tensor | None
    batch: Batch | None


class Slot:
    """A packed buffer. ``free``: when it may be written again."""

    __slots__ = ("buffer", "free")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.free: Mark | None = None


class Lanes:
    """See the module text. ``wire`` and ``copy`` are the streams' handles."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self._cuda, self._index = cuda, index
        self.device = torch.device(cuda.kind, index) if cuda.kind == "cuda" else torch.device(cuda.kind)
        self._events: list[int] = []
        self._made: list[int] = []
        self.slots: list[Slot] = []
        self._by_kernel = False
        self._programs = 1
        with cuda.on(index):
            self.wire, self.copy = cuda.new_stream(), cuda.new_stream()

    # --- memory

    def prepare(self, slots: int, nbytes: int) -> bool:
        """Have ``slots`` packed buffers of at least ``nbytes``, and the kernel that fills them; whether the buffers are
        others than before. When nothing runs."""
        self._by_kernel = not self._cuda.gather_problem(self._index)  # compiled and loaded now, not in mid-transfer
        self._programs = max(1, self._cuda.processors(self._index) // 2)  # the library's kernels run beside it
        if not nbytes or (len(self.slots) == slots and self.slots[0].buffer.numel() >= nbytes):
            return False
        self.slots.clear()  # before the new ones are taken
        self.slots.extend(Slot(self.scratch(nbytes)) for _ in range(slots))
        return True

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device reads and writes."""
        with self._cuda.on(self._index):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda.kind == "cuda")

    # --- order

    def behind(self) -> None:
        """What is queued from now on runs after what the calling thread's current stream holds now."""
        with self._cuda.on(self._index):
            mark = self._mark(self._cuda.current_stream(self._index))
            for stream in (self.copy, self.wire):
                self._cuda.wait(stream, mark.event)

    def mark(self, stream: int) -> Mark:
        """Where a stream is now."""
        with self._cuda.on(self._index):
            return self._mark(stream)

    def _mark(self, stream: int) -> Mark:
        try:
            event = self._events.pop()
        except IndexError:
            event = self._cuda.new_event()
            self._made.append(event)
        mark = Mark(event, self._events)
        self._cuda.record(event, stream)
        return mark

    def wait(self, stream: int, mark: Mark) -> None:
        """What is queued on the stream from now on runs after the mark."""
        with self._cuda.on(self._index):
            self._cuda.wait(stream, mark.event)

    def passed(self, mark: Mark) -> bool:
        """Whether it was; then its bytes are there for every stream."""
        return self._cuda.passed(mark.event)

    def idle(self) -> bool:
        """Whether nothing of ours runs."""
        with self._cuda.on(self._index):
            return self._cuda.idle(self.wire) and self._cuda.idle(self.copy)

    # --- copies

    def table(self, copies: Copies) -> Table:
        """Prepare copies. They may be queued after the next ``behind``, which waits for the table."""
        if self._by_kernel:
            rows = rows_of(copies)
            with self._cuda.on(self._index):
                return Table(rows, self._cuda.table(rows.columns, self._index), None)
        return Table(None, None, Batch(*(c.tolist() for c in (copies.target, copies.source, copies.nbytes))))

    def run(self, table: Table) -> None:
        """Queue a table's copies on the copy stream."""
        cuda = self._cuda
        with cuda.on(self._index):
            if table.rows is not None and table.columns is not None:
                cuda.gather(self._index, table.columns, table.rows, self._programs, self.copy)
            elif table.batch is not None:
                (cuda.copy_batch if cuda.batches else cuda.copy_each)(table.batch, self.copy)

    def move(self, source: torch.Tensor, target: torch.Tensor, stream: int) -> None:
        """Queue one copy, also from or to ``host`` memory."""
        with self._cuda.on(self._index):
            self._cuda.copy_each(Batch([target.data_ptr()], [source.data_ptr()], [source.numel()]), stream)

    def close(self) -> None:
        """Free everything. When nothing runs."""
        self.slots.clear()
        with self._cuda.on(self._index):
            while self._made:
                self._cuda.drop_event(self._made.pop())
            self._events.clear()
            for stream in (self.wire, self.copy):
                self._cuda.drop_stream(stream)
