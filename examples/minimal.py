"""A trainer, a control plane and a replica in one process. Run: python examples/minimal.py"""

import torch

from weightplane.controlplane.server.thread import ControlPlaneThread
from weightplane.inference_agent.agent import InferenceAgent
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.trainer_agent.publisher import Publisher
from weightplane.trainer_agent.sources import ModuleSource

policy, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

with ControlPlaneThread() as plane:
    engine = TorchModuleEngine(served)
    agent = InferenceAgent(plane.address, "policy", "replica-a", engine).start()
    with Publisher(plane.address, "policy", ModuleSource(policy)) as publisher:
        publisher.wait_for_replicas(1)
        receipt = publisher.publish(step=1)
    with engine.forward() as tag:
        same = torch.equal(served(torch.ones(4)), policy(torch.ones(4)))
    agent.stop()

print(f"version {receipt.version} on {receipt.ready}: computed by version {tag.version}, same outputs: {same}")
