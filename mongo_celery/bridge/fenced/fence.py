"""
The fencing token as targets see it: the guard that refuses older ones, the stamp that remembers mine.

A target carries one stamp per subscription, under one field::

    _fence: {"shop/summarise": {g: 3, p: {"0": 812, "7": 990}, l: {i: 7, t: 990, d: 4711, o: ...}}}
             subscription key   |     |                         '- where the last write came from
                                |     '- newest token seen from each partition
                                '- generation of the partition layout

Invariants, for one target and one key:

F1. A write is admitted if the stamp's ``g`` is older than mine, or equal with ``p.<mine>`` missing or not
    larger than my token (P3). Equal passes: the second write of one handler carries the token of the first.
F2. An admitted write leaves ``g`` and every ``p`` of that generation not smaller than it found them (P4).
F3. Tokens of different partitions are never compared: each has its slot. Tokens of an older generation are
    dropped with it, since its indexes name other partitions.
F4. Stamps of other keys are kept, whatever the write does to the rest of the target.
F5. Where changes of one document may be in several partitions, ``l`` says where the last overwriting write came from:
    partition, token, document and place in the stream. A write that overwrites is refused where that was another
    partition, and a later change of the same document. Tokens from before a rewind of mine do not count: what they
    stand for comes once more.

Why an operator update becomes two statements: its operators cannot look at the stored ``g``, so one statement
serves an equal generation (sets one slot) and one serves an older or no stamp (replaces the map). After the
first has matched, the second cannot. Pipelines and replacements are one statement, for an expression can
look.

Pure: no client, no threads. Users' values never become expressions: they travel in ``$literal``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mongo_celery.errors import ConfigurationError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.writes import Addition, Body, Operators

FIELD = "_fence"
"""The field of a target that holds the stamps; users' updates may not touch it."""

TOKEN_MAX = 2**63 - 1
"""Tokens and generations are signed 64-bit numbers in every store."""

HAND_MADE_TOKEN = -1
"""What a change that was built by hand has for a token: smaller than all there are, and no fence takes it."""

HAND_MADE = (
    "A change that was built by hand has no fence that compares with those of live changes: deliver documents that "
    "exist by `celery -A APP changes snapshot start HANDLER`; a unit test gives a fence, Change.build(..., "
    "fence=Fence(...))."
)
"""Why a change that was built by hand writes nothing fenced, and what to do."""

_KEY = re.compile(r"[^.$\x00/][^.$\x00/]*/[^.$\x00/]+")


@dataclass(frozen=True, slots=True)
class Origin:
    """
    The change that a write is for, as changes of its document in other partitions compare with it (F5).

    Attributes:
        document: stable hash of the changed document, from 0 to 2^63 - 1.
        place: in the stream. Bytes, as many for each change, which compare in its order.
        since: earlier tokens do not count.
    """

    document: int
    place: bytes
    since: int = 0


