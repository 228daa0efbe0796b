"""``ucx`` on CPU memory through the conformance kit, and what only it promises."""

from __future__ import annotations

from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403

TRANSPORT = "ucx"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
