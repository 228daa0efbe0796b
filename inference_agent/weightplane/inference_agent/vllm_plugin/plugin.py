"""What vLLM loads by the entry point ``vllm.general_plugins``.

``register`` runs in vLLM's front end, its engine core and every worker, before the model is loaded. It only makes the
weight transfer backend ``weightplane`` known; nothing heavy is imported until vLLM creates that engine, which it does
where it was started with ``--weight-transfer-config '{"backend": "weightplane"}'``.
"""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

#: What ``--weight-transfer-config`` calls us.
BACKEND = "weightplane"

_MODULE, _CLASS = "weightplane.inference_agent.vllm_plugin.engine", "WeightplaneTransferEngine"


def register() -> None:
    """Make the backend known to this process's vLLM. Idempotent.

    A vLLM without weight transfer (before 0.20) is a ``RuntimeError`` that says so: vLLM logs it and does not start,
    which is better than an engine that silently never takes an update.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError as e:
        raise RuntimeError(
            f"weightplane's vLLM plug-in needs vLLM's weight transfer (vllm.distributed.weight_transfer), which this "
            f"vLLM does not have ({e}); leave weightplane out of VLLM_PLUGINS to run it without"
        ) from e
    known = getattr(Factory, "_registry", {})
    if BACKEND in known:
        return
    try:
        Factory.register_engine(BACKEND, _MODULE, _CLASS)
    except ValueError as e:  # two copies of us, or somebody else's engine of that name
        if "already registered" not in str(e):
            raise
