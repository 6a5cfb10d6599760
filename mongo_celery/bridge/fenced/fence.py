"""
The fencing token in targets: the guard refuses older tokens, and the stamp stores this one.

A target carries one stamp per subscription, under one field::

    _fence: {"shop/summarise": {g: 3, p: {"0": 812, "7": 990}, l: {i: 7, t: 990, d: 4711, o: ...}}}
             subscription key   |     |                         '- where the last write came from
                                |     '- newest token seen from each partition
                                '- term of the partitioning

Invariants, for one target and one key:

F1. A write is admitted if the stamp's ``g`` is older than mine, or equal with ``p.<mine>`` missing or not larger than
    my token (P3). Equal tokens pass: all writes of one handler carry the same token.
F2. An admitted write never lowers ``g``, or any ``p`` of that term (P4).
F3. Tokens of different partitions are never compared: each has its slot. A newer term drops the tokens of an older one,
    because its indexes name other partitions.
F4. Every write keeps the stamps of other keys, even if it replaces the rest of the target.
F5. If changes of one document may be in several partitions, ``l`` describes the last overwriting write: partition,
    token, document and place in the stream. An overwriting write is refused if ``l`` names another partition and a
    later change of the same document. Tokens from before a rewind of mine do not count, because their changes come
    again.

An operator update becomes two statements, because its operators cannot read the stored ``g``. One statement serves an
equal term (sets one slot), the other an older or missing stamp (replaces the map). After the first matches, the second
cannot. Pipelines and replacements need one statement, because an expression can read ``g``.

The module is pure: no client, no threads. Users' values never become expressions: ``$literal`` contains them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.errors import ConfigurationError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.writes import Addition, Body, Operators

FIELD = "_fence"
"""The field of a target that holds the stamps. Users' updates must not touch it."""

TOKEN_MAX = 2**63 - 1
"""Tokens and terms are signed 64-bit numbers in every store."""

HAND_MADE_TOKEN = -1
"""The token of a manually built change: smaller than all others, and no fence accepts it."""

HAND_MADE = (
    "A change from Change.build has no fence, so fenced writes refuse it. In a unit test use Change.build(..., "
    "fence=Fence(...)). To handle existing documents, run `celery -A APP changes snapshot start HANDLER`."
)
"""Why a manually built change writes nothing fenced, and the fix."""

_KEY = re.compile(r"[^.$\x00/][^.$\x00/]*/[^.$\x00/]+")


