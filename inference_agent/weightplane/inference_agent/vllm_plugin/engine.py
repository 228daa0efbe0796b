"""vLLM's weight transfer backend ``weightplane``: created by every vLLM worker once its model is loaded.

vLLM's four phases map so: *init* attaches the worker to an agent; *start* and *finish* do nothing here; *update* does
one whole thing, so that no forward pass, pause or failure can come in between.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm import config as vllm_configs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from . import compat
from .session import WorkerSession
from .sleeping import listen, sleep_refusal
from .together import Step, stand_in
from .wire import PROTOCOL, Hello

__all__ = ["InitInfo", "UpdateInfo", "WeightplaneTransferEngine"]

log = logging.getLogger("weightplane.vllm")

#: What vLLM calls of a worker for an update, besides the attaching.
_CALLS = (
    "shutdown_weight_transfer_engine",
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
_LEAVES_S = 1.0  # that an agent which just ended has until its session is over here


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Attach to the agent that listens at ``socket`` and knows ``token``. ``max_host_bytes``: of staging, 0 = any.
    ``frozen_draft``: a draft model is to stay as it is."""

    socket: str = ""
    token: str = ""
    max_host_bytes: int = 0
    frozen_draft: bool = False


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
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # what vLLM hands over differs by release: the base class's own names say which is which
        super().__init__(*args, **kwargs)
        current = getattr(vllm_configs, "get_current_vllm_config_or_none", lambda: None)()
        found = compat.handed(inspect.signature(WeightTransferEngine.__init__), args, kwargs, current)
        for name in ("vllm_config", "model_config", "device", "model"):
            if not hasattr(self, name):
                setattr(self, name, getattr(found, name))
        self._parallel = found.parallel_config
        self._session: WorkerSession | None = None
        self._refusal = ""
        if (of := compat.worker_class(self._parallel)) is not None:
            _stand_in(of)
        version = str(vllm.__version__)
        if text := compat.note(version):
            log.warning("weightplane: %s", text)
        if absent := compat.lacks():  # it serves what it started with; who wants to attach is told
            self._refusal = f"weightplane: vLLM {version} lacks what a load needs: {', '.join(absent)}"
            log.error("%s", self._refusal)
            return
        from .refusing import RefusingReplica

        self.worker = RefusingReplica(
            self._target,
            self.device,
            quantized=getattr(self.vllm_config, "quant_config", None) is not None,
            refusals=compat.refusals(self.vllm_config, self.device.type),
        )
        self.worker.attended = lambda: self._session is not None and not self._session.over

    def _target(self) -> tuple[torch.nn.Module, Any]:
        if self.model is None:
            raise RuntimeError(f"vLLM {vllm.__version__} has not handed its model over yet")
        return self.model, self.model_config

    def may_attach(self, init_info: InitInfo) -> None:
        """Raises if this vLLM takes no agent, or if another one speaks for this worker and lives. Changes nothing."""
        if not init_info.socket:
            raise ValueError("init_info.socket is needed: weightplane inference-agent --engine vllm sends it")
        if self._refusal:
            raise RuntimeError(self._refusal)
        had = self._session
        if had is not None and had.path != init_info.socket and not had.ends_within(_LEAVES_S):
            raise RuntimeError(
                f"weightplane: another agent speaks for this vLLM already (its socket is {had.path}): "
                "one vLLM is one replica; stop that agent first, or name another vLLM (--engine-option url=…)"
            )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Attach to an agent; an earlier session of its own is let go. Raises if it cannot be reached, or as
        ``may_attach`` does: the caller is told."""
        self.may_attach(init_info)
        if self._session is not None:
            self._session.stop()
        self.worker.limit_host(init_info.max_host_bytes or None)
        self.worker.declare_frozen(init_info.frozen_draft)
        self._session = WorkerSession(self.worker, init_info.socket, self._hello(init_info.token)).start()

    def _hello(self, token: str) -> Hello:
        parallel = self._parallel
        # data-parallel instances that one front end calls together are workers of one replica
        instances = int(getattr(parallel, "data_parallel_size_local", 1) or 1)
        instance = int(getattr(parallel, "data_parallel_rank_local", 0) or 0) if instances > 1 else 0
        cuda = self.device.type == "cuda"
        uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")) if cuda else ""
        return Hello(
            protocol=PROTOCOL,
            token=token,
            rank=int(parallel.rank) + int(parallel.world_size) * instance,
            world=int(parallel.world_size) * instances,
            life=self.worker.life,
            pid=os.getpid(),
            device=self.device.type,
            uuid=uuid,
            vllm=str(vllm.__version__),
            model=str(self.model_config.model),
            staging_refusal=self.worker.staging_refusal() if self.model is not None else "",
            sleep_refusal=sleep_refusal(self.vllm_config, self.device.type),
            state=self.worker.state,
            draft=compat.draft(self.vllm_config),
        )

    def start_weight_update(self) -> None:
        """Nothing: the model leaves its kernel layout inside one ``update_weights`` only."""

    def finish_weight_update(self) -> None:
        """Nothing, and never raises: vLLM would count the update as under way for ever."""

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
        """Do one thing. How it went is told to the agent by the session: a load that failed does not raise here.

        ``load_weights``: the model's own method, by which older releases hand the model over.
        """
        if self.model is None:
            self.model = getattr(load_weights, "__self__", None)
            if not isinstance(self.model, torch.nn.Module):
                self.model = None
                raise RuntimeError(f"weightplane: vLLM {vllm.__version__} hands over no model, only {load_weights!r}")
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

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Not ours: some releases of vLLM demand it of an engine."""
        raise NotImplementedError("weightplane's trainers publish: weightplane.trainer_agent.Publisher")


def _stand_in(worker_class: type) -> None:
    """See ``together`` and ``sleeping``. vLLM's own refusals are among them: of an update begun twice, or never."""

    def call_it(_: Any, call: Step, *__: Any, **___: Any) -> Sequence[Step]:
        return (call,)

    def attach(vllm_worker: Any, call: Step, init_info: dict[str, Any]) -> Sequence[Step]:
        engine = getattr(vllm_worker, "weight_transfer_engine", None)
        if not isinstance(engine, WeightplaneTransferEngine):
            return (call,)
        return (lambda: engine.may_attach(engine.parse_init_info(init_info)), call)

    stand_in(worker_class, "init_weight_transfer_engine", attach)
    for name in _CALLS:
        stand_in(worker_class, name, call_it)
    listen(worker_class, _witness)


def _witness(vllm_worker: Any) -> Any:
    """Our worker inside one of vLLM's, if it has one."""
    engine = getattr(vllm_worker, "weight_transfer_engine", None)
    return getattr(engine, "worker", None) if isinstance(engine, WeightplaneTransferEngine) else None
