"""Preflight of MongoDB: topology, rights, the reach of the oplog, images, and test commands."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.operations.findings import Finding, error, ok, warning
from mongo_celery.bridge.stream.reactions import Reaction, final_error, reaction_to
from mongo_celery.bridge.stream.source import Scope, Selector, Source
from mongo_celery.errors import ConfigurationError, DeploymentError, MongoCeleryError, TopologyError
from mongo_celery.mongo.opening import ANSWER_SECONDS, translated
from mongo_celery.mongo.oplog import Oplog, check_topology, read_oplog
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Code, Concern

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Client = MongoClient[dict[str, Any]]

OPLOG_HOURS_MIN = 24
"""Below this reach of a full oplog a listener that is away for a night loses history."""

_STATE_COLLECTIONS = ("leases", "subscriptions", "partitions", "dead_letters")
_NEARLY_FULL = 0.9
_WANTS_IMAGES = ("whenAvailable", "required")
_SERVER_DATABASES = frozenset({"admin", "config", "local"})


def check_mongodb(client: Client, wiring: Wiring) -> Iterator[Finding]:
    """What a bridge needs of its cluster; ends early where nothing else can be tried."""
    try:
        check_topology(client)
    except TopologyError as failure:
        yield error("topology", str(failure))
        return
    name = client.admin.command("hello").get("setName")
    kind = f"replica set {name}" if name else "sharded cluster"
    yield ok("topology", f"{kind}, MongoDB {client.server_info()['version']}.")
    yield from _check_state_rights(client, wiring.options.database)
    yield from _check_stream(client, wiring)
    yield from _check_oplog(client, wiring)
    yield from _check_test_commands(client)


# -- rights on the state database ------------------------------------------------------------------


def _check_state_rights(client: Client, database: str) -> Iterator[Finding]:
    missing = []
    for collection in _STATE_COLLECTIONS:
        refused = _refusal(client, database, collection)
        if refused is not None:
            missing.append(f"{collection} ({refused})")
    if missing:
        yield error(
            "state_rights",
            f"The MongoDB user cannot read and write {', '.join(missing)} in database {database!r}: grant readWrite "
            "there.",
        )
    else:
        yield ok("state_rights", f"Database {database!r} can be read and written.")


def _refusal(client: Client, database: str, name: str) -> str | None:
    """Why a collection of the state cannot be read and written, by trying it in a transaction that is aborted."""
    collection = client[database][name]
    # No bridge, subscription or partition has such an _id; nothing is stored anyway.
    probe = {"_id": f"/check/{secrets.token_hex(8)}"}
    with pymongo.timeout(ANSWER_SECONDS), client.start_session() as session:
        session.start_transaction()
        try:
            collection.find_one(probe, session=session)
            collection.insert_one(dict(probe), session=session)
            collection.update_one(probe, {"$set": {"checked": True}}, session=session)
            collection.delete_one(probe, session=session)
        except OperationFailure as failure:
            # Before 4.4 a collection cannot begin in a transaction.
            if failure.code == Code.OperationNotSupportedInTransaction:
                return None
            return short(failure)
        finally:
            if session.in_transaction:
                session.abort_transaction()
    return None


# -- the change stream and its images --------------------------------------------------------------


def _check_stream(client: Client, wiring: Wiring) -> Iterator[Finding]:
    if not wiring.handlers:
        return
    try:
        selectors, scope = wiring.stream()
    except ConfigurationError as failure:
        yield error("sources", str(failure))
        return
    yield _try_stream(client, scope)
    yield from _check_images(client, wiring, selectors)


def _try_stream(client: Client, scope: Scope) -> Finding:
    where = str(Source(scope.database, scope.collection))
    try:
        with (
            pymongo.timeout(ANSWER_SECONDS),
            closing(scope.opened_on(client).watch(list(scope.pipeline), **scope.options)),
        ):
            return ok("change_stream", f"It opens on {where}.")
    except PyMongoError as failure:
        reaction = reaction_to(failure, opening=True)
        if reaction in {Reaction.REOPEN, Reaction.UNKNOWN}:
            concern = Concern(f"a change stream on {where}", "changeStream and find there")
            return error("change_stream", f"It did not open on {where}: {translated(failure, concern)}")
        return error("change_stream", str(final_error(reaction, failure, where)))


def _check_images(client: Client, wiring: Wiring, selectors: Iterable[Selector]) -> Iterator[Finding]:
    options = wiring.options
    asked = {
        f"{name}={value!r}": value
        for name, value in (
            ("full_document", options.full_document),
            ("full_document_before_change", options.full_document_before_change),
        )
        if value in _WANTS_IMAGES
    }
    if not asked:
        return
    try:
        lacking = sorted(_without_images(client, selectors, options.database))
    except OperationFailure as failure:
        yield warning("images", f"Cannot see which collections keep images; grant listCollections. {short(failure)}.")
        return
    words = " and ".join(asked)
    if not lacking:
        yield ok("images", f"The watched collections keep the images that {words} asks for.")
        return
    report = error if "required" in asked.values() else warning
    yield report(
        "images",
        f"{words} asks for images, which {', '.join(lacking)} does not keep: run collMod with "
        "{changeStreamPreAndPostImages: {enabled: true}} there, or create the collection with it.",
    )


def _without_images(client: Client, selectors: Iterable[Selector], state_database: str) -> set[str]:
    sources = {source for selector in selectors for source in selector.sources}
    lacking: set[str] = set()
    for source in sources:
        names = [source.database] if source.database else client.list_database_names()
        for name in names:
            if name not in _SERVER_DATABASES and name != state_database:
                lacking |= _collections_without_images(client, name, source.collection)
    return lacking


def _collections_without_images(client: Client, database: str, collection: str | None) -> set[str]:
    query: dict[str, Any] = {"name": collection} if collection else {"type": "collection"}
    with pymongo.timeout(ANSWER_SECONDS):
        found = list(client[database].list_collections(filter=query))
    lacking = {
        f"{database}.{each['name']}"
        for each in found
        if not each["name"].startswith("system.")
        and not each.get("options", {}).get("changeStreamPreAndPostImages", {}).get("enabled")
    }
    if collection and not found:
        lacking.add(f"{database}.{collection} (not created yet)")
    return lacking


# -- the oplog -------------------------------------------------------------------------------------


def _check_oplog(client: Client, wiring: Wiring) -> Iterator[Finding]:
    lease = _lease(wiring)
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
    except DeploymentError as failure:
        if wiring.options.start_from == "oldest" and lease.get("startAtOperationTime") is None:
            yield error("oplog_rights", str(failure))
        else:
            yield warning("oplog_rights", f"How far the oplog reaches back cannot be seen here. {failure}")
        return
    yield ok("oplog_rights", "The oplog can be read.")
    yield _judge_window(oplog, _oplog_fill(client))
    position = lease.get("clusterTime") or lease.get("startAtOperationTime")
    if position is not None:
        yield _judge_position(oplog, position)


def _lease(wiring: Wiring) -> Mapping[str, Any]:
    try:
        return wiring.store.leases.read() or {}
    except OperationFailure:
        return {}  # no right to read the state; a finding of its own says so


def _judge_window(oplog: Oplog, fill: float | None) -> Finding:
    hours = oplog.window_seconds / 3600
    text = f"It reaches {hours:.1f} h back"
    if hours >= OPLOG_HOURS_MIN:
        return ok("oplog_window", f"{text}: a listener may be away for so long.")
    if fill is not None and fill < _NEARLY_FULL:
        return ok("oplog_window", f"{text}, to the beginning of this cluster; {fill:.0%} of it are in use.")
    return warning(
        "oplog_window",
        f"{text} only: if the listener is away for longer, or a partition stands still, changes are lost. Enlarge it "
        "with replSetResizeOplog, or set minRetentionHours.",
    )


def _judge_position(oplog: Oplog, position: Timestamp) -> Finding:
    if position < oplog.first:
        return error(
            "history",
            f"The stored position, {position.as_datetime().isoformat()}, lies before the oldest oplog entry: changes "
            "in between cannot be read any more. Start the listener once with --on-history-lost oldest or now.",
        )
    return ok("history", "The oplog reaches back to the stored position.")


def _oplog_fill(client: Client) -> float | None:
    """Share of the oplog's size that is in use, or None where it cannot be seen."""
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            stats = client.get_database("local").command("collStats", "oplog.rs")
    except (PyMongoError, MongoCeleryError):
        return None
    return float(stats["size"]) / float(stats["maxSize"]) if stats.get("maxSize") else None


def _check_test_commands(client: Client) -> Iterator[Finding]:
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            answer = client.admin.command("getParameter", 1, enableTestCommands=1)
    except OperationFailure:
        return  # no right to ask: then it is not for this user to judge
    if answer.get("enableTestCommands"):
        yield warning(
            "test_commands",
            "mongod runs with enableTestCommands=1, by which anybody who may log in can make it fail; leave it out in "
            "production.",
        )
