"""``cuda_ipc``'s code through the conformance kit, with a card that the host plays (``host_card``)."""

from __future__ import annotations

from weightplane.transports.conformance.cases_data import *  # noqa: F403
from weightplane.transports.conformance.cases_faults import *  # noqa: F403
from weightplane.transports.conformance.cases_resources import *  # noqa: F403

TRANSPORT = "tests.transports.host_card:HostCardIpc"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
