"""
What a handler passes over that goes forward: from when on, and what of it no replay brings back.

The watermark says too little: it passes changes that are stored, and a partition that stands, or is slow, has handled
none of them. So what is passed over begins at the first change that is stored and not handled, where there is one in a
partition that goes forward; else at the watermark.

Existing documents that are stored came from a snapshot, which counts them as delivered. They are in no stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp

from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.places import StreamPlace
    from mongo_celery.bridge.state.partitions import Image
    from mongo_celery.bridge.state.store import Store

_READ_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PassedOver:
    """
    What is passed over.

    Attributes:
        since: cluster time of the first change that is; None where nothing was ever read.
        documents: how many stored existing documents are, which no replay brings back.
    """

    since: Timestamp | None
    documents: int


def passed_over(
    store: Store, images: Iterable[Image], generation: int, to: StreamPlace, watermark: Timestamp | None
) -> PassedOver:
    """
    What some partitions would pass over on their way to a place.

    Args:
        images: those that go forward.
        generation: of their layout.
        watermark: cluster time at which their subscription stands.
    """
    times, documents = [watermark] if watermark is not None else [], 0
    until = str(to.token["_data"])
    for image in images:
        times += _heads(image)
        if image.spilled is None:
            continue
        partition_id = store.partitions.partition_id(image.subscription, generation, image.index)
        own = _own(image)
        with pymongo.timeout(_READ_SECONDS):
            first = store.spill.read(partition_id, own, until, limit=1, max_bytes=0)
            documents += store.spill.count_existing(partition_id, own, until)
        times += [time for each in first if (time := _time({"_data": each.data})) is not None]
    return PassedOver(min(times, default=None), documents)


def _heads(image: Image) -> Iterator[Timestamp]:
    """The time of the change at which a partition has halted, if it has."""
    time = _time(image.head["resumeToken"]) if image.head is not None else None
    if time is not None:
        yield time


def _own(image: Image) -> str:
    """Where a partition stands; what is handled counts as committed."""
    token = (image.handled or {}).get("resumeToken")
    return str(token["_data"]) if token else image.data


def _time(token: Mapping[str, Any]) -> Timestamp | None:
    return time_of_token(token, None)
