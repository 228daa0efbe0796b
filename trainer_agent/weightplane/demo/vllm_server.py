"""A vLLM server that ends with the demo: ``python -m weightplane.demo.vllm_server PID [vLLM's options]``."""

from __future__ import annotations

import runpy
import sys

from weightplane.cli.launched import exit_with

__all__: list[str] = []

if __name__ == "__main__":
    exit_with(int(sys.argv.pop(1)))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
