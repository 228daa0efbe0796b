"""``weightplane publish`` under the arguments of a trainer that ``conformance`` runs."""

from __future__ import annotations

import argparse
import os
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("address", "group", "file", "step"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--takeover", action="store_true")
    said = parser.parse_args()
    command = [sys.executable, "-m", "weightplane.cli", "publish", said.file, "-a", said.address, "-g", said.group]
    command += ["--step", said.step, "--transport", "grpc", *(["--takeover"] if said.takeover else [])]
    os.execv(sys.executable, command)
