"""
The preflight of outboxes: everything outside our code that their writes and their delivery depend on.

Nothing is written. A server that does not answer is a finding, and the rest is still looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from celery import Celery
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS, check_server
from mongo_celery.broker.workers import WorkerReplies, ask_workers
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS, collect_findings
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed, read_rights
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.outbox.health import concern_of, judge_health, late_after, reach, read_outbox
from mongo_celery.outbox.index import OutboxIndex, of_pending
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.quantities import duration, number

if TYPE_CHECKING:
    from mongo_celery.outbox.registry import AnyOutbox

Document = Mapping[str, Any]

INSPECT_SECONDS = 1.5
"""How long workers have to answer each of two questions."""

_DOCUMENTS_MAX = 10_000
_NAMED = 4
_LARGE_BYTES = 12 * 1024 * 1024
_KINDS = {"view": "a view", "timeseries": "a time series"}
_ON_DOCUMENTS = ("find", "insert", "update", "remove")


@dataclass(frozen=True, slots=True)
class AppFacts:
    """
    What all outboxes of an app share, asked for once.

    Attributes:
        findings: on the broker and the app's settings.
        said: what workers say, why they cannot be asked, or None where the broker does not answer.
    """

    findings: Sequence[Finding]
    said: WorkerReplies | str | None


def look_around(app: Celery) -> AppFacts:
    """Ask the broker and the workers, for some seconds."""
    found = list[Finding]()
    if app.conf.task_always_eager:
        found.append(failing("task_always_eager", "Whoever delivers runs the tasks itself; unset it."))
    try:
        with bounded_connection(app, BROKER_SECONDS) as connection:
            found += check_server(connection)
    except (ConfigurationError, KeyError, ImportError, ValueError) as failure:
        found.append(failing("broker", f"Its URL is not usable ({short(failure)}); correct broker_url."))
    if any(each.code == "broker" and each.severity == "failing" for each in found):
        return AppFacts(found, None)
    try:
        return AppFacts(found, ask_workers(app, INSPECT_SECONDS))
    except Exception as failure:  # noqa: BLE001 - every transport raises its own; some have no remote control
        return AppFacts(found, short(failure))


def check(outbox: AnyOutbox, facts: AppFacts) -> list[Finding]:
    """
    Look at everything that one outbox needs, and at what is pending in it, for some seconds.

    Not promised: that what is well now stays so.
    """
    found = collect_findings(
        "mongodb", lambda: _check_answer(outbox), ErrorContext("what this command needs", "readWrite there")
    )
    if found[-1].severity == "failing":
        return [*found, *facts.findings]
    concern = concern_of(outbox)
    for name, part in _parts(outbox, facts).items():
        found += collect_findings(name, part, concern)
    return [*found, *facts.findings]


def _check_answer(outbox: AnyOutbox) -> Iterator[Finding]:
    reach(outbox)
    yield ok("mongodb", f"The primary answers, and {outbox.collection.full_name} can be opened.")


def _parts(outbox: AnyOutbox, facts: AppFacts) -> Mapping[str, Callable[[], Iterable[Finding]]]:
    plain, field = outbox.backing.plain, outbox.backing.field.name
    return {
        "rights": lambda: _check_rights(outbox),
        "key": lambda: _check_key(outbox),
        "collection": lambda: _check_collection(plain, field, of_pending(plain, outbox.backing.field)),
        "pending": lambda: _check_contents(outbox),
        "state": lambda: judge_health(read_outbox(outbox, outbox.app, None), CommandLine.of(outbox.app)),
        "workers": lambda: judge_workers(sweep_queue(outbox.app), facts.said),
    }


def _check_key(outbox: AnyOutbox) -> Iterator[Finding]:
    signer = outbox.backing.signer
    there = "is there" if signer.exists() else "is not there yet: the first write or sweep stores it"
    yield ok("key", f"This user may read {signer.full_name}. The key that signs entries {there}.")


def _check_rights(outbox: AnyOutbox) -> Iterator[Finding]:
    """Look whether the user may do what writers and relays do."""
    own = [outbox.dead_letters.full_name, outbox.backing.sweeps.full_name]
    others = [(database, name) for database, _, name in (each.partition(".") for each in own)]
    collection = outbox.backing.plain
    with pymongo.timeout(ANSWER_SECONDS):
        may = read_rights(collection.database.client)
    yield from judge_rights(may, (collection.database.name, collection.name), others)


def judge_rights(may: Allowed, collection: tuple[str, str], others: Iterable[tuple[str, str]]) -> Iterator[Finding]:
    """Judge what the server says that the user may do, by database and name of the collections."""
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


# -- the collection --------------------------------------------------------------------------------


def _check_collection(collection: Collection[dict[str, Any]], field: str, wanted: OutboxIndex) -> Iterator[Finding]:
    """Look at what the server says of the collection."""
    with pymongo.timeout(ANSWER_SECONDS):
        about = next(iter(collection.database.list_collections(filter={"name": collection.name})), None)
    yield from judge_kind(collection.full_name, about)
    if about is None or about.get("type", "collection") != "collection":
        return
    with pymongo.timeout(ANSWER_SECONDS):
        indexes = list(collection.list_indexes())
    yield from judge_indexes(collection.name, wanted, indexes)
    yield from judge_validator(about.get("options", {}), field)
    yield from _check_shard_key(collection)


def judge_kind(name: str, about: Document | None) -> Iterator[Finding]:
    """
    Judge whether documents can grow there, and stay.

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
    else:
        yield ok("collection", f"{name} is there.")


