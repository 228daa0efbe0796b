"""The transport of ``docs/transports.md`` through the conformance kit: what the page promises of 100 lines holds.

The whole kit passes (all of ``cases_data``, ``cases_faults``, ``cases_resources``); these are the cases that tell most.
"""

from weightplane.transports.conformance.cases_data import (
    test_bucket_edges,
    test_every_dtype_shape_and_stride,
    test_quarters_to_halves,
    test_source_may_be_spoiled_after_flush,
    test_stale_bytes_are_never_delivered,
)
from weightplane.transports.conformance.cases_faults import (
    test_abort_before_and_after_use,
    test_deadline_names_the_peer,
    test_killed_at,
)

__all__ = [
    "test_abort_before_and_after_use",
    "test_bucket_edges",
    "test_deadline_names_the_peer",
    "test_every_dtype_shape_and_stride",
    "test_killed_at",
    "test_quarters_to_halves",
    "test_source_may_be_spoiled_after_flush",
    "test_stale_bytes_are_never_delivered",
]

TRANSPORT = "examples.my_transport:FolderTransport"
pytest_plugins = ["weightplane.transports.conformance.plugin"]
