"""An engine factory for `weightplane inference-agent --engine my_module:make_engine`; run as a program, a checkpoint.

python examples/my_module.py model.safetensors    # writes one that fits the engine
"""

import sys

import torch

from weightplane.inference_agent.engines.torch_module import TorchModuleEngine


def make_engine() -> TorchModuleEngine:
    """A replica's engine: it serves whatever is published to it."""
    return TorchModuleEngine(torch.nn.Linear(4, 2))


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file(torch.nn.Linear(4, 2).state_dict(), sys.argv[1])
