"""
The fencing token as targets see it: the guard that refuses older ones, the stamp that remembers mine.

A target carries one stamp per subscription, under one field::

    _fence: {"shop/summarise": {g: 3, p: {"0": 812, "7": 990}}}
             subscription key   |     '- newest token seen from each partition
                                '- generation of the partition layout

Invariants, for one target and one key:

F1. A write is admitted if the stamp's ``g`` is older than mine, or equal with ``p.<mine>`` missing or not
    larger than my token (P3). Equal passes: the second write of one handler carries the token of the first.
F2. An admitted write leaves ``g`` and every ``p`` of that generation not smaller than it found them (P4).
F3. Tokens of different partitions are never compared: each has its slot. Tokens of an older generation are
    dropped with it, since its indexes name other partitions.
F4. Stamps of other keys are kept, whatever the write does to the rest of the target.

Why an operator update becomes two statements: its operators cannot look at the stored ``g``, so one statement
serves an equal generation (sets one slot) and one serves an older or no stamp (replaces the map). After the
first has matched, the second cannot. Pipelines and replacements are one statement, for an expression can
look.

Pure: no client, no threads. Users' values never become expressions: they travel in ``$literal``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mongo_celery.errors import ConfigurationError, StaleFencingTokenError
from mongo_celery.mongo.identity import NO_ID, demanded_id

FIELD = "_fence"
"""The field of a target that holds the stamps; users' updates may not touch it."""

TOKEN_MAX = 2**63 - 1
"""Tokens and generations are signed 64-bit numbers in every store."""

_KEY = re.compile(r"[^.$\x00/][^.$\x00/]*/[^.$\x00/]+")


@dataclass(frozen=True, slots=True)
class Fence:
    """
    The right of one execution to write, as an older or newer one of the same partition compares with it.

    Args:
        key: ``"<bridge>/<subscription>"``, without ``.`` and ``$``, since it names a field.
        generation: the partition layout's number, from 0.
        index: the partition's index, from 0.
        token: the claim's fencing token, from 0 to 2^63 - 1.

    Raises:
        ConfigurationError: a part is out of its range.
    """

    key: str
    generation: int
    index: int
    token: int

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ConfigurationError(
                f"A fence's key reads <bridge>/<subscription> without '.' and '$', not {self.key!r}.",
                key=self.key,
            )
        for name in ("generation", "index", "token"):
            if not 0 <= getattr(self, name) <= TOKEN_MAX:
                raise ConfigurationError(f"A fence's {name} lies between 0 and 2^63 - 1.", fence=self)

    @property
    def path(self) -> str:
        """The field path of this subscription's stamp."""
        return f"{FIELD}.{self.key}"

    def admits(self, stamps: Mapping[str, Any] | None) -> bool:
        """
        Whether a target that carries `stamps` (the value of ``_fence``, or None) may be written (F1).

        The same verdict as `guard` gives in the server: use it with a store that can check and write in one
        transaction.
        """
        entry = (stamps or {}).get(self.key)
        generation = entry.get("g") if isinstance(entry, Mapping) else None
        if not isinstance(generation, int) or generation != self.generation:
            return not isinstance(generation, int) or generation < self.generation
        seen = _slots(entry).get(str(self.index))
        return not isinstance(seen, int) or seen <= self.token

    def stamp(self, stamps: Mapping[str, Any] | None) -> dict[str, Any]:
        """
        The value of ``_fence`` after this execution's write to a target that carried `stamps` (F2-F4).

        Raises:
            StaleFencingTokenError: `stamps` are newer; stamping over them would take the fence back.
        """
        if not self.admits(stamps):
            raise self.stale()
        entry = (stamps or {}).get(self.key)
        same = isinstance(entry, Mapping) and entry.get("g") == self.generation
        slots = {**(_slots(entry) if same else {}), str(self.index): self.token}
        return {**(stamps or {}), self.key: {"g": self.generation, "p": slots}}

    def bears(self, stamps: Mapping[str, Any] | None) -> bool:
        """Whether `stamps` hold exactly my token in my slot."""
        entry = (stamps or {}).get(self.key)
        if not isinstance(entry, Mapping) or entry.get("g") != self.generation:
            return False
        return bool(_slots(entry).get(str(self.index)) == self.token)

    def guard(self) -> dict[str, Any]:
        """The filter that MongoDB matches exactly where `admits` holds. It seeds no field of an upsert."""
        return {"$or": [self.guard_same(), self.guard_older()]}

    def guard_same(self) -> dict[str, Any]:
        """The part of the guard for a stamp of my own generation."""
        return {
            f"{self.path}.g": self.generation,
            f"{self.path}.p.{self.index}": {"$not": {"$gt": self.token}},
        }

    def guard_older(self) -> dict[str, Any]:
        """The part of the guard for an older stamp, or none: `$lt` would not match a missing field."""
        return {f"{self.path}.g": {"$not": {"$gte": self.generation}}}

    def expression(self) -> dict[str, Any]:
        """The new value of ``_fence`` as an aggregation expression over the stored document (F2-F4)."""
        mine = {str(self.index): {"$literal": self.token}}
        fresh = {"g": self.generation, "p": {str(self.index): self.token}}
        merged = {
            "g": {"$literal": self.generation},
            "p": {"$mergeObjects": [f"${self.path}.p", mine]},
        }
        same = {"$eq": [f"${self.path}.g", {"$literal": self.generation}]}
        entry = {"$cond": [same, merged, {"$literal": fresh}]}
        return {"$mergeObjects": [f"${FIELD}", {self.key: entry}]}

    def stale(self, **facts: Any) -> StaleFencingTokenError:
        """The error for a target that has been stamped newer."""
        return StaleFencingTokenError(
            key=self.key, generation=self.generation, index=self.index, token=self.token, **facts
        )


