"""
The reason why a change is not given to its handler: it was refused before dispatch.

A change is refused by the listener that reads it, for one subscription, when something between stream and dispatch
fails on it: the event could not be read as asked for, it is unknown if the handler gets it, or it has no
partition key. It keeps its place in the order of a partition, travels with its reason, and a worker applies the
failure policy to it under a claim of its own, without calling the handler.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from mongo_celery.mongo.error_text import storable

_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    The reason for which one change is refused. Make it with `because`.

    Attributes:
        reason: a sentence for people, bounded and storable.
        halts: whether the partition halts under every failure policy, since the cause is the bridge's configuration
            and not the change: to move to the dead letters or to skip would drop every change that the
            configuration spoils.
        lasts: whether the event was read with less than was asked for: its bytes are never judged again.
    """

    reason: str
    halts: bool = False
    lasts: bool = False

    @classmethod
    def because(cls, reason: str, *, halts: bool = False, lasts: bool = False) -> Refusal:
        """A refusal with as much of a reason as can be stored."""
        return cls(storable(reason[:_CHARS]), halts, lasts)
