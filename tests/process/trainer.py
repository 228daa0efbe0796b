"""A trainer as a process: commands on standard input, a line of JSON each; one answer a line on standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

from tests.process.coded import Coded
from weightplane.controlplane import failpoints
from weightplane.controlplane.core.plan import Bucket
from weightplane.trainer_agent import hashing
from weightplane.trainer_agent.errors import PublishError, UpdateFailed
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.receipt import PublishReceipt
from weightplane.trainer_agent.sources import ModuleSource, module_tensors
from weightplane.transports.digest import digest_tensor, hex_digest


def failure(f: Any) -> dict[str, Any] | None:
    return f and {"reason": str(f.reason), "message": f.message, "member": f.member, "tensors": list(f.tensors)}


def told(receipt: PublishReceipt) -> dict[str, Any]:
    return {
        "ok": True,
        "version": receipt.version,
        "step": receipt.step,
        "update_id": receipt.update_id,
        "committed": receipt.committed,
        "ready": list(receipt.ready),
        "absent": receipt.absent,
        "bytes": receipt.bytes,
        "replicas": {
            r.replica_id: {
                "state": r.state,
                "held": r.held,
                "mode": r.mode,
                "bytes": r.bytes_received,
                "failure": failure(r.failure),
            }
            for r in receipt.replicas
        },
    }


def raised(error: BaseException) -> dict[str, Any]:
    out: dict[str, Any] = {"ok": False, "error": type(error).__name__, "text": str(error)}
    if isinstance(error, PublishError):
        out["failure"] = failure(error.failure)
    if isinstance(error, UpdateFailed):
        out["update_id"], out["version"] = error.update_id, error.version
        out["failures"] = {r: failure(f) for r, f in error.failures.items()}
        update = error.update
        out["landed"] = {o.replica_id: o.bytes_received for o in update.outcomes} if update is not None else {}
    return out


class Restless(ModuleSource):
    """Defect: one byte of ``layers.3`` changes between the hash of its first bucket and the sending of that bucket."""

    defect = False
    _done = False

    def begin(self, step: int) -> None:
        if not self.defect:
            return
        hashed, seen = threading.Semaphore(0), threading.Event()
        hash_bucket, before = hashing.LaneHasher._hash, failpoints._hook
        index = self.manifest().index["layers.3"]

        def hash_and_tell(lane: hashing.LaneHasher, bucket: Bucket, spans: Any) -> None:
            hash_bucket(lane, bucket, spans)
            if any(lane._plan.regions[s.region].tensor == index for s in bucket.segments):
                seen.set()
            hashed.release()

        def between(point: str, n: int) -> None:
            """The bucket about to be sent has been handed to the hasher: wait for it."""
            if point == "trainer.send.bucket" and not self._done and hashed.acquire(timeout=10) and seen.is_set():
                self._done = True
                self.module.get_parameter("layers.3").view(-1)[:1].mul_(-1)

        self._done = False
        hashing.LaneHasher._hash = hash_and_tell  # type: ignore[method-assign,assignment]
        failpoints.set_hook(between)

        def restore() -> None:
            hashing.LaneHasher._hash = hash_bucket  # type: ignore[method-assign]
            failpoints.set_hook(before)

        self._restore = restore

    def end(self) -> None:
        super().end()
        if self.defect:
            self._restore()
            self.defect = False


def _model() -> Any:
    """``Coded``, or what ``WEIGHTPLANE_TEST_MODEL`` (module:class) names: a module with ``fill(step)``."""
    module, _, name = os.environ.get("WEIGHTPLANE_TEST_MODEL", "").partition(":")
    return getattr(importlib.import_module(module), name)() if module else Coded()


def main(argv: list[str]) -> None:
    address, name, transport, bucket_bytes, *of_several = argv
    rank, world, takeover = of_several or ("0", "1", "yes")
    model = _model()
    source = Restless(model)
    out = sys.stdout

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    with Publisher(
        address,
        "g",
        source,
        trainer_id=name,
        transport=transport,
        bucket_bytes=int(bucket_bytes),
        rank=int(rank),
        world_size=int(world),
        incarnation=name if int(world) > 1 else "",
        takeover=takeover == "yes",
        update_timeout=20.0,
    ) as publisher:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                if order["do"] == "publish":
                    model.fill(order["step"])
                    source.defect = order.get("mutate", False)
                    say(told(publisher.publish(order["step"], **order["options"])))
                elif order["do"] == "wait":
                    say({"ok": True, "replicas": publisher.wait_for_replicas(order["count"], 60)})
                elif order["do"] == "digests":
                    say({n: hex_digest(digest_tensor(t)) for n, t in module_tensors(model)})
            except Exception as e:
                say(raised(e))