def merge(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> dict[str, Any]:
    """The newest of two values of ``_fence``: per key the larger generation, per slot the larger token."""
    merged = dict(first or {})
    for key, entry in (second or {}).items():
        other = merged.get(key)
        if other is None or entry["g"] > other["g"]:
            merged[key] = entry
        elif entry["g"] == other["g"]:
            slots = _slots(other)
            newest = {i: max(token, slots.get(i, token)) for i, token in _slots(entry).items()}
            merged[key] = {"g": entry["g"], "p": {**slots, **newest}}
    return merged


def _slots(entry: Any) -> Mapping[str, Any]:
    slots = entry.get("p") if isinstance(entry, Mapping) else None
    return slots if isinstance(slots, Mapping) else {}


# ---------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class Target:
    """One document by its `_id`, and what else the user demands of it."""

    id: Any
    rest: Mapping[str, Any]

    def where(self, condition: Mapping[str, Any]) -> dict[str, Any]:
        """
        A filter for this document, the user's conditions and `condition`.

        The user's conditions stay at the top, where the positional operator finds them.
        """
        return {"_id": {"$eq": self.id}, **self.rest, "$and": [*self.rest.get("$and", ()), condition]}

    def nowhere(self) -> dict[str, Any]:
        """
        A filter that matches nothing and, in an upsert, creates this document.

        Where it exists, E11000 on `_id` says so, so an insert's body needs no case for an existing stamp.
        """
        return self.where({"$nor": [{}]})


def target_of(filter: Mapping[str, Any]) -> Target | None:  # noqa: A002 - PyMongo's name
    """The document that `filter` names by equality on `_id`, or None if it names none."""
    wanted = demanded_id(filter)
    if wanted is NO_ID:
        return None
    return Target(wanted, {name: value for name, value in filter.items() if name != "_id"})


# ---------------------------------------------------------------- what a write does


class Body(Protocol):
    """What a user wants done to one document, as statements that check and stamp."""

    def edits(self, fence: Fence) -> list[tuple[dict[str, Any], Any]]:
        """Pairs of guard and update, to be tried in order; at most one matches."""

    def insertion(self, stamps: Mapping[str, Any]) -> Any:
        """The update or replacement of an upsert that is known to insert, with `stamps` as ``_fence``."""


@dataclass(frozen=True, slots=True)
class Operators:
    """An update document such as ``{"$set": ...}``."""

    update: Mapping[str, Any]

    def __post_init__(self) -> None:
        for operator, fields in self.update.items():
            if isinstance(fields, Mapping):
                _refuse_fence(fields)
                if operator == "$rename":
                    _refuse_fence(fields.values())

    def edits(self, fence: Fence) -> list[tuple[dict[str, Any], Any]]:
        """One statement for a stamp of my generation, one for an older stamp or none."""
        slot = {f"{fence.path}.p.{fence.index}": fence.token}
        entry = {fence.path: {"g": fence.generation, "p": {str(fence.index): fence.token}}}
        return [
            (fence.guard_same(), self._with("$set", slot)),
            (fence.guard_older(), self._with("$set", entry)),
        ]

    def insertion(self, stamps: Mapping[str, Any]) -> Any:
        """The same operators, and the stamps on insertion."""
        return self._with("$setOnInsert", {FIELD: dict(stamps)})

    def _with(self, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.update, operator: {**self.update.get(operator, {}), **fields}}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An aggregation pipeline; stages that drop fields are made to keep ``_fence``."""

    stages: Sequence[Mapping[str, Any]]

    def __post_init__(self) -> None:
        for stage in self.stages:
            _refuse_fence(_fields_named_by(stage))

    def edits(self, fence: Fence) -> list[tuple[dict[str, Any], Any]]:
        """One statement: the last stage sees the stored stamps."""
        return [(fence.guard(), [*map(_keeping_fence, self.stages), {"$set": {FIELD: fence.expression()}}])]

    def insertion(self, stamps: Mapping[str, Any]) -> Any:
        """The same stages on an empty document, then the stamps."""
        return [*map(_keeping_fence, self.stages), {"$set": {FIELD: {"$literal": dict(stamps)}}}]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A whole document."""

    document: Mapping[str, Any]

    def __post_init__(self) -> None:
        _refuse_fence(self.document)

    def edits(self, fence: Fence) -> list[tuple[dict[str, Any], Any]]:
        """One statement. `$literal` keeps strings like ``"$price"``, which a pipeline would read as paths."""
        parts = [{"$literal": self.document}, {FIELD: fence.expression()}]
        return [(fence.guard(), [{"$replaceWith": {"$mergeObjects": parts}}])]

    def insertion(self, stamps: Mapping[str, Any]) -> Any:
        """An ordinary replacement, literal by itself."""
        return {**self.document, FIELD: dict(stamps)}


def _refuse_fence(fields: Any) -> None:
    for field in fields:
        if isinstance(field, str) and (field == FIELD or field.startswith(f"{FIELD}.")):
            raise ConfigurationError(
                f"{field!r} belongs to the fence and is kept by it: leave it out of what you write.",
                field=field,
            )


def _fields_named_by(stage: Mapping[str, Any]) -> Iterator[Any]:
    for operator, spec in stage.items():
        named = spec.get("newRoot") if operator == "$replaceRoot" and isinstance(spec, Mapping) else spec
        yield from [named] if operator == "$unset" and isinstance(named, str) else ()
        yield from named if isinstance(named, Mapping | list | tuple) else ()


def _keeping_fence(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$replaceWith" in stage:
        return {"$replaceWith": _with_fence(stage["$replaceWith"])}
    if isinstance(stage.get("$replaceRoot"), Mapping):
        root = stage["$replaceRoot"]
        return {"$replaceRoot": {**root, "newRoot": _with_fence(root.get("newRoot"))}}
    project = stage.get("$project")
    if isinstance(project, Mapping) and not _excludes(project):
        return {"$project": {**project, FIELD: 1}}
    return stage


def _with_fence(root: Any) -> dict[str, Any]:
    # `$mergeObjects` takes null for an empty object: without the test, a root that is
    # missing would empty the document where MongoDB reports an error. `$ifNull`, for a
    # new root that brings a `_fence` of its own must not keep it.
    kept = {"$mergeObjects": ["$$root_", {FIELD: {"$ifNull": [f"${FIELD}", {}]}}]}
    chosen = {"$cond": [{"$eq": [{"$type": "$$root_"}, "object"]}, kept, "$$root_"]}
    return {"$let": {"vars": {"root_": root}, "in": chosen}}


def _excludes(project: Mapping[str, Any]) -> bool:
    """Whether a `$project` names what goes (all zeros) rather than what stays."""
    fields = {name: value for name, value in project.items() if name != "_id"} or project
    return all(
        _excludes(value) if isinstance(value, Mapping) and value else _is_zero(value) for value in fields.values()
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, bool | int | float) and not value