@dataclass(frozen=True, slots=True)
class Fence:
    """
    The right of one execution to write, as an older or newer one of the same partition compares with it.

    Args:
        key: ``"<bridge>/<subscription>"``, without ``.`` and ``$``, since it names a field.
        generation: the partition layout's number, from 0.
        index: the partition's index, from 0.
        token: the claim's fencing token, from 0 to 2^63 - 1.
        origin: the change, where others of its document may be in other partitions.

    Raises:
        ConfigurationError: a part is out of its range, or the token is that of a change built by hand.
    """

    key: str
    generation: int
    index: int
    token: int
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ConfigurationError(
                f"A fence's key reads <bridge>/<subscription> without '.' and '$', not {self.key!r}.",
                key=self.key,
            )
        if self.token == HAND_MADE_TOKEN:
            raise ConfigurationError(HAND_MADE, fence=self)
        for name in ("generation", "index", "token"):
            if not 0 <= getattr(self, name) <= TOKEN_MAX:
                raise ConfigurationError(f"A fence's {name} lies between 0 and 2^63 - 1.", fence=self)

    @property
    def path(self) -> str:
        """The field path of this subscription's stamp."""
        return f"{FIELD}.{self.key}"

    def admits(self, stamps: Mapping[str, Any] | None) -> bool:
        """
        Return True if a target that carries `stamps` (the value of ``_fence``, or None) may be written (F1, F5).

        The same verdict as `guard` gives in the server: use it with a store that can check and write in one
        transaction.
        """
        return not self._is_stale(stamps) and not self._is_outdated(stamps)

    def _is_stale(self, stamps: Mapping[str, Any] | None) -> bool:
        entry = (stamps or {}).get(self.key)
        generation = entry.get("g") if isinstance(entry, Mapping) else None
        if not isinstance(generation, int) or generation != self.generation:
            return isinstance(generation, int) and generation > self.generation
        seen = _slots(entry).get(str(self.index))
        return isinstance(seen, int) and seen > self.token

    def _is_outdated(self, stamps: Mapping[str, Any] | None) -> bool:
        entry = (stamps or {}).get(self.key)
        last = entry.get("l") if isinstance(entry, Mapping) and entry.get("g") == self.generation else None
        if self.origin is None or not isinstance(last, Mapping):
            return False
        is_other = last["i"] != self.index and last["t"] >= self.origin.since
        return is_other and last["d"] == self.origin.document and bytes(last["o"]) > self.origin.place

    def stamp(self, stamps: Mapping[str, Any] | None) -> dict[str, Any]:
        """
        The value of ``_fence`` after this execution's write to a target that carried `stamps` (F2-F5).

        Raises:
            StaleFencingTokenError, OutdatedChangeError: `stamps` are newer. Stamping over them would take the fence
                back.
        """
        self.demand(stamps)
        entry: Any = (stamps or {}).get(self.key)
        known = entry if isinstance(entry, Mapping) and entry.get("g") == self.generation else {}
        slots = {"p": {**_slots(known), str(self.index): self.token}}
        return {**(stamps or {}), self.key: {**known, "g": self.generation, **slots, **self._last()}}

    def demand(self, stamps: Mapping[str, Any] | None, **facts: Any) -> None:
        """
        Refuse to write to a target that carries newer stamps.

        Args:
            stamps: the value of ``_fence``, or None.
            facts: become attributes of the error.

        Raises:
            StaleFencingTokenError: a newer execution of this partition has written.
            OutdatedChangeError: another partition has written for a later change of the same document.
        """
        if self._is_stale(stamps):
            raise self.stale(**facts)
        if self._is_outdated(stamps):
            raise OutdatedChangeError(key=self.key, generation=self.generation, index=self.index, **facts)

    def _last(self) -> dict[str, Any]:
        """The part of the stamp that says where this write comes from."""
        origin = self.origin
        if origin is None:
            return {}
        return {"l": {"i": self.index, "t": self.token, "d": origin.document, "o": origin.place}}

    def has_token(self, stamps: Mapping[str, Any] | None) -> bool:
        """Return True if `stamps` hold exactly my token in my slot."""
        entry = (stamps or {}).get(self.key)
        if not isinstance(entry, Mapping) or entry.get("g") != self.generation:
            return False
        return bool(_slots(entry).get(str(self.index)) == self.token)

    def guard(self) -> dict[str, Any]:
        """The filter that MongoDB matches exactly where `admits` holds. It seeds no field of an upsert."""
        return {"$or": [self._guard_same(), self._guard_older()]}

    def _guard_same(self) -> dict[str, Any]:
        """The part of the guard for a stamp of my own generation."""
        guard: dict[str, Any] = {
            f"{self.path}.g": self.generation,
            f"{self.path}.p.{self.index}": {"$not": {"$gt": self.token}},
        }
        if self.origin is not None:
            last, origin = f"{self.path}.l", self.origin
            is_mine = [{f"{last}.i": self.index}, {f"{last}.d": {"$ne": origin.document}}]
            is_over = [{f"{last}.t": {"$lt": origin.since}}, {f"{last}.o": {"$not": {"$gt": origin.place}}}]
            guard["$or"] = [*is_mine, *is_over]
        return guard

    def _guard_older(self) -> dict[str, Any]:
        """The part of the guard for an older stamp, or none: `$lt` would not match a missing field."""
        return {f"{self.path}.g": {"$not": {"$gte": self.generation}}}

    def expression(self) -> dict[str, Any]:
        """The new value of ``_fence`` as an aggregation expression over the stored document (F2-F5)."""
        mine = {str(self.index): {"$literal": self.token}}
        slots = {"p": {"$mergeObjects": [f"${self.path}.p", mine]}}
        merged = {"$mergeObjects": [f"${self.path}", slots, {"$literal": self._last()}]}
        same = {"$eq": [f"${self.path}.g", {"$literal": self.generation}]}
        entry = {"$cond": [same, merged, {"$literal": self._fresh()}]}
        return {"$mergeObjects": [f"${FIELD}", {self.key: entry}]}

    def list_guards(self, body: Body) -> list[tuple[dict[str, Any], Addition]]:
        """Pairs of guard and stamp, to be tried in order. At most one matches."""
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
        """The stamp in a target that has none of this generation."""
        return {"g": self.generation, "p": {str(self.index): self.token}, **self._last()}

    def stale(self, **facts: Any) -> StaleFencingTokenError:
        """The error for a target that has been stamped newer."""
        return StaleFencingTokenError(
            key=self.key, generation=self.generation, index=self.index, token=self.token, **facts
        )


def merge(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """The newest of two values of ``_fence``: the larger generation of each key, its later place, its larger tokens."""
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
    The same body, as far as the user leaves the stamps alone.

    Raises:
        ConfigurationError: it writes to ``_fence``.
    """
    named = body.find_name(FIELD)
    if named is not None:
        raise ConfigurationError(
            f"{named!r} belongs to the fence and is kept by it: leave it out of what you write.",
            field=named,
        )
    return body
