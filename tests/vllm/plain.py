"""A worker whose linear layers keep their weights plain on CPU, as on a GPU, and defects planted in it.

vLLM packs them with oneDNN, or for AMX, where it can: ``worker_extension_cls="tests.vllm.plain.Plain"`` says that it
cannot, before the model is loaded, where ``SWITCH`` is set. ``python -m tests.vllm.plain NAME=FOLDER …``: what a fresh
one generates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as utils

from .models import ENVIRONMENT, _generate
from .planted import Planted

#: Set to anything in the engine's environment, and in none that runs other tests.
SWITCH = "WEIGHTPLANE_TEST_PLAIN"
if os.environ.get(SWITCH):
    custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False  # another packing, where there is AMX


class Plain(Planted):
    """Its methods are the worker's, called by ``collective_rpc``."""

    def flip(self, name: str) -> None:
        """From now on a bit of ``name``'s live memory changes after it was written past the loaders. Empty: no more."""
        from weightplane.inference_agent.engines.live import Copies
        from weightplane.inference_agent.vllm_plugin.opening import DirectWorker

        for kind, method in ((Copies, "steps"), (DirectWorker, "take")):
            whole: Any = getattr(getattr(kind, method), "whole", getattr(kind, method))
            if name:
                setattr(kind, method, self._flipping(name, whole, generator=kind is Copies))
            else:
                setattr(kind, method, whole)

    def _flipping(self, name: str, whole: Any, generator: bool) -> Any:
        def flip() -> None:
            import torch

            tensor = self.get_model().get_parameter(name)  # type: ignore[attr-defined]
            tensor.data.view(torch.uint8).flatten()[5] ^= 1

        def steps(this: Any) -> Any:
            yield from whole(this)
            flip()

        def take(this: Any, bucket: Any) -> None:
            whole(this, bucket)
            flip()

        found: Any = steps if generator else take
        found.whole = whole
        return found

    def misrecord(self, how: str) -> None:
        """The next survey's record: "lose" one copy, or "swap" where two of one shape go. Empty: it is right again."""
        from weightplane.inference_agent.vllm_plugin.recording import Copied, CopyRecorder

        whole: Any = getattr(CopyRecorder._copied, "whole", CopyRecorder._copied)

        def copied(this: Any, target: Any, source: Any) -> None:
            whole(this, target, source)
            if how == "lose" and len(this.copies) == 5:
                this.copies.pop()
            alike = [n for n, c in enumerate(this.copies) if c.name.endswith("k_proj.weight")]
            if how == "swap" and len(alike) == 2 and alike[1] == len(this.copies) - 1:
                a, b = (this.copies[n] for n in alike)
                this.copies[alike[0]] = Copied(a.name, a.source, b.key, b.target)
                this.copies[alike[1]] = Copied(b.name, b.source, a.key, a.target)

        copied.whole = whole  # type: ignore[attr-defined]
        CopyRecorder._copied = copied if how else whole  # type: ignore[method-assign, assignment]

    def replace(self, name: str) -> None:
        """A parameter becomes another one, of the same values elsewhere."""
        import torch

        module, _, leaf = name.rpartition(".")
        layer = self.get_model().get_submodule(module)  # type: ignore[attr-defined]
        old = layer._parameters[leaf]
        new = torch.nn.Parameter(old.data.clone(), requires_grad=False)
        new.__class__, new.__dict__ = old.__class__, old.__dict__.copy()
        layer._parameters[leaf] = new


def goldens(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Greedy tokens of ``PROMPTS`` from a fresh engine of each, with plain layers too."""
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", SWITCH: "1"}
    command = [sys.executable, "-m", "tests.vllm.plain", *(f"{n}={p}" for n, p in folders.items())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=400)
    found: dict[str, list[list[int]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps({n: _generate(p) for n, _, p in (a.partition("=") for a in sys.argv[1:])}))
