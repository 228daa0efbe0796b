"""vLLM's weight transfer backend ``weightplane``: created by every vLLM worker once its model is loaded.

vLLM's four phases map so: *init* attaches the worker to an agent; *start* and *finish* do nothing here; *update* does
one whole thing, so that no forward pass, pause or failure can come in between.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from .session import WorkerSession
from .wire import PROTOCOL, Hello
from .worker import WorkerReplica

__all__ = ["InitInfo", "UpdateInfo", "WeightplaneTransferEngine"]

log = logging.getLogger("weightplane.vllm")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Attach to the agent that listens at ``socket`` and knows ``token``. ``max_host_bytes``: of staging, 0 = any."""

    socket: str = ""
    token: str = ""
    max_host_bytes: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``do``: "survey" a manifest, "apply" a staged update, or "stream" one in place as it comes; each names which."""

    do: str = ""
    manifest_id: str = ""
    update_id: str = ""


class WeightplaneTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """See the module text. Its methods are called on the worker's main thread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: WorkerSession | None = None
        quantized = getattr(vllm_config, "quant_config", None) is not None
        self.worker = WorkerReplica(lambda: (self.model, self.model_config), device, quantized=quantized)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Attach to an agent; an earlier one is let go. Raises if it cannot be reached: the caller is told."""
        if not init_info.socket:
            raise ValueError("init_info.socket is needed: weightplane inference-agent --engine vllm sends it")
        if self._session is not None:
            self._session.stop()
        self.worker.limit_host(init_info.max_host_bytes or None)
        self._session = WorkerSession(self.worker, init_info.socket, self._hello(init_info.token)).start()

    def _hello(self, token: str) -> Hello:
        parallel = self.vllm_config.parallel_config
        cuda = self.device.type == "cuda"
        uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")) if cuda else ""
        return Hello(
            protocol=PROTOCOL,
            token=token,
            rank=int(parallel.rank),
            world=int(parallel.world_size),
            life=self.worker.life,
            pid=os.getpid(),
            device=self.device.type,
            uuid=uuid,
            vllm=str(vllm.__version__),
            model=str(self.model_config.model),
            staging_refusal=self.worker.staging_refusal(),
            state=self.worker.state,
        )

    def start_weight_update(self) -> None:
        """Nothing: the model leaves its kernel layout inside one ``update_weights`` only."""

    def finish_weight_update(self) -> None:
        """Nothing, and never raises: vLLM would count the update as under way for ever."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Do one thing. How it went is told to the agent by the session: a load that failed does not raise here."""
        if update_info.do == "survey":
            self.worker.survey(update_info.manifest_id)
        elif update_info.do == "apply":
            self.worker.apply(update_info.update_id)
        elif update_info.do == "stream":
            self.worker.stream(update_info.update_id)
        else:
            raise ValueError(
                f"weightplane's backend knows no {update_info.do!r}: updates are driven by weightplane's agent, not by "
                f"vLLM's own weight-sync clients"
            )

    def shutdown(self) -> None:
        """Let the agent go. The worker keeps what it holds."""
        if self._session is not None:
            self._session.stop()
            self._session = None
