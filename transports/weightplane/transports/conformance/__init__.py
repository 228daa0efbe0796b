"""The conformance kit: what every transport must pass, run with real processes against any transport by its name.

A third party's whole test module::

    TRANSPORT = "mine"  # its name in the entry-point group "weightplane.transports"
    from weightplane.transports.conformance.cases_data import *
    from weightplane.transports.conformance.cases_faults import *
    from weightplane.transports.conformance.cases_resources import *

It is run with ``pytest -p weightplane.transports.conformance.plugin``. A transport that is not installed yet goes by
``module:Class``. ``models`` makes the tensors, ``peer`` is a member's process, ``harness`` drives a fleet of them;
``cases_faults`` says which failpoints are expected.
"""

import sys

if "pytest" in sys.modules:  # before the cases are imported; the peers run without pytest
    for _name in ("cases_data", "cases_faults", "cases_resources", "harness"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{_name}")