@dataclass(frozen=True, slots=True)
class Origin:
    """
    The change that caused a write, in a form that other partitions can compare (F5).

    Attributes:
        document: stable hash of the changed document, from 0 to 2^63 - 1.
        place: place in the stream, as bytes of fixed length that sort in stream order.
        since: earlier tokens do not count.
    """

    document: int
    place: bytes
    since: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """
    The right of one execution to write. It can be compared with those of other executions of the partition.

    Args:
        key: ``"<bridge>/<subscription>"``, without ``.`` and ``$``, since it names a field.
        partitioning: the term in which the partitioning took effect, from 0.
        index: the partition's index, from 0.
        token: the claim's fencing token, from 0 to 2^63 - 1.
        origin: the change, if other changes of its document may be in other partitions.

    Raises:
        ConfigurationError: a part is out of range, or the token comes from `build`.
    """

    key: str
    partitioning: int
    index: int
    token: int
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ConfigurationError(
                f"A fence's key must be 'BRIDGE/HANDLER' without '.' and '$', not {self.key!r}.",
                key=self.key,
            )
        if self.token == HAND_MADE_TOKEN:
            raise ConfigurationError(HAND_MADE, fence=self)
        for name in ("partitioning", "index", "token"):
            if not 0 <= getattr(self, name) <= TOKEN_MAX:
                raise ConfigurationError(f"A fence's {name} must be between 0 and 2^63 - 1.", fence=self)

    @property
    def path(self) -> str:
        """The field path of this subscription's stamp."""
        return f"{FIELD}.{self.key}"

    def admits(self, stamps: Mapping[str, Any] | None) -> bool:
        """
        Return True if this execution may write to a target with `stamps` (the value of ``_fence``, or None) (F1, F5).

        `guard` gives the same answer in the server. Use `admits` with a store that can check and write in one
        transaction.
        """
        return not self._is_stale(stamps) and not self._is_outdated(stamps)

    def _is_stale(self, stamps: Mapping[str, Any] | None) -> bool:
        entry = (stamps or {}).get(self.key)
        partitioning = entry.get("g") if isinstance(entry, Mapping) else None
        if not isinstance(partitioning, int) or partitioning != self.partitioning:
            return isinstance(partitioning, int) and partitioning > self.partitioning
        seen = _slots(entry).get(str(self.index))
        return isinstance(seen, int) and seen > self.token

    def _is_outdated(self, stamps: Mapping[str, Any] | None) -> bool:
        entry = (stamps or {}).get(self.key)
        last = entry.get("l") if isinstance(entry, Mapping) and entry.get("g") == self.partitioning else None
        if self.origin is None or not isinstance(last, Mapping):
            return False
        is_other = last["i"] != self.index and last["t"] >= self.origin.since
        return is_other and last["d"] == self.origin.document and bytes(last["o"]) > self.origin.place

    def stamp(self, stamps: Mapping[str, Any] | None) -> dict[str, Any]:
        """
        Return the value of ``_fence`` after this execution's write to a target with `stamps` (F2-F5).

        Raises:
            StaleFencingTokenError, OutdatedChangeError: `stamps` are newer. The new stamp would move the fence back.
        """
        self.demand(stamps)
        entry: Any = (stamps or {}).get(self.key)
        known = entry if isinstance(entry, Mapping) and entry.get("g") == self.partitioning else {}
        slots = {"p": {**_slots(known), str(self.index): self.token}}
        return {**(stamps or {}), self.key: {**known, "g": self.partitioning, **slots, **self._last()}}

    def demand(self, stamps: Mapping[str, Any] | None, **facts: Any) -> None:
        """
        Refuse to write to a target with newer stamps.

        Args:
            stamps: the value of ``_fence``, or None.
            facts: attributes for the error.

        Raises:
            StaleFencingTokenError: a newer execution of this partition has written.
            OutdatedChangeError: another partition has written for a later change of the same document.
        """
        if self._is_stale(stamps):
            raise self.stale(**facts)
        if self._is_outdated(stamps):
            raise OutdatedChangeError(key=self.key, partitioning=self.partitioning, index=self.index, **facts)

    def _last(self) -> dict[str, Any]:
        """Return the part of the stamp that names the origin of this write."""
        origin = self.origin
        if origin is None:
            return {}
        return {"l": {"i": self.index, "t": self.token, "d": origin.document, "o": origin.place}}

    def has_token(self, stamps: Mapping[str, Any] | None) -> bool:
        """Return True if `stamps` have exactly this token for this handler."""
        entry = (stamps or {}).get(self.key)
        if not isinstance(entry, Mapping) or entry.get("g") != self.partitioning:
            return False
        return bool(_slots(entry).get(str(self.index)) == self.token)

    def guard(self) -> dict[str, Any]:
        """Return the MongoDB filter that matches exactly if `admits` is true. It adds no field to an upsert."""
        return {"$or": [self._guard_same(), self._guard_older()]}

    def _guard_same(self) -> dict[str, Any]:
        """Return the part of the guard for a stamp of this term."""
        guard: dict[str, Any] = {
            f"{self.path}.g": self.partitioning,
            f"{self.path}.p.{self.index}": {"$not": {"$gt": self.token}},
        }
        if self.origin is not None:
            last, origin = f"{self.path}.l", self.origin
            is_mine = [{f"{last}.i": self.index}, {f"{last}.d": {"$ne": origin.document}}]
            is_over = [{f"{last}.t": {"$lt": origin.since}}, {f"{last}.o": {"$not": {"$gt": origin.place}}}]
            guard["$or"] = [*is_mine, *is_over]
        return guard

    def _guard_older(self) -> dict[str, Any]:
        """Return the part of the guard for an older or missing stamp: `$lt` would not match a missing field."""
        return {f"{self.path}.g": {"$not": {"$gte": self.partitioning}}}

    def expression(self) -> dict[str, Any]:
        """Return the new value of ``_fence`` as an aggregation expression over the stored document (F2-F5)."""
        mine = {str(self.index): {"$literal": self.token}}
        slots = {"p": {"$mergeObjects": [f"${self.path}.p", mine]}}
        merged = {"$mergeObjects": [f"${self.path}", slots, {"$literal": self._last()}]}
        same = {"$eq": [f"${self.path}.g", {"$literal": self.partitioning}]}
        entry = {"$cond": [same, merged, {"$literal": self._fresh()}]}
        return {"$mergeObjects": [f"${FIELD}", {self.key: entry}]}

    def list_guards(self, body: Body) -> list[tuple[dict[str, Any], Addition]]:
        """Return pairs of guard and stamp, to try in order. At most one matches."""
        if not isinstance(body, Operators):
            return [(self.guard(), Addition(FIELD, {}, self.expression()))]
        slot = {f"{self.path}.p.{self.index}": self.token}
        slot |= {f"{self.path}.{name}": value for name, value in self._last().items()}
        entry = {self.path: self._fresh()}
        return [
            (self._guard_same(), Addition(FIELD, {"$set": slot}, self.expression())),
            (self._guard_older(), Addition(FIELD, {"$set": entry}, self.expression())),
        ]

    def _fresh(self) -> dict[str, Any]:
        """Return the stamp for a target without a stamp of this term."""
        return {"g": self.partitioning, "p": {str(self.index): self.token}, **self._last()}

    def stale(self, **facts: Any) -> StaleFencingTokenError:
        """Return the error for a target with a newer stamp."""
        return StaleFencingTokenError(
            key=self.key, partitioning=self.partitioning, index=self.index, token=self.token, **facts
        )


def merge(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge two ``_fence`` values: for each key, keep the larger term, the later place and the larger tokens."""
    merged = dict(first or {})
    for key, entry in (second or {}).items():
        other = merged.get(key)
        if other is None or entry["g"] > other["g"]:
            merged[key] = entry
        elif entry["g"] == other["g"]:
            slots = _slots(other)
            newest = {i: max(token, slots.get(i, token)) for i, token in _slots(entry).items()}
            last = max((each["l"] for each in (other, entry) if "l" in each), key=_place, default=None)
            merged[key] = {"g": entry["g"], "p": {**slots, **newest}, **({"l": last} if last else {})}
    return merged


def _place(last: Mapping[str, Any]) -> bytes:
    return bytes(last["o"])


def _slots(entry: Any) -> Mapping[str, Any]:
    slots = entry.get("p") if isinstance(entry, Mapping) else None
    return slots if isinstance(slots, Mapping) else {}


def refuse_stamps(body: Body) -> Body:
    """
    Return the body unchanged if it does not write to the stamps.

    Raises:
        ConfigurationError: it writes to ``_fence``.
    """
    named = body.find_name(FIELD)
    if named is not None:
        raise ConfigurationError(
            f"The field {named!r} is reserved for fencing tokens. Leave it out of the write.",
            field=named,
        )
    return body
