"""Memory and tensor content over wires: what is referenced stays until it was read, and never a byte of what was."""

from __future__ import annotations

import gc

import torch
from torch import nn

from tests.cases.base import check, must
from tests.cases.card_models import Even, Many, Mixed, Two
from tests.cases.cards import Stand, cards, on, on_sender, sizes
from tests.cases.cases_memory import Layers
from tests.cases.wires import Wire
from tests.trainer_agent.fleet import fill
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import StateDictSource

SIZE = Even.SIZE  # elements of a tensor; each is a bucket


def flats(wire: Wire, value: float) -> dict[str, torch.Tensor]:
    """A tensor for each layer of ``Even``."""
    return {f"layers.{i}": torch.full((SIZE,), value + i, device=wire.sender) for i in range(6)}


def churn(wire: Wire, nbytes: int, times: int) -> list[torch.Tensor]:
    """Take what memory was freed, and write something else there."""
    made = [torch.full((nbytes,), 0xEE, dtype=torch.uint8, device=wire.sender) for _ in range(times)]
    if wire.sender != "cpu":  # not the device: a collective of ours waits on it for the one that is slow
        torch.cuda.current_stream(wire.sender).synchronize()
    return made


def read_late(c: Stand, publisher: Publisher, step: int, drop: list[dict[str, torch.Tensor]]) -> None:
    """Publish to a slow consumer; meanwhile the trainer drops all that it has and memory is used again."""
    wire = c.wire
    c.twin.do("hold", point="replica.receive.before", nth=2)
    handle = publisher.publish_async(step, verify="off")
    check("the consumer is slow", c.twin.do("inside", seconds=20))
    while drop:
        drop.pop().clear()
    gc.collect()
    junk = churn(wire, 4 * SIZE, 40)
    c.twin.do("go")
    with must("the update commits with exact values"):
        handle.result(30)
    del junk


@on()
def M08_what_the_trainer_drops_stays_until_the_receiver_has_read_it(w: Wire) -> None:
    """Tensors that the trainer made for this update alone (a cast), and drops with all else while it is read."""
    with cards(w, "even") as c:
        for step in (1, 2):
            state = {n: t.double() for n, t in flats(w, 10.0 * step).items()}
            wanted = {n: t.float() for n, t in state.items()}
            source = StateDictSource(state, cast=torch.float32)
            with c.publisher(source, bucket_bytes=4 * SIZE, incarnation=f"job {step}") as publisher:
                publisher.init()
                read_late(c, publisher, step, [state])
            c.exact("the update commits with exact values", wanted)


@on()
def T04_contiguous_copies_of_strided_tensors_stay_until_they_are_read(w: Wire) -> None:
    with cards(w, "even") as c:
        for step in (1, 2):
            wide = {n: torch.stack([t, t + 1, t + 2], 1) for n, t in flats(w, 10.0 * step).items()}
            state = {n: t[:, 1] for n, t in wide.items()}
            wanted = {n: t.contiguous().clone() for n, t in state.items()}
            with c.publisher(StateDictSource(state), bucket_bytes=4 * SIZE, incarnation=f"job {step}") as publisher:
                publisher.init()
                read_late(c, publisher, step, [])  # the strided ones are the caller's until source_free
            c.exact("the update commits with exact values", wanted)