def judge_indexes(name: str, wanted: OutboxIndex, indexes: Iterable[Document]) -> Iterator[Finding]:
    """Judge whether the sweep has its index, and whether another one lets documents expire."""
    indexes = list(indexes)
    fits = [each for each in indexes if wanted.is_like(each)]
    if fits:
        yield ok("index", f"{fits[0]['name']} leads the sweep to what is pending.")
    else:
        options = {"name": wanted.name, "partialFilterExpression": wanted.condition}
        yield degraded(
            "index",
            "It is missing: each sweep reads the whole collection. The first delivery creates it, unless the user may "
            "not or a transaction stays open; with many documents create it in advance:",
            f"db.{name}.createIndex({json.dumps(dict(wanted.keys))}, {json.dumps(options)})",
        )
    for each in indexes:
        if "expireAfterSeconds" in each:
            yield degraded(
                "expiry",
                f"The index {each['name']} removes documents by their age, with what is pending in them; let them live "
                "longer than any outage of the broker.",
            )


def judge_validator(options: Document, field: str) -> Iterator[Finding]:
    """Judge a validator whose schema lists its properties, and not the field."""
    schema = options.get("validator", {}).get("$jsonSchema")
    if options.get("validationLevel") == "off" or not isinstance(schema, Mapping):
        return
    is_closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    if not is_closed or field in schema.get("properties", {}):
        yield ok("validator", f"The schema of the collection's validator lets {field} pass.")
        return
    report = degraded if options.get("validationAction") == "warn" else failing
    yield report(
        "validator",
        f"The collection's validator refuses, or logs, every write that has entries; allow {field} in its properties, "
        "as an object.",
    )


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
    """Judge what another shard key than the `_id` costs: relays address documents by their `_id`."""
    if key is None or list(key) == ["_id"]:
        return ok("shard_key", "The collection is not sharded, or by the _id.")
    return degraded(
        "shard_key",
        f"Documents are distributed by {', '.join(key)}: each claim and removal, which know the _id alone, asks every "
        "shard. See to it that an _id is unique among all shards, which MongoDB does not.",
    )


