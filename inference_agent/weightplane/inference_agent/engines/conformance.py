"""The engine conformance kit: subclass ``EngineConformance``, say how to build your engine, run pytest.

It drives the engine as the agent does, without any transport: it writes the targets itself. Every check is a rule of
``base.py``; an engine that fails one cannot keep Weightplane's promises.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest
import torch

from weightplane.controlplane.core.manifest import Manifest, TensorMeta
from weightplane.controlplane.core.model import NONE_HELD, Held
from weightplane.controlplane.core.placement import full_box, uncovered
from weightplane.controlplane.core.states import CachePolicy, Mode, PauseMode
from weightplane.transports.digest import digest_tensor
from weightplane.transports.dtypes import as_bytes, dtype_of, int_view

from .base import Engine, EngineClosed, EngineError, EngineUpdate, RequestAborted
from .conformance_sleep import SleepCases

__all__ = ["EngineConformance", "fill", "values_for"]


def values_for(manifest: Manifest, seed: int) -> dict[int, torch.Tensor]:
    """Random full tensors for every root entry, of any bits (bools of other bytes than 0 and 1, too), by seed."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for i, meta in enumerate(manifest):
        if not meta.alias_of:
            raw = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
            out[i] = raw.view(dtype_of(meta.dtype)).view(meta.shape)
    return out


def fill(engine: Engine, manifest: Manifest, values: dict[int, torch.Tensor], worker: int) -> None:
    """Write one worker's targets, as a transport would."""
    for index, (tensor, box) in engine.targets(worker).items():
        source = values[manifest.root(index)][tuple(slice(a, b) for a, b in box)]
        with torch.inference_mode():
            int_view(tensor).copy_(int_view(source))


