"""
What this process remembers of the open transactions that a client has shown it.

The server says for how long no operation of a transaction ran *in all*, and not since when. But the time in which
operations ran moves with each of them: a transaction in which it has not moved between two looks has been silent from
one to the other.

By the client's identity: PyMongo's clients are equal where their servers are, whoever's credentials they have.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pymongo import AsyncMongoClient, MongoClient


@dataclass(slots=True)
class Watch:
    """
    What a client was shown; all times are on the monotonic clock.

    Attributes:
        looked: when somebody who waits has looked last.
        told: until when the answer to somebody who was refused holds, and the answer.
        still: by transaction, the time in which its operations ran, and since when it is known not to have moved.
    """

    looked: float = -math.inf
    told: tuple[float, list[Any]] = (-math.inf, [])
    still: dict[Hashable, tuple[int, float]] = field(default_factory=dict)

    def silences(
        self, found: Iterable[tuple[Hashable, int, bool]], began: float, ended: float
    ) -> dict[Hashable, float]:
        """
        Note a look; the seconds for which each transaction has been silent at least.

        Args:
            found: transactions, each with the time in which its operations ran, and whether one is running.
            began: when the server was asked.
            ended: when it had answered; what it said may be as old as the question.
        """
        still = {}
        for key, active, running in found:
            known = self.still.get(key)
            still[key] = (active, ended) if running or known is None or known[0] != active else known
        self.still = still
        return {key: max(0.0, began - since) for key, (_, since) in still.items()}


_watches: dict[int, Watch] = {}


def watch_of(client: MongoClient[Any] | AsyncMongoClient[Any]) -> Watch:
    """That of a client; it is forgotten with it."""
    known = _watches.get(id(client))
    if known is None:
        known = _watches.setdefault(id(client), Watch())
        weakref.finalize(client, _watches.pop, id(client), None).atexit = False
    return known
