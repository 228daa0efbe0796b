"""A vLLM worker that can be armed while it runs: ``--worker-extension-cls tests.faults.vllm_engine.Armable``."""

from __future__ import annotations

import os
from pathlib import Path

from tests.process.launch import Armed
from weightplane.controlplane import failpoints

#: ``folder:name`` of the files that arm it (``tests.process.launch``).
SWITCH = "WEIGHTPLANE_TEST_ARMED"

if SWITCH in os.environ:
    _folder, _, _name = os.environ[SWITCH].rpartition(":")
    failpoints.set_hook(Armed(Path(_folder), _name))


class Armable:
    """The hook is installed as the worker imports this."""
