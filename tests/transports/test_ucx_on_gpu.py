"""``ucx`` on GPU memory: the conformance kit, across two GPUs and on one."""

from __future__ import annotations

import pytest

from weightplane.transports import ucx_agent
from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403

TRANSPORT = "ucx"
DEVICES = ("cuda", "cuda:0")
pytest_plugins = ["weightplane.transports.conformance.plugin"]

if not ucx_agent.package():
    pytest.skip("NIXL is not installed (tools/test-nixl.txt)", allow_module_level=True)
