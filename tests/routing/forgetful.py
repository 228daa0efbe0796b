"""Planted defect: ``examples/router.py`` that asks for any version and tells the replica of none."""

from __future__ import annotations

import runpy
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

_parse = BaseHTTPRequestHandler.parse_request


def forget(self: BaseHTTPRequestHandler) -> bool:
    found = _parse(self)
    if "Weightplane-Min-Version" in self.headers:
        self.headers.replace_header("Weightplane-Min-Version", "1")
    return found


BaseHTTPRequestHandler.parse_request = forget  # type: ignore[method-assign]
sys.argv[0] = str(Path(__file__).resolve().parents[2] / "examples" / "router.py")
runpy.run_path(sys.argv[0], run_name="__main__")
