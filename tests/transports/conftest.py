"""These tests start hundreds of the conformance suite's peers."""

from tests import warm
from weightplane.transports.conformance.harness import PeerProcess

PeerProcess.popen = warm.Popen
