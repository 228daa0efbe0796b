"""An engine that generates over HTTP, where routers find it (docs/routing.md).

weightplane inference-agent -g policy --replica-id a --engine my_generator:make_engine --generate 127.0.0.1:8001
"""

from types import SimpleNamespace

import torch

from weightplane.inference_agent.engines.base import RequestAborted
from weightplane.inference_agent.engines.torch_module import TorchModuleEngine
from weightplane.inference_agent.serve import Served


def make_engine() -> Served:
    """The engine, and a function that generates with its module: here the likelier of two tokens."""
    model = torch.nn.Linear(4, 2)

    def generate(prompts, *, max_new_tokens, temperature, seed, gate):
        outputs = [SimpleNamespace(tokens=[], logprobs=[], tags=[], finished=False) for _ in prompts]
        for out in outputs:
            try:
                for _ in range(max_new_tokens):
                    with gate() as tag, torch.no_grad():  # one forward pass reads one version, and says which
                        logprob, token = model(torch.ones(4)).log_softmax(0).max(0)
                    out.tokens.append(int(token))
                    out.logprobs.append(float(logprob))
                    out.tags.append(tag)
                out.finished = True
            except RequestAborted:  # an update, or the end of the process: give what there is
                break
        return outputs

    return Served(TorchModuleEngine(model), generate)
