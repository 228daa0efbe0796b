"""Two stock vLLM servers as one fleet: every publish commits on both or on none; a rollout of two turns across one.

Run, in an environment that has vLLM and weightplane: python examples/vllm_http_fleet.py CHECKPOINT OTHER
CHECKPOINT: what the servers start from; OTHER: of the same architecture, what the trainer publishes second.
"""

import os
import signal
import socket
import subprocess
import sys

from weightplane.controlplane.core.model import Config
from weightplane.controlplane.core.states import CachePolicy
from weightplane.controlplane.server.app import ServerConfig
from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.controlplane.store import open_store
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.vllm.factory import make
from weightplane.inference_agent.engines.vllm.rollouts import Rollouts
from weightplane.inference_agent.engines.vllm.trajectory import Trajectory
from weightplane.trainer_agent import Publisher, SafetensorsSource

OPTIONS = {
    "--weight-transfer-config": '{"backend": "weightplane"}',  # the one thing that vLLM has to be told
    "--dtype": "float32",
    "--max-model-len": "512",
    "--kv-cache-memory-bytes": str(64 << 20),
    "--host": "127.0.0.1",
}
FLAGS = ["--enforce-eager", "--tokens-only", "--enable-prompt-tokens-details"]


def serve(checkpoint: str, core: int) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server on a core; where it will listen."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--port", str(port)]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_LOGGING_LEVEL": "WARNING"}
    options = [word for pair in OPTIONS.items() for word in pair]
    process = subprocess.Popen([*command, *options, *FLAGS], env={**os.environ, **settings}, process_group=0)
    return f"http://127.0.0.1:{port}", process


def main(checkpoint: str, other: str) -> None:
    """The program: servers, an agent for each, a trainer, and a trajectory on each server."""
    cores = sorted(os.sched_getaffinity(0))
    servers = {name: serve(checkpoint, cores[i % len(cores)]) for i, name in enumerate(("replica-a", "replica-b"))}
    try:
        # Everything shares one machine here: three seconds of silence (the default) are no sign of death on a busy one.
        patient = ServerConfig(open_store("memory:"), core=Config(ttl_s=15.0, routing_budget_s=60.0))
        with ControlPlaneThread(patient) as plane:
            # As `weightplane inference-agent --engine vllm` does beside each server; it waits until vLLM answers.
            engines = {name: make(url=url, start_timeout_s=240) for name, (url, _) in servers.items()}
            agents = [InferenceAgent(plane.address, "policy", n, e).start() for n, e in engines.items()]
            fleet = {name: Rollouts(url) for name, (url, _) in servers.items()}
            with Publisher(plane.address, "policy", SafetensorsSource(checkpoint)) as publisher:
                publisher.wait_for_replicas(2)
                first = publisher.publish(0)
            turns = {name: Trajectory(server, CachePolicy.SALT) for name, server in fleet.items()}
            for trajectory in turns.values():
                trajectory.turn(list(range(5, 205)), max_tokens=40, temperature=0)
            with Publisher(plane.address, "policy", SafetensorsSource(other), takeover=True) as publisher:
                second = publisher.publish(1, cache="salt")  # kept keys and values serve trajectories begun before
            for name, trajectory in turns.items():
                trajectory.turn([7, 8, 9], max_tokens=40, temperature=0)
                made_by = [(s.version, s.stop - s.start) for s in trajectory.spans if s.known]
                lag = max(trajectory.lags())
                print(f"{name}: (version, tokens) {made_by}, lag {lag}, computed again {trajectory.reprefilled}")
            print(f"published {first.version} on {sorted(first.ready)}, {second.version} on {sorted(second.ready)}")
            for agent in agents:
                agent.stop()
            for engine in engines.values():
                engine.close()
    finally:
        for _, process in servers.values():
            os.killpg(process.pid, signal.SIGTERM)
        for _, process in servers.values():
            process.wait(30)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
