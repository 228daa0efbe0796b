"""What a trainer tells the coordinator of an update that is over: parity checks, with a repeat of its FinishUpdate."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from weightplane.v1 import update_pb2
from weightplane.v1 import weight_transfer_pb2 as wt

from .errors import CallRefused, RpcRefused, Unanswered
from .hold import Hold

__all__ = ["tell_parity"]


def tell_parity(hold: Hold, update_id: str, results: Sequence[update_pb2.ParityResult], deadline: float) -> None:
    """Checks of the version that ``update_id`` committed. Raises ``CallRefused``, ``CoordinatorUnreachable``."""
    update = hold.questions.outcome(update_id, deadline)
    request = wt.FinishUpdateRequest(
        request_id=uuid.uuid4().hex,
        group=hold.group,
        generation=hold.generation,
        update_id=update_id,
        epoch=update.epoch,
        rank=hold.settings.rank,
        parity=results,
    )
    try:
        hold.client.call("FinishUpdate", request, deadline)
    except RpcRefused as e:
        raise CallRefused(e.failure) from None
    except Unanswered as e:
        raise hold.client.unreachable(e) from None
