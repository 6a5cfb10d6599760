"""Preflight of the collection itself: kind, indexes, validator, shard key, rights, and the field in its documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pymongo
from pymongo.collection import Collection
from pymongo.errors import ExecutionTimeout, OperationFailure

from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed, read_rights
from mongo_celery.quantities import number

Document = Mapping[str, Any]

_SAMPLE = 50
_COUNTED_MAX = 1000
_LOOK_SECONDS = 3.0
"""A collection that has no index on the field is read as far as this gets."""

_KINDS = {"view": "a view", "timeseries": "a time series"}
_ON_DOCUMENTS = ("find", "insert", "update", "remove")


@dataclass(frozen=True, slots=True)
class WantedIndex:
    """
    The index by which a sweep finds what is due.

    Attributes:
        name: that it gets where it is created; another is as good.
        keys: fields and directions.
        condition: of the documents that it holds; None for all.
    """

    name: str
    keys: Sequence[tuple[str, int]]
    condition: Document | None

    def command(self, collection: str) -> str:
        """What creates it, for mongosh."""
        options: dict[str, Any] = {"name": self.name}
        if self.condition is not None:
            options["partialFilterExpression"] = self.condition
        return f"db.{collection}.createIndex({json.dumps(dict(self.keys))}, {json.dumps(options)})"


def check_storage(
    collection: Collection[dict[str, Any]], field: str, index: WantedIndex, example: Document
) -> Iterator[Finding]:
    """
    What the server says of the user's collection.

    Args:
        collection: with plain types.
        field: in which entries are stored.
        index: the one that it should have.
        example: a value of that field.
    """
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            about = next(iter(collection.database.list_collections(filter={"name": collection.name})), None)
    except OperationFailure as failure:
        yield degraded("collection", f"Cannot see what it is; grant listCollections. {short(failure)}.")
        about = {}
    yield from judge_kind(collection.full_name, about)
    if about is None or about.get("type", "collection") != "collection":
        return
    yield from _check_indexes(collection, index)
    yield from _check_validator(collection, field, about.get("options", {}), example)
    yield from _check_shard_key(collection)
    yield from _check_values(collection, field)


def judge_kind(name: str, about: Document | None) -> Iterator[Finding]:
    """
    Whether documents can grow there, and stay.

    Args:
        name: of the collection.
        about: what `listCollections` says of it; None where it is not there.
    """
    if about is None:
        yield degraded("collection", f"{name} does not exist yet; its first document creates it. Mind the name.")
        return
    kind, options = about.get("type", "collection"), about.get("options", {})
    if kind != "collection":
        yield failing("collection", f"{name} is {_KINDS.get(kind, kind)}: write to the collection behind it.")
    elif options.get("capped"):
        yield failing("collection", f"{name} is capped: it throws documents away, with what is pending in them.")
    elif about:
        yield ok("collection", f"{name} is there.")


# -- indexes ---------------------------------------------------------------------------------------


def _check_indexes(collection: Collection[dict[str, Any]], wanted: WantedIndex) -> Iterator[Finding]:
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            indexes = list(collection.list_indexes())
    except OperationFailure as failure:
        yield degraded("index", f"The indexes cannot be seen; grant listIndexes. {short(failure)}.")
        return
    yield from judge_indexes(collection.name, wanted, indexes)


def judge_indexes(name: str, wanted: WantedIndex, indexes: Iterable[Document]) -> Iterator[Finding]:
    """Whether the sweep has its index, and whether another one lets documents expire."""
    indexes = list(indexes)
    alike = [each for each in indexes if list(each["key"].items()) == list(wanted.keys)]
    fits = [each for each in alike if each.get("partialFilterExpression") == wanted.condition]
    if fits:
        yield ok("index", f"{fits[0]['name']} leads the sweep to what is pending.")
    elif alike:
        yield degraded(
            "index",
            f"{alike[0]['name']} is on {wanted.keys[0][0]}, but not on the documents in which something is pending "
            "alone: where it holds all, each write changes it. Drop it, and create the partial one:",
            wanted.command(name),
        )
    else:
        yield degraded(
            "index",
            "It is missing: each sweep reads the whole collection. The first delivery creates it, unless the user may "
            "not or a transaction stays open; with many documents create it in advance:",
            wanted.command(name),
        )
    for each in indexes:
        if "expireAfterSeconds" in each:
            yield degraded(
                "expiry",
                f"The index {each['name']} removes documents by their age, with what is pending in them; let them live "
                "longer than any outage of the broker.",
            )


# -- the validator ---------------------------------------------------------------------------------


def _check_validator(
    collection: Collection[dict[str, Any]], field: str, options: Document, example: Document
) -> Iterator[Finding]:
    validator = options.get("validator")
    if not validator or options.get("validationLevel") == "off":
        return
    refuses = _refuses(collection, validator, field, example)
    if refuses is None:
        refuses = forbids(validator, field)
    if not refuses:
        yield ok("validator", f"The collection's validator lets {field} pass.")
        return
    properties = f"allow {field} in its properties, as an object"
    if options.get("validationAction") == "warn":
        yield degraded("validator", f"The collection's validator logs every write that has entries; {properties}.")
    else:
        yield failing("validator", f"The collection's validator refuses every write that has entries; {properties}.")


def _refuses(collection: Collection[dict[str, Any]], validator: Document, field: str, example: Document) -> bool | None:
    """Whether documents that pass without the field do not with it, as the server sees it; None where none passes."""
    passing: list[dict[str, Any]] = [{"$limit": _SAMPLE}, {"$unset": field}, {"$match": dict(validator)}]
    carrying: list[dict[str, Any]] = [{"$set": {field: literal(dict(example))}}, {"$match": dict(validator)}]
    counts = []
    for pipeline in (passing, [*passing, *carrying]):
        with pymongo.timeout(ANSWER_SECONDS):
            found = next(iter(collection.aggregate([*pipeline, {"$count": "documents"}])), {"documents": 0})
        counts.append(found["documents"])
    without, with_entries = counts
    return with_entries < without if without else None


def forbids(validator: Document, field: str) -> bool:
    """Whether a validator's schema lists its properties and this is none, for a collection without documents."""
    schema = validator.get("$jsonSchema")
    if not isinstance(schema, Mapping) or schema.get("additionalProperties", True) is not False:
        return False
    return field not in schema.get("properties", {}) and not schema.get("patternProperties")


