"""
What became of documents that are copied from one collection to another: pure checks over the events of both.

Each write of a document has a number, which grows with every write of its key, deletes included; a delete carries
none, and so counts as half a number after what it took away. Each check returns sentences about what is wrong; none
means good. `tests/unit/test_copies.py` gives each of them bad histories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_DELETED = 0.5

Numbers = Mapping[str, float]
"""By keys, the number of the newest write."""


@dataclass(frozen=True, slots=True)
class Copied:
    """
    A write to a copy, in the order of the oplog.

    Attributes:
        n: the number of what was copied; None for a delete, of which the rest is not known either.
        partition: of the change.
        seq: the number of the change in its partition.
        fence: the fencing token of the execution.
    """

    key: str
    n: int | None
    partition: int = 0
    seq: int = 0
    fence: int = 0


def went_back(history: Iterable[Copied], *, repeats: bool = True) -> list[str]:
    """
    P2, P3: a copy never goes back to what is older, and what was deleted does not come back.

    Args:
        repeats: whether a run that was cut may be repeated from its beginning under a larger token: then an older
            number is right where a change at or behind its place in the partition had its effect under a smaller one.
    """
    newest: dict[str, float] = {}
    ends: dict[int, dict[int, int]] = {}
    wrong = []
    for copied in history:
        before = newest.get(copied.key, 0.0)
        if copied.n is None:
            newest[copied.key] = before if before % 1 else before + _DELETED
            continue
        runs = ends.setdefault(copied.partition, {})
        repeated = any(fence < copied.fence and copied.seq <= last for fence, last in runs.items())
        if copied.n < before and not (repeats and repeated):
            wrong.append(f"{copied.key} went back from {before:g} to {copied.n}, by number {copied.seq}")
        newest[copied.key] = copied.n
        runs[copied.fence] = max(copied.seq, runs.get(copied.fence, 0))
    return wrong


def different(source: Mapping[str, bytes], copy: Mapping[str, bytes]) -> list[str]:
    """P1: in the end the copy equals the source."""
    return [
        f"{key} is {_brief(copy.get(key))} in the copy, {_brief(source.get(key))} in the source"
        for key in sorted(source.keys() | copy.keys())
        if source.get(key) != copy.get(key)
    ]


def undelivered(owed: Numbers, delivered: Numbers) -> list[str]:
    """P1: the newest state of every document that was there, or came, has reached the handler: its end too."""
    return [
        f"{key} was delivered as {delivered.get(key, 0):g}, {n:g} is owed"
        for key, n in owed.items()
        if delivered.get(key, 0.0) < n
    ]


def too_often(read: Mapping[str, int], faults: int) -> list[str]:
    """P6: a document of the snapshot starts once, and at most once more a fault."""
    most = Counter(dict(read)).most_common(1)
    return [f"{key} was delivered {count} times beside {faults} faults" for key, count in most if count > 1 + faults]


def _brief(document: bytes | None) -> str:
    return "not there" if document is None else repr(document[-40:])
