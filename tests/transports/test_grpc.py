"""``grpc`` through the conformance kit."""

from __future__ import annotations

from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403

TRANSPORT = "grpc"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
