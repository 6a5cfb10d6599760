"""The opposite of a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import Transaction


def opposite(done: Transaction) -> dict[str, Any]:
    """What a transaction that takes another back has beside its id and state."""
    if "participants" in done.document:
        turned = [
            Part(each.cluster, each.namespace, each.id, each.revert, each.apply, each.revert_require, each.require)
            for each in reversed(done.parts)
        ]
        return {"participants": [part.to_document() for part in turned]}
    document = done.document
    return {"source": document["destination"], "destination": document["source"], "value": document["value"]}


def compensation_ids(transaction_id: Any) -> Iterator[dict[str, Any]]:
    """The ids of its compensations, in the order in which they are tried; always the same ones."""
    yield {"compensates": transaction_id}
    for attempt in count(2):
        yield {"compensates": transaction_id, "attempt": attempt}
