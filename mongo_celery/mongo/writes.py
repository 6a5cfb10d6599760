"""
A user's write with additions: an atomic write that also writes a feature's fields.

A feature keeps its data in its own field of users' documents: stamps, or entries of an outbox. An `Addition` describes
this data. The user's write is a `Body` of one of three kinds. A body with all features' additions is one update for the
server:

============  ================================  ===========================================  ======================
kind          the user wrote                    amended                                      as an insertion
============  ================================  ===========================================  ======================
operators     ``{"$set": ...}``                 the additions' operators beside the user's   ``$setOnInsert``
pipeline      ``[{"$set": ...}, ...]``          a last stage for each addition               a last stage
replacement   a whole document                  a pipeline that merges the additions into    a document like another
                                                the literal document
============  ================================  ===========================================  ======================

W1. The user's part has its usual effect: its values never become expressions, its conditions stay at the top.
W2. Only its owner writes a feature's field. `Body.find_name` finds an update of it, so that the owner can refuse it.
W3. The feature's field survives stages that drop fields, because they are changed to keep it. A field of another owner
    that the write must keep also survives, unless the user's part contains it.
W4. Owners do not disturb each other: their fields differ, and their conditions are combined.

This module knows neither the owner of a field, nor its reaction to a write that matches nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pymongo.common import validate_ok_for_replace, validate_ok_for_update
from pymongo.errors import BulkWriteError, DuplicateKeyError, WriteConcernError, WriteError

from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.identity import NO_ID, parse_filter_id
from mongo_celery.mongo.verdicts import Code, list_failures

Modifications = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The argument of PyMongo's `update_one`: operators or a pipeline."""


_ADDING = frozenset({"$inc", "$mul", "$min", "$max", "$addToSet", "$push", "$pull", "$pullAll", "$setOnInsert"})
"""Operators for which the order of writes does not matter: no older value replaces a newer one."""


# ---------------------------------------------------------------- which document


