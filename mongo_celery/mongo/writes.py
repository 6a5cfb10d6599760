"""
A user's write, amended: what a feature adds to a document, written by the same atomic write.

A feature keeps something of its own in users' documents, each in a field of its own: stamps, entries that wait. It
says what it adds as an `Addition`; what the user wants is a `Body` of one of three kinds; a body amended by the
additions of all features is one update for the server:

============  ================================  ===========================================  ======================
kind          the user wrote                    amended                                      as an insertion
============  ================================  ===========================================  ======================
operators     ``{"$set": ...}``                 the additions' operators beside the user's   ``$setOnInsert``
pipeline      ``[{"$set": ...}, ...]``          a last stage for each addition               a last stage
replacement   a whole document                  a pipeline that merges the additions into    a document like another
                                                the literal document
============  ================================  ===========================================  ======================

W1. The user's part does what it did alone: his values never become expressions, his conditions stay at the top.
W2. An own field is written by its owner only: what names it is found (`Body.find_name`), so that the owner refuses it.
W3. An own field survives what drops fields: stages that make a new document are made to keep it. So does a field of
    another owner that the write is told to keep, unless the user's part brings it.
W4. Owners do not disturb each other: their fields differ, and their conditions stand beside each other.

Who owns which field, and what a write that matches nothing means to him, is not known here.
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
from mongo_celery.mongo.verdicts import Code

Modifications = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""The argument of PyMongo's `update_one`: operators or a pipeline."""


_ADDING = frozenset({"$inc", "$mul", "$min", "$max", "$addToSet", "$push", "$pull", "$pullAll", "$setOnInsert"})
"""Operators whose order makes no older value take the place of a newer one."""


# ---------------------------------------------------------------- which document


@dataclass(frozen=True, slots=True)
class Target:
    """One document by its `_id`, and what else the user demands of it."""

    id: Any
    rest: Mapping[str, Any]

    def where(self, *conditions: Mapping[str, Any]) -> dict[str, Any]:
        """
        A filter for this document, the user's conditions and `conditions` (W4).

        The user's conditions stay at the top, where the positional operator finds them.
        """
        return {"_id": {"$eq": self.id}, **self.rest, "$and": [*self.rest.get("$and", ()), *conditions]}

    def insert_only_filter(self) -> dict[str, Any]:
        """
        A filter that matches nothing and, in an upsert, creates this document.

        Where it exists, E11000 on `_id` says so, so an insert's body needs no case for what it holds already.
        """
        return self.where({"$nor": [{}]})


def parse_target(filter: Mapping[str, Any]) -> Target | None:  # noqa: A002 - PyMongo's name
    """Return the document that `filter` names by equality on `_id`, or None if it names none."""
    wanted = parse_filter_id(filter)
    return None if wanted is NO_ID else build_target(filter, wanted)


def build_target(filter: Mapping[str, Any], document_id: Any) -> Target:  # noqa: A002
    """`filter` on the document that it has found: its own condition on `_id` is met, and an `_id` never changes."""
    return Target(document_id, {name: value for name, value in filter.items() if name != "_id"})


# ---------------------------------------------------------------- what is done to it


@dataclass(frozen=True, slots=True)
class Addition:
    """
    The write of a feature to its own field of a document, in both of MongoDB's languages.

    Args:
        field: its own, at the top of the document.
        operators: for an update document, which cannot look at what is stored.
        expression: the field's new value, for a pipeline and a replacement, which can.
    """

    field: str
    operators: Mapping[str, Mapping[str, Any]]
    expression: Any


class Body(ABC):
    """A user's write to one document."""

    @property
    def overwrites(self) -> bool:
        """Return True if it replaces values, so that of two such writes the later one decides."""
        return True

    @abstractmethod
    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> Any:
        """Return the update that does it and writes the additions (W1, W3); `kept` are fields of other owners."""

    @abstractmethod
    def insertion(self, own: Mapping[str, Any]) -> Any:
        """The update or replacement of an upsert that is known to insert, with these values of own fields."""

    @abstractmethod
    def names(self) -> Iterator[Any]:
        """The fields and paths that the user writes, as far as they can be told."""

    def find_name(self, field: str) -> str | None:
        """Return the first of them that is `field` or lies in it, or None (W2)."""
        return next((name for name in self.names() if isinstance(name, str) and is_part(name, field)), None)


