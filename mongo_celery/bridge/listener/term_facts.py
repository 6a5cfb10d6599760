"""The facts about a subscription that are fixed in a term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bson import Timestamp

from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.source import Selector
from mongo_celery.bridge.window import Mark


@dataclass(frozen=True, slots=True)
class TermFacts:
    """
    The facts about a subscription that are fixed in a term.

    Attributes:
        undeliverable: partitions of stored undeliverable changes that are read again, by place.
        token_seconds: seconds that a worker waits between two messages under their rate limit. 0 without one.
    """

    handler: Handler
    selector: Selector
    partitioner: Partitioner
    layout: Layout
    version: int
    start: Timestamp
    watermark: Mark | None
    undeliverable: Mapping[str, int] = field(default_factory=dict)
    token_seconds: float = 0.0
