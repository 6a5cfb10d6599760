"""Preflight of MongoDB: topology, rights, sources, the change stream, images, the reach of the oplog, and TLS."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pymongo
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.grants import find_missing, find_roles, list_state_rights
from mongo_celery.bridge.stream.cursor import EventCursor, Position
from mongo_celery.bridge.stream.source import Scope, Selector, Source
from mongo_celery.bridge.stream.verdicts import PASSING, final_error, judge_stream_error
from mongo_celery.errors import ConfigurationError, DeploymentError, TopologyError
from mongo_celery.findings import NAMED, Finding, degraded, failing, list_some, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS, error_sentence
from mongo_celery.mongo.oplog import NEARLY_FULL, Oplog, check_topology, oplog_fill, read_oplog
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed, read_rights
from mongo_celery.mongo.verdicts import ErrorContext, Verdict, judge_error
from mongo_celery.quantities import duration

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Client = MongoClient[dict[str, Any]]
Collections = Mapping[str, Mapping[str, Any]]
"""The server's facts about collections, by name."""

OPLOG_HOURS_MIN = 24
"""If a full oplog covers less time, a listener that is down for a night loses changes."""

_WANTS_IMAGES = ("whenAvailable", "required")
_SERVER_DATABASES = frozenset({"admin", "config", "local"})
_STREAMED = "collection"
_NOT_CREATED = " (not created yet)"
_KINDS = {"view": "a view", "timeseries": "a time series"}
_PLAIN_SCHEMES = {"mongodb", "mongodb+srv", "redis", "amqp", "pyamqp", "librabbitmq", "sentinel"}


def check_mongodb(client: Client, wiring: Wiring) -> Iterator[Finding]:
    """Check the cluster of a bridge. End early if MongoDB cannot be used at all."""
    try:
        check_topology(client)
    except TopologyError as failure:
        yield failing("topology", str(failure))
        return
    name = client.admin.command("hello").get("setName")
    kind = f"replica set {name}" if name else "sharded cluster"
    yield ok("topology", f"{kind}, MongoDB {client.server_info()['version']}.")
    with pymongo.timeout(ANSWER_SECONDS):
        user = read_rights(client)
    yield from _check_handlers(client, wiring, user)
    yield from _check_oplog(client, wiring)


def _check_handlers(client: Client, wiring: Wiring, user: Allowed) -> Iterator[Finding]:
    """Check rights, then change stream and collections, which depend on the handlers' sources."""
    try:
        stream = wiring.stream() if wiring.handlers else None
    except ConfigurationError as failure:
        stream = None
        yield failing("sources", str(failure))
    roles = find_roles(wiring, user) if stream else ()  # the roles' rights are unknown without the sources
    yield _judge_state_rights(wiring, user, roles)
    if stream:
        selectors, scope = stream
        yield _try_stream(client, scope, roles)
        yield from _check_collections(client, wiring, selectors)


# -- what handlers need ----------------------------------------------------------------------------


def _judge_state_rights(wiring: Wiring, user: Allowed, roles: Sequence[str]) -> Finding:
    """Accept a user with a listener's rights on the state database, or with one complete role of `grants`."""
    database = wiring.options.database
    missing = find_missing(list_state_rights(wiring, "listener"), user)
    if not missing:
        return ok("state_rights", f"This user can read and write database {database!r}.")
    if roles:
        return ok("state_rights", f"This user has all rights of a bridge's {' and '.join(roles)}.")
    return failing(
        "state_rights",
        f"The MongoDB user lacks {list_some(missing)}. Grant it readWrite on database {database!r}, or a role that "
        "this command prints:",
        wiring.line.changes("grants"),
    )