@on("cuda_ipc", "ucx", "nccl")
def M03_a_staging_buffer_is_reclaimed_after_finish_and_nothing_grows(w: Wire) -> None:
    """Strided tensors are packed into scratch in many buckets, time after time; at the end all of it is let go of.

    How much scratch an update leaves depends on which of it was still being read: never more than two updates take.
    """
    with cards(w, "even") as c:
        wide = {n: torch.stack([t, t + 1], 1) for n, t in flats(w, 1.0).items()}
        state = {n: t[:, 0] for n, t in wide.items()}
        publisher = c.publisher(StateDictSource(state), bucket_bytes=SIZE)
        nbytes = sum(t.numel() * t.element_size() for t in state.values())
        buckets = -(-nbytes // SIZE) + len(state)  # at most
        sides: tuple[dict[str, int], dict[str, int]] = ({}, {})
        most = {"entries": 2 * buckets, "bytes": 2 * nbytes, "mapped": 4 * buckets}
        for step in range(1, 26 if w.sender != "cpu" else 16):
            for t in state.values():
                t.add_(1)
            c.commits("the update commits", publisher, step)
            for what, kept, first in (
                ("the trainer's side has not grown", c.kept(publisher), sides[0]),
                ("the receiver's has not", c.twin.do("kept"), sides[1]),
            ):
                first.setdefault("card", kept.get("card", 0) + 2 * nbytes)
                grown = sizes(kept, most | first)
                check(what, not grown, step, grown)
        c.exact("the last values are there", state)
        publisher.release()
        after = c.kept(publisher)
        check("the buffer is reclaimed", after["entries"] == 0 and after["bytes"] == 0, after)


@on()
def X07_memory_that_is_freed_and_taken_anew_is_read_as_it_is_now(w: Wire) -> None:
    """Sources freed and made anew between updates: let go of or merely replaced, given back to the driver or not."""
    with cards(w, "even") as c:
        state = flats(w, 0.0)
        publisher = c.publisher(StateDictSource(state), bucket_bytes=4 * SIZE)
        again = 0
        for step in range(1, 9):
            places = {t.data_ptr() for t in state.values()}
            if step % 2:
                publisher.release()
            state.clear()
            gc.collect()
            if step % 4 < 2 and w.sender != "cpu":
                torch.cuda.empty_cache()
            state.update(flats(w, 7.0 * step))
            again += len(places & {t.data_ptr() for t in state.values()})
            c.commits("the new data is delivered", publisher, step)
            c.exact("the new data is delivered", state)
        print(f"{w.id}: {again} tensors came again at an old address")


@on()
def M01_a_layer_larger_than_a_bucket_is_exact_although_the_bucket_is_used_again(w: Wire) -> None:
    with cards(w, "layers", clones=True) as c:
        module = on_sender(w, Layers())
        publisher = c.publisher(module, verify="off")
        for step in (1, 2):
            for i, p in enumerate(module.parameters()):
                p.copy_((torch.arange(p.numel()).view(p.shape) * (i + 1) + step) % 509)
            c.commits("the update commits", publisher, step)
            c.exact("every layer is exact", module)


@on()
def M04_sides_with_different_bucket_sizes_cut_by_one_plan(w: Wire) -> None:
    with cards(w, "even") as c:
        state = flats(w, 1.0)
        for step, size in enumerate((1 << 20, 64 << 20, 40_000), 1):
            for t in state.values():
                t.add_(step)
            with c.publisher(StateDictSource(state), bucket_bytes=size, incarnation=f"job {step}") as publisher:
                c.commits("the update commits", publisher, step)
            c.exact("the values are exact", state)


@on()
def M07_a_strided_parameter_of_the_engine_holds_the_value_itself(w: Wire) -> None:
    with cards(w, "strided", staged=True) as c:
        shapes = {"turned": (400, 240), "columns": (480, 124), "plain": (33, 7)}
        state = {n: torch.zeros(s, device=w.sender) for n, s in shapes.items()}
        where = {n: c.twin.do("place", name="r0", tensor=n) for n in shapes}
        publisher = c.publisher(StateDictSource(state), verify="off", bucket_bytes=50_000)
        for step, mode in enumerate(("in_place", "staged", "in_place"), 1):
            for n, t in state.items():
                t.copy_(torch.arange(t.numel()).view(t.shape) + 1000 * step + len(n))
            c.commits("the update commits", publisher, step, mode=mode)
            c.exact("the live parameter holds the value", state)
        check("in the memory that it had", where == {n: c.twin.do("place", name="r0", tensor=n) for n in shapes})


@on()
def T02_strided_sources_arrive_exactly(w: Wire) -> None:
    with cards(w, "strided") as c:
        turned, columns = torch.zeros(240, 400, device=w.sender), torch.zeros(480, 372, device=w.sender)
        plain = torch.zeros(7, 66, device=w.sender)
        state = {"turned": turned.t(), "columns": columns[:, ::3], "plain": plain.t()[::2]}
        publisher = c.publisher(StateDictSource(state), bucket_bytes=50_000)
        for step in (1, 2):
            for t in (turned, columns, plain):
                t.copy_(torch.arange(t.numel()).view(t.shape) + step)
            c.commits("the update commits", publisher, step)
            c.exact("the logical values arrive", state)


@on()
def T10_interleaved_dtypes_land_under_their_own_names(w: Wire) -> None:
    with cards(w, "mixed") as c:
        module = on_sender(w, Mixed())
        publisher = c.publisher(module, bucket_bytes=10_000)
        for step in (1, 2):
            module.become(step)
            c.commits("the update commits", publisher, step)
            c.exact("each tensor is under its own name", module)


@on()
def T16_the_same_names_are_updated(w: Wire) -> None:
    """A target and a draft in one engine: every name of both."""
    with cards(w, "two") as c:
        module: nn.Module = on_sender(w, Two())
        publisher = c.publisher(module, verify="full")
        for step in (1, 2):
            fill(module, step)
            c.commits("the update commits", publisher, step)
            c.exact("all names of both are updated", module)


@on()
def X04_thousands_of_small_tensors_arrive_without_a_zero(w: Wire) -> None:
    with cards(w, "many") as c:
        module = on_sender(w, Many())
        publisher = c.publisher(module, bucket_bytes=1 << 20, verify="full")
        for step in (1, 2):
            for i, t in enumerate(module.buffers()):
                t.fill_(1 + i * 2 + step)
            c.commits("the update commits", publisher, step)
            c.exact("none is another's or zero", module)
