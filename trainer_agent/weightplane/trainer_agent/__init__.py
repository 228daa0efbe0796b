"""The trainer's side: Publisher and the sources of tensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import OutcomeUnknown as OutcomeUnknown
    from .errors import PublishError as PublishError
    from .errors import TrainerFenced as TrainerFenced
    from .errors import TrainerHeld as TrainerHeld
    from .errors import UpdateFailed as UpdateFailed
    from .naming import merge_manifests as merge_manifests
    from .options import FailurePolicy as FailurePolicy
    from .publisher import Publisher as Publisher
    from .publisher import PublishHandle as PublishHandle
    from .receipt import PublishReceipt as PublishReceipt
    from .sources import ModuleSource as ModuleSource
    from .sources import Source as Source
    from .sources import StateDictSource as StateDictSource
    from .sources_dtensor import DTensorSource as DTensorSource
    from .sources_gather import GatherSource as GatherSource
    from .sources_safetensors import SafetensorsSource as SafetensorsSource

#: Where each name lives: imported when it is first used, so that the package itself costs no torch.
_HOMES = {
    "DTensorSource": "sources_dtensor",
    "FailurePolicy": "options",
    "GatherSource": "sources_gather",
    "ModuleSource": "sources",
    "OutcomeUnknown": "errors",
    "PublishError": "errors",
    "PublishHandle": "publisher",
    "PublishReceipt": "receipt",
    "Publisher": "publisher",
    "SafetensorsSource": "sources_safetensors",
    "Source": "sources",
    "StateDictSource": "sources",
    "TrainerFenced": "errors",
    "TrainerHeld": "errors",
    "UpdateFailed": "errors",
    "merge_manifests": "naming",
}
__all__ = [
    "DTensorSource",
    "FailurePolicy",
    "GatherSource",
    "ModuleSource",
    "OutcomeUnknown",
    "PublishError",
    "PublishHandle",
    "PublishReceipt",
    "Publisher",
    "SafetensorsSource",
    "Source",
    "StateDictSource",
    "TrainerFenced",
    "TrainerHeld",
    "UpdateFailed",
    "merge_manifests",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
