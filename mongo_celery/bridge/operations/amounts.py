"""How many changes are stored of partitions, as far as they can be counted within a time."""

from __future__ import annotations

from collections.abc import Mapping

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.backlog import Backlog

GLANCE_SECONDS = 0.3
"""For what is read again and again: a page, `top`, probes, metrics."""

LOOK_SECONDS = 2.0
"""For a command of a person."""

Place = tuple[str, int]
"""Subscription and index of a partition."""


def count_stored(backlog: Backlog, marked: Mapping[Place, tuple[str, str, str]], seconds: float) -> dict[Place, int]:
    """
    Return how many changes are stored of some partitions; without those for which the time did not suffice.

    Args:
        marked: the `_id`s of the partitions, what is committed there, and the marks.
        seconds: which counting may take, of all of them.
    """
    counts: dict[Place, int] = {}
    try:
        with pymongo.timeout(seconds):
            for place, (partition_id, after, until) in marked.items():
                counts[place] = backlog.count(partition_id, after, until)
    except PyMongoError as error:
        if not error.timeout:
            raise
    return counts