# -- sharding --------------------------------------------------------------------------------------


def _check_shard_key(collection: Collection[dict[str, Any]]) -> Iterator[Finding]:
    client = collection.database.client
    with pymongo.timeout(ANSWER_SECONDS):
        if client.admin.command("hello").get("msg") != "isdbgrid":
            return
        try:
            found = client["config"]["collections"].find_one({"_id": collection.full_name})
        except OperationFailure as failure:
            yield degraded("shard_key", f"It cannot be seen; grant find on config.collections. {short(failure)}.")
            return
    yield judge_shard_key(None if found is None or found.get("dropped") else found.get("key"))


def judge_shard_key(key: Document | None) -> Finding:
    """Relays address documents by their `_id`: what another shard key costs."""
    if key is None:
        return ok("shard_key", "The collection is not sharded.")
    if list(key) == ["_id"]:
        return ok("shard_key", "Documents are distributed by their _id.")
    return degraded(
        "shard_key",
        f"Documents are distributed by {', '.join(key)}: each claim and removal, which know the _id alone, asks every "
        "shard. See to it that an _id is unique among all shards, which MongoDB does not.",
    )


# -- what stands in the field ----------------------------------------------------------------------


def _check_values(collection: Collection[dict[str, Any]], field: str) -> Iterator[Finding]:
    """Values that no `$push` can extend."""
    query = {"$and": [{field: {"$exists": True}}, {field: {"$not": {"$type": "object"}}}]}
    nulls: int | None
    try:
        with pymongo.timeout(_LOOK_SECONDS + ANSWER_SECONDS):
            nulls = collection.count_documents(query, limit=_COUNTED_MAX, maxTimeMS=round(_LOOK_SECONDS * 1000))
    except ExecutionTimeout:
        nulls = None
    yield from judge_values(collection.name, field, nulls)


def judge_values(name: str, field: str, nulls: int | None) -> Iterator[Finding]:
    """
    Judge the count.

    Args:
        name: of the collection.
        field: in which entries are stored.
        nulls: documents in which it is there, and no object; None where too many had to be read.
    """
    if nulls:
        yield failing(
            "field",
            f"{field} is there and is no object in {_many(nulls)}, such as an ODM writes that knows the field: a write "
            "with entries fails there. Have it leave the field out where there is no value, then remove it:",
            f'db.{name}.updateMany({{"{field}": null}}, {{$unset: {{"{field}": 1}}}})',
        )
    else:
        rest = f" as far as could be read in {_LOOK_SECONDS:.0f} s" if nulls is None else ""
        yield ok("field", f"{field} stands only where something is pending{rest}.")


def _many(count: int) -> str:
    least = "at least " if count >= _COUNTED_MAX else ""
    return least + number(count, "document", "documents")


# -- rights ----------------------------------------------------------------------------------------


def check_rights(collection: Collection[dict[str, Any]], others: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """
    Whether the user may do what writers and relays do.

    Args:
        collection: the user's.
        others: database and name of the outbox's own.
    """
    with pymongo.timeout(ANSWER_SECONDS):
        may = read_rights(collection.database.client)
    yield from judge_rights(may, (collection.database.name, collection.name), others)


def judge_rights(may: Allowed, collection: tuple[str, str], others: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Findings from what the server says that the user may do; arguments as above, by database and name."""
    missing = []
    for database, name in (collection, *others):
        lacking = [each for each in _ON_DOCUMENTS if not may.may(each, {"db": database, "collection": name})]
        if lacking:
            missing.append(f"{', '.join(lacking)} on {database}.{name}")
    database, name = collection
    if missing:
        yield failing("rights", f"This user lacks {'; '.join(missing)}. Grant them to writers and workers.")
    elif not may.may("createIndex", {"db": database, "collection": name}):
        yield degraded("rights", f"This user lacks createIndex on {database}.{name}: create the index by hand.")
    else:
        yield ok("rights", "This user may do what writers and relays do.")