def _try_stream(client: Client, scope: Scope, roles: Sequence[str]) -> Finding:
    where = str(Source(scope.database, scope.collection))
    try:
        with pymongo.timeout(ANSWER_SECONDS), EventCursor(client, scope, Position(None, None)):
            return ok("change_stream", f"The change stream on {where} opens.")
    except PyMongoError as failure:
        if judge_error(failure) is Verdict.ACCESS and "operator" in roles:
            return degraded(
                "change_stream",
                f"This user has the rights of an operator, which do not include the change stream on {where}. To check "
                "the stream, run this command with the URL of the listener's user.",
            )
        verdict = judge_stream_error(failure, opening=True)
        if verdict in PASSING:
            concern = ErrorContext(f"a change stream on {where}", "changeStream and find there")
            text = f"The change stream on {where} does not open: {error_sentence(failure, concern)}"
            return failing("change_stream", text)
        return failing("change_stream", str(final_error(verdict, failure, where)))


def _check_collections(client: Client, wiring: Wiring, selectors: Iterable[Selector]) -> Iterator[Finding]:
    """Check the watched collections and their images, as far as the user may see them."""
    options = wiring.options
    wanted = {selector.name: selector.sources for selector in selectors}
    sources = {source for each in wanted.values() for source in each}
    given = {name: getattr(options, name) for name in ("full_document", "full_document_before_change")}
    asked = {name: value for name, value in given.items() if value in _WANTS_IMAGES}
    how: dict[str, Any] = {} if asked else {"nameOnly": True, "authorizedCollections": True}  # needs no right
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            watched = {source.database for source in sources}
            databases = client.list_database_names() if asked and None in watched else filter(None, watched)
            there: dict[str, Collections] = {
                name: {str(each["name"]): each for each in client[name].list_collections(**how)}
                for name in sorted(databases)
                if name not in {*_SERVER_DATABASES, options.database}
            }
    except OperationFailure as failure:
        code = "images" if asked else "sources"
        text = f"The sources are not checked, because this user may not list collections: {short(failure)}. Grant it "
        yield degraded(code, f"{text}listCollections.")
        return
    yield from judge_sources(wanted, there)
    if asked:
        yield _judge_images(sources, there, asked)


def _judge_images(sources: Iterable[Source], there: Mapping[str, Collections], asked: Mapping[str, str]) -> Finding:
    lacking = {
        f"{database}.{name}"
        for source in sources
        for database in ([source.database] if source.database else there)
        for name, each in there.get(database, {}).items()
        if source.covers(database, name) and each["type"] == _STREAMED and not name.startswith("system.")
        if not each.get("options", {}).get("changeStreamPreAndPostImages", {}).get("enabled")
    }
    lacking |= {
        f"{source}{_NOT_CREATED}"
        for source in sources
        if source.database and source.collection and source.collection not in there.get(source.database, {})
    }
    words = " and ".join(f"{name}={value!r}" for name, value in asked.items())
    if not lacking:
        return ok("images", f"The watched collections keep the images that {words} needs.")
    text = f"{words} needs images, but these collections keep none: {', '.join(sorted(lacking))}. Type in mongosh, for "
    text += f"each of them: {_make_image_command(min(lacking))}"
    return (failing if "required" in asked.values() else degraded)("images", text)


def _make_image_command(namespace: str) -> str:
    """Return the command of mongosh that makes a collection keep images, or creates one that does."""
    name, is_new = namespace.removesuffix(_NOT_CREATED), namespace.endswith(_NOT_CREATED)
    database, _, collection = name.partition(".")
    options = {"create" if is_new else "collMod": collection, "changeStreamPreAndPostImages": {"enabled": True}}
    return f"db.getSiblingDB({json.dumps(database)}).runCommand({json.dumps(options)})"


def judge_sources(wanted: Mapping[str, Iterable[Source]], there: Mapping[str, Collections]) -> Iterator[Finding]:
    """
    Return findings about the handlers' sources.

    Args:
        wanted: sources by handler.
        there: collections by name, by database.
    """
    sources: dict[Source, list[str]] = {}
    for handler, watched in sorted(wanted.items()):
        for source in watched:
            sources.setdefault(source, []).append(handler)
    absent, problems = [], 0
    for source, handlers in sources.items():
        found = there.get(source.database or "", {})
        kind = found.get(source.collection or "", {}).get("type", "")
        fact = f"{list_some(handlers)} {'listens' if len(handlers) == 1 else 'listen'} to {source}, which"
        if kind and kind != _STREAMED:
            problems += 1
            text = f"{fact} is {_KINDS.get(kind, kind)}. MongoDB reports no changes of it. Watch a collection instead."
            yield failing("sources", text)
        elif source.database is not None and not (kind or (found and source.collection is None)):
            meant = nearest(source.collection or "", sorted(found))
            text = f"{fact} does not exist{meant}. It gets no changes until a program creates that collection. Check "
            absent.append(degraded("sources", f"{text}for a typo. If it is created later, nothing needs to be done."))
    yield from absent[:NAMED]
    if len(absent) > NAMED:
        yield degraded("sources", f"{len(absent) - NAMED} more sources do not exist.")
    if sources and not absent and not problems:
        yield ok("sources", "All watched collections exist.")