class EngineConformance(SleepCases, ABC):
    """Subclass with ``build`` and ``manifest_of``; name the class ``Test…``."""

    @abstractmethod
    def build(self) -> Engine:
        """A fresh engine, never updated, with room for staging if it can stage."""

    @abstractmethod
    def manifest_of(self, engine: Engine) -> Manifest:
        """A manifest that fits it."""

    # --- helpers

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """The engine under test."""
        engine = self.build()
        yield engine
        engine.close()

    def members(self, engine: Engine) -> list[str]:
        """Names for its workers."""
        return [f"r/{w}" for w in range(len(engine.workers))]

    def update(self, engine: Engine, version: int, mode: Mode) -> EngineUpdate:
        """An update with every engine default."""
        return EngineUpdate(
            f"u{version}", version, 10 * version, "lin", mode, engine.cache_policies[0], self.manifest_of(engine)
        )

    def take(self, engine: Engine, version: int, mode: Mode) -> dict[int, torch.Tensor]:
        """Run a whole update; returns the values."""
        u = self.update(engine, version, mode)
        values = values_for(u.manifest, version)
        engine.describe(u.manifest, self.members(engine))
        engine.begin(u)
        if mode is Mode.IN_PLACE:
            self.pause(engine)
            engine.writing(u.update_id)
        for w in range(len(engine.workers)):
            fill(engine, u.manifest, values, w)
        engine.prepare(u.update_id)
        if mode is Mode.STAGED:
            self.pause(engine)
            engine.apply(u.update_id)
        engine.commit(u.update_id)
        engine.resume("update")
        return values

    def pause(self, engine: Engine, mode: PauseMode = PauseMode.KEEP, holder: str = "update") -> None:
        """Pause and wait."""
        engine.pause(holder, mode)
        assert engine.wait_paused(holder, 10), f"the pause by {holder} never came into force"

    def bits(self, engine: Engine, manifest: Manifest, version: int = 10**6) -> list[dict[int, bytes]]:
        """Every worker's live bytes (opens an in-place update to look, and drops it)."""
        engine.begin(EngineUpdate("look", version, 0, "", Mode.IN_PLACE, engine.cache_policies[0], manifest))
        out = [
            {i: as_bytes(t).cpu().numpy().tobytes() for i, (t, _) in engine.live(w).items()}
            for w in range(len(engine.workers))
        ]
        engine.abort("look", False, "looked")
        return out

    def wanted(self, engine: Engine, manifest: Manifest, values: dict[int, torch.Tensor]) -> list[dict[int, bytes]]:
        """What ``bits`` should give."""
        out = []
        for placement in engine.describe(manifest, self.members(engine)).placements:
            out.append(
                {
                    p.tensor: as_bytes(values[manifest.root(p.tensor)][tuple(slice(a, b) for a, b in p.box)])
                    .numpy()
                    .tobytes()
                    for p in placement.pieces
                }
            )
        return out

    # --- what it says

    def test_it_is_born_holding_nothing_of_ours(self, engine: Engine) -> None:
        """Rule: a version is reported only after an update."""
        assert engine.workers and engine.modes and engine.pause_modes and engine.cache_policies
        assert engine.held() == (NONE_HELD,) * len(engine.workers) and not engine.mixed()
        assert (Mode.STAGED in engine.modes) == (not engine.staging_refusal)
        with engine.forward() as tag:
            assert tag.version == 0

    def test_its_workers_hold_the_whole_manifest(self, engine: Engine) -> None:
        """Placements fit, and together cover every byte."""
        manifest = self.manifest_of(engine)
        said = engine.describe(manifest, self.members(engine))
        assert not said.problems, said.failure("r")
        assert not uncovered(manifest, said.placements)

    def test_a_wrong_manifest_is_refused_by_name(self, engine: Engine) -> None:
        """Missing, extra, mis-shaped and mis-typed names; nothing is written."""
        good = self.manifest_of(engine)
        before = self.bits(engine, good)
        first = next(t for t in good if not t.alias_of and not any(o.alias_of == t.name for o in good))
        rest = [t for t in good if t is not first]
        other = "int64" if first.dtype != "int64" else "float32"
        for bad, name in (
            (Manifest.of(rest), first.name),
            (Manifest.of([*good, TensorMeta("not.there", "float32", (1,))]), "not.there"),
            (Manifest.of([*rest, TensorMeta(first.name, first.dtype, (*first.shape, 1))]), first.name),
            (Manifest.of([*rest, TensorMeta(first.name, other, first.shape)]), first.name),
        ):
            failure = engine.describe(bad, self.members(engine)).failure("r")
            assert failure is not None and failure.reason.value == "MANIFEST_MISMATCH"
            assert name in failure.tensors and name in failure.message
        assert self.bits(engine, good) == before

    # --- updates

    @pytest.mark.parametrize("mode", [Mode.STAGED, Mode.IN_PLACE])
    def test_two_updates_land_exactly_and_keep_addresses(self, engine: Engine, mode: Mode) -> None:
        """Every byte, under every name; the second as the first; live tensors do not move."""
        if mode not in engine.modes:
            pytest.skip(f"{mode}: {engine.staging_refusal}")
        manifest, layout = self.manifest_of(engine), engine.layout()
        for version in (1, 2, 3):
            values = self.take(engine, version, mode)
            assert self.bits(engine, manifest) == self.wanted(engine, manifest, values)
            assert engine.held() == (Held(version, f"u{version}"),) * len(engine.workers)
            with engine.forward() as tag:
                assert (tag.version, tag.update_id, tag.trainer_step, tag.lineage) == (
                    version,
                    f"u{version}",
                    10 * version,
                    "lin",
                )
        assert engine.layout() == layout, "live tensors moved"

    def test_read_back_digests_are_the_trainers(self, engine: Engine) -> None:
        """LIVE evidence: a full tensor's digest, read back, equals the source's."""
        manifest = self.manifest_of(engine)
        values = self.take(engine, 1, engine.modes[0])
        engine.begin(EngineUpdate("look", 99, 0, "", Mode.IN_PLACE, engine.cache_policies[0], manifest))
        for w in range(len(engine.workers)):
            for index, (tensor, box) in engine.live(w).items():
                if box == full_box(manifest.tensors[index].shape):
                    assert digest_tensor(tensor) == digest_tensor(values[manifest.root(index)])
        engine.abort("look", False, "looked")

    def test_staged_bytes_change_nothing_before_apply(self, engine: Engine) -> None:
        """Generation goes on with the old version while bytes land; an abort leaves no trace."""
        if Mode.STAGED not in engine.modes:
            pytest.skip(engine.staging_refusal)
        manifest = self.manifest_of(engine)
        self.take(engine, 1, Mode.STAGED)
        before = self.bits(engine, manifest)
        u = self.update(engine, 2, Mode.STAGED)
        engine.begin(u)
        for w in range(len(engine.workers)):
            fill(engine, manifest, values_for(manifest, 2), w)
        engine.prepare(u.update_id)
        with engine.forward() as tag:
            assert tag.version == 1
        engine.abort(u.update_id, False, "test")
        engine.abort(u.update_id, False, "test")
        assert self.bits(engine, manifest) == before
        assert engine.held()[0] == Held(1, "u1") and not engine.mixed() and not engine.holders()
        self.take(engine, 3, Mode.STAGED)

    def test_in_place_abort_after_the_first_byte_fences_until_healed(self, engine: Engine) -> None:
        """Mixed: nothing held, no pass runs, whoever resumes; a full update heals."""
        if Mode.IN_PLACE not in engine.modes:
            pytest.skip("no in-place mode")
        self.take(engine, 1, Mode.IN_PLACE)
        u = self.update(engine, 2, Mode.IN_PLACE)
        engine.begin(u)
        self.pause(engine)
        engine.writing(u.update_id)
        fill(engine, u.manifest, values_for(u.manifest, 2), 0)
        engine.abort(u.update_id, True, "the trainer died")
        engine.resume("update")
        engine.resume("dirty")
        assert engine.mixed() and engine.held() == (NONE_HELD,) * len(engine.workers)
        assert not self.passes(engine, 0.2), "a mixed engine generated"
        values = self.take(engine, 3, Mode.IN_PLACE)
        engine.resume("dirty")
        assert not engine.mixed() and self.passes(engine, 5)
        assert self.bits(engine, u.manifest) == self.wanted(engine, u.manifest, values)

    def test_in_place_abort_before_the_first_byte_leaves_it_whole(self, engine: Engine) -> None:
        """Fenced for the write, nothing came: it serves on."""
        if Mode.IN_PLACE not in engine.modes:
            pytest.skip("no in-place mode")
        self.take(engine, 1, Mode.IN_PLACE)
        u = self.update(engine, 2, Mode.IN_PLACE)
        engine.begin(u)
        self.pause(engine)
        engine.writing(u.update_id)
        engine.abort(u.update_id, False, "nothing came")
        engine.resume("update")
        assert not engine.mixed() and engine.held()[0].version == 1 and self.passes(engine, 5)

    def test_what_it_cannot_do_is_refused(self, engine: Engine) -> None:
        """Unknown updates, pauses and policies raise; nothing changes."""
        with pytest.raises(EngineError):
            engine.apply("unknown")
        with pytest.raises(EngineError):
            engine.commit("unknown")
        with pytest.raises(ValueError):
            engine.pause("operator", PauseMode.DEFAULT)
        lacking = [p for p in (CachePolicy.KEEP, CachePolicy.SALT) if p not in engine.cache_policies]
        for policy in lacking:
            manifest = self.manifest_of(engine)
            with pytest.raises(EngineError):
                engine.begin(EngineUpdate("u", 1, 0, "", engine.modes[0], policy, manifest))
        assert not engine.holders() and engine.held()[0] == NONE_HELD

    # --- generation

    def passes(self, engine: Engine, within: float) -> bool:
        """Whether a forward pass gets through in time."""
        done = threading.Event()

        def run() -> None:
            with contextlib.suppress(EngineClosed), engine.forward():
                done.set()

        threading.Thread(target=run, daemon=True).start()
        return done.wait(within)

    def test_each_holder_removes_only_its_own(self, engine: Engine) -> None:
        """Two holders, each twice; resumed once each."""
        for _ in range(2):
            self.pause(engine, PauseMode.KEEP, "operator")
            self.pause(engine, PauseMode.KEEP, "trainer")
        engine.resume("operator")
        engine.resume("operator")
        assert engine.holders() == {"trainer"} and not self.passes(engine, 0.1)
        engine.resume("trainer")
        assert self.passes(engine, 5)

    def test_keep_stops_between_passes(self, engine: Engine) -> None:
        """A pass in flight finishes; the request goes on afterwards."""
        if PauseMode.KEEP not in engine.pause_modes:
            pytest.skip("no KEEP")
        entered, leave, count = threading.Event(), threading.Event(), []

        def generate() -> None:
            with engine.request():
                for i in range(2):
                    with engine.forward():
                        count.append(i)
                        entered.set()
                        leave.wait(10)

        t = threading.Thread(target=generate, daemon=True)
        t.start()
        assert entered.wait(10)
        engine.pause("update", PauseMode.KEEP)
        assert not engine.wait_paused("update", 0.1), "a pass is still inside"
        leave.set()
        assert engine.wait_paused("update", 10)
        time.sleep(0.05)
        assert count == [0]
        engine.resume("update")
        t.join(10)
        assert count == [0, 1]

    def test_wait_drains_requests_and_holds_new_ones(self, engine: Engine) -> None:
        """Requests in flight finish on the old version; later ones wait."""
        if PauseMode.WAIT not in engine.pause_modes:
            pytest.skip("no WAIT")
        entered, seen = threading.Event(), []

        def generate(name: str, passes: int) -> None:
            with engine.request():
                entered.set()
                for _ in range(passes):
                    with engine.forward():
                        seen.append(name)
                    time.sleep(0.02)

        old = threading.Thread(target=generate, args=("old", 10), daemon=True)
        old.start()
        assert entered.wait(10)
        engine.pause("update", PauseMode.WAIT)
        new = threading.Thread(target=generate, args=("new", 1), daemon=True)
        new.start()
        assert engine.wait_paused("update", 10)
        assert (seen == ["old"] * 10 and not old.is_alive()) or engine.running_requests == 0
        assert "new" not in seen
        engine.resume("update")
        new.join(10)
        assert seen[-1] == "new"

    def test_abort_ends_requests_early_with_what_they_have(self, engine: Engine) -> None:
        """The next pass raises; the pause does not wait for the request to leave."""
        if PauseMode.ABORT not in engine.pause_modes:
            pytest.skip("no ABORT")
        entered, tokens, ended = threading.Event(), [], threading.Event()

        def generate() -> None:
            with engine.request() as request:
                try:
                    while True:
                        with engine.forward():
                            tokens.append(1)
                        entered.set()
                        time.sleep(0.005)
                except RequestAborted:
                    assert request.aborted
                    ended.set()

        threading.Thread(target=generate, daemon=True).start()
        assert entered.wait(10)
        self.pause(engine, PauseMode.ABORT)
        assert ended.wait(10) and tokens
        engine.resume("update")
        assert self.passes(engine, 5)

    def test_a_paused_request_never_blocks_an_update(self, engine: Engine) -> None:
        """A request held by one pause cannot be drained by another: the update goes through."""
        if PauseMode.WAIT not in engine.pause_modes:
            pytest.skip("no WAIT")
        entered = threading.Event()

        def generate() -> None:
            with engine.request():
                while not entered.is_set() or engine.holders():
                    with engine.forward():
                        entered.set()
                    time.sleep(0.005)

        t = threading.Thread(target=generate, daemon=True)
        t.start()
        assert entered.wait(10)
        self.pause(engine, PauseMode.KEEP, "operator")
        self.pause(engine, PauseMode.WAIT, "update")
        engine.resume("update")
        engine.resume("operator")
        t.join(10)
        assert not t.is_alive()
