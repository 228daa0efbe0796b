"""A trainer's rank as a process on a host: JSON lines in, JSON lines out. Both ranks hold the whole model.

``python -m tests.hosts.trainer CONTROL-PLANE RANK WORLD TRANSPORT``; ``{"step": n}`` publishes, ``{"count": n}`` waits
for so many replicas.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from typing import Any

import torch

from tests.process.coded import Coded
from tests.process.trainer import raised, told
from weightplane.controlplane.dial import Dial
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource


def main(address: str, rank: str, world: str, transport: str) -> None:
    faulthandler.register(signal.SIGUSR1)  # whoever waits for it in vain asks where it stands
    torch.set_num_threads(1)
    model = Coded()
    publisher = Publisher(
        Dial.from_environment(address),
        "g",
        ModuleSource(model),
        rank=int(rank),
        world_size=int(world),
        incarnation="job-1",
        transport=transport,
        bucket_bytes=32768,
        update_timeout=20.0,
    )

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)

    say({"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "step" in order:
                model.fill(order["step"])
                say(told(publisher.publish(order["step"], **order.get("options", {}))))
            else:
                say({"ok": True, "replicas": publisher.wait_for_replicas(order["count"], 60)})
        except Exception as e:
            say(raised(e))
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