# -- the oplog -------------------------------------------------------------------------------------


def _check_oplog(client: Client, wiring: Wiring) -> Iterator[Finding]:
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
            fill = oplog_fill(client)
    except DeploymentError as failure:
        starts = [wiring.options.start_from, *(handler.start(wiring.options) for handler in wiring.handlers)]
        if "oldest" in starts and not _has_started(wiring):
            yield failing("oplog_rights", str(failure))
        else:
            yield degraded("oplog_rights", f"The age of the oplog's oldest entry cannot be read. {failure}")
        return
    yield ok("oplog_rights", "The age of the oplog's oldest entry can be read.")
    yield _judge_window(oplog, fill)


def _has_started(wiring: Wiring) -> bool:
    try:
        return (wiring.store.leases.read() or {}).get("startAtOperationTime") is not None
    except OperationFailure:  # without the right to read the state, which is another finding
        return False


def _judge_window(oplog: Oplog, fill: float | None) -> Finding:
    text = f"The oplog reaches {duration(oplog.window_seconds)} back"
    if oplog.window_seconds / 3600 >= OPLOG_HOURS_MIN:
        return ok("oplog_window", f"{text}, so a listener may be down for that long.")
    if fill is not None and fill < NEARLY_FULL:
        return ok("oplog_window", f"{text}, to the start of this cluster. {fill:.0%} of it is in use.")
    return degraded(
        "oplog_window",
        f"{text} only. If the listener is down for longer, changes are lost. Enlarge the oplog with "
        "replSetResizeOplog, or set minRetentionHours.",
    )


# -- encryption ------------------------------------------------------------------------------------


def check_encryption(wiring: Wiring) -> Iterator[Finding]:
    """Check for documents and passwords that leave this machine unencrypted."""
    conf = wiring.app.conf
    given = conf.broker_write_url or conf.broker_url or ""
    urls = given.split(";") if isinstance(given, str) else [str(url) for url in given]
    brokers = [] if conf.broker_use_ssl else [host for url in urls for host in find_plain_hosts(url)]
    for code, server, hosts, fix in (
        ("mongodb_tls", "MongoDB", find_plain_hosts(wiring.url), "add tls=true to its URL"),
        ("broker_tls", "the broker", brokers, "use rediss:// or amqps://, or broker_use_ssl"),
    ):
        if hosts:
            text = f"Passwords and documents are sent to {server} at {', '.join(hosts)} without encryption. "
            yield degraded(code, f"{text}Unless the network protects them, {fix}.")
        else:
            yield ok(code, f"The connection to {server} uses TLS or is local.")


def find_plain_hosts(url: str) -> list[str]:
    """Return hosts of a MongoDB or broker URL that are neither encrypted nor local. No DNS query is made."""
    scheme, _, rest = url.strip().partition("://")
    address, _, options = rest.partition("?")
    asked = {name.lower(): value.lower() for name, _, value in (each.partition("=") for each in options.split("&"))}
    tls = asked.get("tls", asked.get("ssl", "true" if scheme == "mongodb+srv" else "false"))
    if scheme not in _PLAIN_SCHEMES or tls in ("true", "1"):
        return []
    hosts = address.rpartition("@")[2].partition("/")[0].split(",")
    with suppress(ValueError):  # not an address: the server's check reports it
        return [host for each in hosts if (host := urlsplit(f"//{each}").hostname) and not _is_here(host)]
    return []


def _is_here(host: str) -> bool:
    if host == "localhost" or host.endswith(".sock"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