@dataclass(frozen=True, slots=True)
class Target:
    """A document by `_id`, and the user's other conditions."""

    id: Any
    rest: Mapping[str, Any]

    def where(self, *conditions: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return a filter for this document with the user's conditions and `conditions` (W4).

        The user's conditions stay at the top, where the positional operator finds them.
        """
        return {"_id": {"$eq": self.id}, **self.rest, "$and": [*self.rest.get("$and", ()), *conditions]}

    def insert_only_filter(self) -> dict[str, Any]:
        """
        Return a filter that matches nothing and, in an upsert, creates this document.

        If the document exists, the server reports E11000 on `_id`, so the body of an insert needs no other case.
        """
        return self.where({"$nor": [{}]})


def parse_target(filter: Mapping[str, Any]) -> Target | None:  # noqa: A002 - PyMongo's name
    """Return the document that `filter` selects by equality on `_id`, or None."""
    wanted = parse_filter_id(filter)
    return None if wanted is NO_ID else build_target(filter, wanted)


def build_target(filter: Mapping[str, Any], document_id: Any) -> Target:  # noqa: A002
    """Return `filter` for the document that it has found. Its `_id` condition holds, and an `_id` never changes."""
    return Target(document_id, {name: value for name, value in filter.items() if name != "_id"})


# ---------------------------------------------------------------- which change


@dataclass(frozen=True, slots=True)
class Addition:
    """
    A feature's write to its own field of a document, in both of MongoDB's languages.

    Args:
        field: the feature's own top-level field.
        operators: the operators for an update document, which cannot read stored values.
        expression: the field's new value, for a pipeline and a replacement, which can read them.
    """

    field: str
    operators: Mapping[str, Mapping[str, Any]]
    expression: Any


class Body(ABC):
    """A user's write to one document."""

    @property
    def overwrites(self) -> bool:
        """Return True if the write replaces values, so that the later of two writes wins."""
        return True

    @abstractmethod
    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> Any:
        """Return the update with the additions (W1, W3). `kept` are fields of other owners."""

    @abstractmethod
    def insertion(self, own: Mapping[str, Any]) -> Any:
        """Return the update or replacement of a known insert, with these values of own fields."""

    @abstractmethod
    def names(self) -> Iterator[Any]:
        """Yield the known fields and paths that the user writes."""

    def find_name(self, field: str) -> str | None:
        """Return the first of them that is `field` or inside it, or None (W2)."""
        return next((name for name in self.names() if isinstance(name, str) and is_part(name, field)), None)


@dataclass(frozen=True, slots=True)
class Operators(Body):
    """An update document such as ``{"$set": ...}``."""

    update: Mapping[str, Any]

    @property
    def overwrites(self) -> bool:
        """Return True unless the operators only add to stored values."""
        return not _ADDING.issuperset(self.update)

    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> dict[str, Any]:
        """Return the update with the additions. Nothing needs to be kept, because operators drop no other field."""
        del kept
        whole = dict(self.update)
        for addition in additions:
            for operator, fields in addition.operators.items():
                whole[operator] = {**whole.get(operator, {}), **fields}
        return whole

    def insertion(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same operators, with the own fields on insertion."""
        return {**self.update, "$setOnInsert": {**self.update.get("$setOnInsert", {}), **own}}

    def names(self) -> Iterator[Any]:
        """Yield the known fields and paths that the user writes."""
        for operator, fields in self.update.items():
            if isinstance(fields, Mapping):
                yield from fields
                yield from fields.values() if operator == "$rename" else ()


@dataclass(frozen=True, slots=True)
class Pipeline(Body):
    """An aggregation pipeline. Stages that drop fields are changed to keep the own ones."""

    stages: Sequence[Mapping[str, Any]]

    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> list[Mapping[str, Any]]:
        """Return the update, whose last stages see the stored values of the own fields."""
        last = [{"$set": {addition.field: addition.expression}} for addition in additions]
        return [*self._keeping([addition.field for addition in additions], kept), *last]

    def insertion(self, own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the same stages on an empty document, then the own fields."""
        last = {"$set": {field: literal(value) for field, value in own.items()}}
        return [*self._keeping(own), last]

    def names(self) -> Iterator[Any]:
        """Yield the known fields and paths that the user writes."""
        for stage in self.stages:
            for operator, spec in stage.items():
                named = spec.get("newRoot") if operator == "$replaceRoot" and isinstance(spec, Mapping) else spec
                yield from [named] if operator == "$unset" and isinstance(named, str) else ()
                yield from named if isinstance(named, Mapping | list | tuple) else ()

    def _keeping(self, fields: Collection[str], kept: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        return (_keeping(stage, fields, kept) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Replacement(Body):
    """A whole document."""

    document: Mapping[str, Any]

    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> list[Mapping[str, Any]]:
        """Return one stage. `$literal` keeps strings like ``"$price"``, which a pipeline would read as paths."""
        own = ({addition.field: addition.expression} for addition in additions)
        parts = [literal(self.document), *_copy_fields([name for name in kept if name not in self.document]), *own]
        return [{"$replaceWith": {"$mergeObjects": parts}}]

    def insertion(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return an ordinary replacement, which is already literal."""
        return {**self.document, **own}

    def names(self) -> Iterator[Any]:
        """Yield the fields that the user writes."""
        yield from self.document


def changing(update: Modifications) -> Body:
    """
    Return the body of an update.

    Raises:
        TypeError, ValueError: PyMongo's own, if it is not an update.
    """
    validate_ok_for_update(update)
    return Operators(update) if isinstance(update, Mapping) else Pipeline(update)


def replacing(replacement: Mapping[str, Any]) -> Body:
    """Return the body of a replacement. Errors as in `changing`."""
    validate_ok_for_replace(replacement)
    return Replacement(replacement)


def is_part(path: str, field: str) -> bool:
    """Return True if a path is this field or inside it."""
    return path == field or path.startswith(f"{field}.")


def _keeping(stage: Mapping[str, Any], fields: Collection[str], kept: Collection[str]) -> Mapping[str, Any]:
    if "$replaceWith" in stage:
        return {"$replaceWith": _with_fields(stage["$replaceWith"], fields, kept)}
    if isinstance(stage.get("$replaceRoot"), Mapping):
        root = stage["$replaceRoot"]
        return {"$replaceRoot": {**root, "newRoot": _with_fields(root.get("newRoot"), fields, kept)}}
    project = stage.get("$project")
    if isinstance(project, Mapping) and not _excludes(project):
        others = [field for field in kept if not any(is_part(str(name), field) for name in project)]
        return {"$project": {**project, **dict.fromkeys([*fields, *others], 1)}}
    return stage


def _copy_fields(fields: Collection[str]) -> list[dict[str, str]]:
    """Return stored fields to merge. A missing field adds nothing."""
    return [{field: f"${field}"} for field in fields]


def _with_fields(root: Any, fields: Collection[str], kept: Collection[str]) -> dict[str, Any]:
    # `$mergeObjects` treats null as an empty object. Without the test, a missing root would empty the document instead
    # of causing MongoDB's error. `$ifNull`, because a new root with this field must not keep its own.
    own = {field: {"$ifNull": [f"${field}", {}]} for field in fields}
    merged = {"$mergeObjects": [*_copy_fields(kept), "$$root_", own]}
    chosen = {"$cond": [{"$eq": [{"$type": "$$root_"}, "object"]}, merged, "$$root_"]}
    return {"$let": {"vars": {"root_": root}, "in": chosen}}


def _excludes(project: Mapping[str, Any]) -> bool:
    """Return True if a `$project` names the fields to remove (all zeros), not those to keep."""
    fields = {name: value for name, value in project.items() if name != "_id"} or project
    return all(
        _excludes(value) if isinstance(value, Mapping) and value else _is_zero(value) for value in fields.values()
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, bool | int | float) and not value


# ---------------------------------------------------------------- many in one command


_OPTIONS = ("collation", "array_filters", "hint")


@cache
def _slots(kind: Any) -> Sequence[str]:
    """Return the slots of a PyMongo request, cached by kind, because a bulk write may have thousands."""
    return [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """
    The parts of a PyMongo bulk write request.

    Attributes:
        filter: selects documents. None for an insert.
        document: the document, the update or the replacement. None for a delete.
        upsert: True if it may create its document.
        sort: selects one of several matching documents.
        options: collation, array filters and hint, if given.
        namespace: namespace of a client's bulk write. None for a collection's.
    """

    filter: Any
    document: Any
    upsert: bool
    sort: Any
    options: Mapping[str, Any]
    namespace: str | None = None

    @classmethod
    def of(cls, request: Any) -> BulkRequest:
        """Take a request apart. PyMongo has no public names for its parts."""
        kind: Any = type(request)
        facts = {name.lstrip("_"): getattr(request, name) for name in _slots(kind)}
        options = {name: facts[name] for name in _OPTIONS if facts.get(name) is not None}
        return cls(
            facts.get("filter"),
            facts.get("doc"),
            bool(facts.get("upsert")),
            facts.get("sort"),
            options,
            facts.get("namespace"),
        )


COUNTS = ("nInserted", "nMatched", "nModified", "nRemoved", "nUpserted")
"""The numbers in a bulk write's result."""


def single_error(error: BulkWriteError) -> WriteError | WriteConcernError:
    """Return the error that PyMongo raises for a single write, in place of the bulk write's."""
    labels = {"errorLabels": error.details["errorLabels"]} if "errorLabels" in error.details else {}
    first = list_failures(error.details)[0]
    kind: type[WriteError | WriteConcernError] = WriteError if error.details.get("writeErrors") else WriteConcernError
    if first.get("code") == Code.DuplicateKey:
        kind = DuplicateKeyError
    return kind(first.get("errmsg", ""), first.get("code"), {**first, **labels})