@dataclass(frozen=True, slots=True)
class Operators(Body):
    """An update document such as ``{"$set": ...}``."""

    update: Mapping[str, Any]

    @property
    def overwrites(self) -> bool:
        """Not where it only adds to what is there."""
        return not _ADDING.issuperset(self.update)

    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> dict[str, Any]:
        """See `Body`; operators drop no other field."""
        del kept
        whole = dict(self.update)
        for addition in additions:
            for operator, fields in addition.operators.items():
                whole[operator] = {**whole.get(operator, {}), **fields}
        return whole

    def insertion(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The same operators, and the own fields on insertion."""
        return {**self.update, "$setOnInsert": {**self.update.get("$setOnInsert", {}), **own}}

    def names(self) -> Iterator[Any]:
        """See `Body`."""
        for operator, fields in self.update.items():
            if isinstance(fields, Mapping):
                yield from fields
                yield from fields.values() if operator == "$rename" else ()


@dataclass(frozen=True, slots=True)
class Pipeline(Body):
    """An aggregation pipeline; stages that drop fields are made to keep the own ones."""

    stages: Sequence[Mapping[str, Any]]

    def build_update(self, *additions: Addition, kept: Collection[str] = ()) -> list[Mapping[str, Any]]:
        """The last stages see the stored values of the own fields."""
        last = [{"$set": {addition.field: addition.expression}} for addition in additions]
        return [*self._keeping([addition.field for addition in additions], kept), *last]

    def insertion(self, own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The same stages on an empty document, then the own fields."""
        last = {"$set": {field: literal(value) for field, value in own.items()}}
        return [*self._keeping(own), last]

    def names(self) -> Iterator[Any]:
        """See `Body`."""
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
        """One stage. `$literal` keeps strings like ``"$price"``, which a pipeline would read as paths."""
        own = ({addition.field: addition.expression} for addition in additions)
        parts = [literal(self.document), *_copy_fields([name for name in kept if name not in self.document]), *own]
        return [{"$replaceWith": {"$mergeObjects": parts}}]

    def insertion(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """An ordinary replacement, literal by itself."""
        return {**self.document, **own}

    def names(self) -> Iterator[Any]:
        """See `Body`."""
        yield from self.document


def changing(update: Modifications) -> Body:
    """
    The body of an update.

    Raises:
        TypeError, ValueError: PyMongo's own, where it is none.
    """
    validate_ok_for_update(update)
    return Operators(update) if isinstance(update, Mapping) else Pipeline(update)


def replacing(replacement: Mapping[str, Any]) -> Body:
    """The body of a replacement; errors as of `changing`."""
    validate_ok_for_replace(replacement)
    return Replacement(replacement)


def is_part(path: str, field: str) -> bool:
    """Return True if a path is this field of the document or lies in it."""
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
    """Fields as they are stored, to be merged; one that is missing adds nothing."""
    return [{field: f"${field}"} for field in fields]


def _with_fields(root: Any, fields: Collection[str], kept: Collection[str]) -> dict[str, Any]:
    # `$mergeObjects` takes null for an empty object: without the test, a root that is
    # missing would empty the document where MongoDB reports an error. `$ifNull`, for a
    # new root that brings such a field of its own must not keep it.
    own = {field: {"$ifNull": [f"${field}", {}]} for field in fields}
    merged = {"$mergeObjects": [*_copy_fields(kept), "$$root_", own]}
    chosen = {"$cond": [{"$eq": [{"$type": "$$root_"}, "object"]}, merged, "$$root_"]}
    return {"$let": {"vars": {"root_": root}, "in": chosen}}


def _excludes(project: Mapping[str, Any]) -> bool:
    """Return True if a `$project` names the fields that go (all zeros), not those that stay."""
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
    """Return the slots of a PyMongo request; cached for each kind, since a bulk write may have thousands."""
    return [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """
    A request of PyMongo's bulk write, taken apart.

    Attributes:
        filter: which documents; None for an insert.
        document: the document, the update or the replacement; None for a delete.
        upsert: whether it may create its document.
        sort: which document if several match.
        options: collation, array filters and hint, as far as they were given.
        namespace: of a client's bulk write; None where the request goes to a collection's.
    """

    filter: Any
    document: Any
    upsert: bool
    sort: Any
    options: Mapping[str, Any]
    namespace: str | None = None

    @classmethod
    def of(cls, request: Any) -> BulkRequest:
        """Take a request apart; PyMongo has no public names for what it was made of."""
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
    """The error that PyMongo raises for a single write where a bulk write reports `error`."""
    labels = {"errorLabels": error.details["errorLabels"]} if "errorLabels" in error.details else {}
    for detail in error.details.get("writeErrors", []):
        kind = DuplicateKeyError if detail.get("code") == Code.DuplicateKey else WriteError
        return kind(detail.get("errmsg", ""), detail.get("code"), {**detail, **labels})
    for detail in error.details.get("writeConcernErrors", []):
        return WriteConcernError(detail.get("errmsg", ""), detail.get("code"), {**detail, **labels})
    raise error