# -- what is pending -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """
    Pending entries of one app and name.

    Attributes:
        app: whose they are; empty where the entry does not say.
        name: of the task; empty for events.
        entries: how many.
        seconds: age of the oldest by the server's clock, as far as it can be read.
    """

    app: str
    name: str
    entries: int
    seconds: float


def _read_kinds(collection: Collection[dict[str, Any]], field: str) -> list[Kind]:
    """Return what is pending, by app and task, in the first documents that the index has."""
    entry = "$entries"
    is_task = {"$eq": [f"{entry}.kind", "task"]}
    pipeline: list[dict[str, Any]] = [
        {"$match": {f"{field}.count": {"$gt": 0}}},
        {"$limit": _DOCUMENTS_MAX},
        {"$project": {"entries": f"${field}.events"}},
        {"$match": {"entries": {"$type": "array"}}},
        {"$unwind": entry},
        {
            "$group": {
                "_id": {"app": f"{entry}.app", "name": {"$cond": [is_task, f"{entry}.name", ""]}},
                "count": {"$sum": 1},
                "at": {"$min": {"$convert": {"input": f"{entry}.at", "to": "date", "onError": None, "onNull": None}}},
            }
        },
        {"$set": {"seconds": {"$divide": [{"$subtract": ["$$NOW", "$at"]}, 1000]}}},
        {"$sort": {"count": -1}},
    ]
    with pymongo.timeout(ANSWER_SECONDS):
        found = list(collection.aggregate(pipeline))
    return [
        Kind(_text(each["_id"].get("app")), _text(each["_id"].get("name")), each["count"], each["seconds"] or 0.0)
        for each in found
    ]


def _text(value: object) -> str:
    """What somebody else may have written in the place of a name."""
    return value if isinstance(value, str) else ""


def _check_contents(outbox: AnyOutbox) -> Iterator[Finding]:
    """Look for entries that nobody here can send, and for a document that is nearly full."""
    backing, options = outbox.backing, outbox.backing.options
    apps = [app or "" for app in outbox.publisher.apps]
    kinds = _read_kinds(backing.plain, backing.field.name)
    own = [each for each in kinds if not each.app or each.app in apps]
    late = late_after(outbox.sweep_after, options.sweep_every)
    yield from judge_apps([each for each in kinds if each not in own], late)
    if not options.foreign_tasks:
        yield from judge_tasks([each for each in own if each.name and each.name not in outbox.app.tasks])
    large = {backing.field.count: {"$gt": 0}, "$expr": {"$gt": [{"$bsonSize": "$$ROOT"}, _LARGE_BYTES]}}
    with pymongo.timeout(ANSWER_SECONDS):
        heavy = backing.plain.find_one(large, {"_id": 1})
    if heavy:
        yield failing(
            "size",
            f"Document {heavy['_id']!r} has more than 12 of the 16 MB that MongoDB allows, and something is pending in "
            "it: soon it cannot be written to. Have its entries sent.",
        )


def judge_apps(others: Iterable[Kind], late: float) -> Iterator[Finding]:
    """Judge entries of other apps, at which a relay of this one stops."""
    by_app: dict[str, list[Kind]] = {}
    for each in others:
        by_app.setdefault(each.app, []).append(each)
    for app, kinds in sorted(by_app.items()):
        seconds = max(each.seconds for each in kinds)
        entries = number(sum(each.entries for each in kinds), "entry waits", "entries wait")
        report = failing if seconds > late else degraded
        yield report(
            "apps",
            f"{entries} for the app {app!r}, the oldest for {duration(seconds)}, and what was written after them, "
            f"too: run beat and a worker of that app, or make this outbox with delivers=[{app!r}].",
        )
    if not by_app:
        yield ok("apps", "Nothing waits for another app.")


def judge_tasks(unknown: Iterable[Kind]) -> Iterator[Finding]:
    """Judge pending tasks that this app does not know."""
    names = sorted({each.name for each in unknown})
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield failing(
            "tasks",
            f"This app does not know {', '.join(names[:_NAMED])}{more}, which is pending: import the module, for "
            "example with include=[...], or make the outbox with foreign_tasks=True if another app runs it.",
        )


# -- workers ---------------------------------------------------------------------------------------


def sweep_queue(app: Celery) -> str:
    """Return the queue to which the app sends its sweep."""
    queue = app.amqp.router.route({}, SWEEP_TASK).get("queue")
    return str(getattr(queue, "name", queue) or app.conf.task_default_queue)


def judge_workers(queue: str, said: WorkerReplies | str | None) -> Iterator[Finding]:
    """
    Judge workers that take the sweep from its queue, and drop it.

    Args:
        queue: of the sweep.
        said: what workers say, why they cannot be asked, or None where the broker does not answer.
    """
    if isinstance(said, str):
        yield degraded("workers", f"They cannot be asked over this broker: {said}")
    if not isinstance(said, WorkerReplies):
        return
    for worker, queues in sorted(said.queues.items()):
        if queue in queues and worker in said.tasks and SWEEP_TASK not in said.tasks[worker]:
            yield failing(
                "sweep_task",
                f"Worker {worker} consumes the queue {queue} and lacks {SWEEP_TASK}: it drops the sweeps that it gets. "
                "Let it import the module that makes the outbox, or route that task to a queue of its own.",
            )
