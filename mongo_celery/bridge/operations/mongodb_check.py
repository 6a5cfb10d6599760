"""Preflight of MongoDB: topology, rights, sources, the change stream, images, the reach of the oplog, and TLS."""

from __future__ import annotations

import inspect
import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from types import CodeType
from typing import TYPE_CHECKING, Any

import pymongo
from kombu.utils.url import parse_url
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.uri_parser import split_hosts

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.grants import roles_of
from mongo_celery.bridge.operations.judgement import NAMED, listed
from mongo_celery.bridge.stream.cursor import Position, open_cursor
from mongo_celery.bridge.stream.reactions import Reaction, classify_error, final_error
from mongo_celery.bridge.stream.source import Scope, Selector, Source
from mongo_celery.errors import ConfigurationError, DeploymentError, TopologyError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS, error_sentence
from mongo_celery.mongo.oplog import NEARLY_FULL, Oplog, check_topology, oplog_fill, read_oplog
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed, read_rights
from mongo_celery.mongo.verdicts import ErrorContext, Verdict, judge_error
from mongo_celery.quantities import duration

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

Client = MongoClient[dict[str, Any]]

OPLOG_HOURS_MIN = 24
"""Below this reach of a full oplog a listener that is away for a night loses history."""

_STATE_COLLECTIONS = ("leases", "handlers", "partitions", "dead_letters", "backlog", "bridge_keys", "drops")
_STATE_ACTIONS = ("find", "insert", "update", "remove")
_WANTS_IMAGES = ("whenAvailable", "required")
_SERVER_DATABASES = frozenset({"admin", "config", "local"})
_STREAMED = "collection"
_KINDS = {"view": "a view", "timeseries": "a time series"}
_PLAIN_BROKERS = {"redis", "amqp", "pyamqp", "librabbitmq", "sentinel"}


def check_mongodb(client: Client, wiring: Wiring) -> Iterator[Finding]:
    """Check what a bridge needs of its cluster; end early where nothing else can be tried."""
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
    roles = _roles(wiring, user)
    yield _judge_state_rights(wiring, user, roles)
    yield from _check_stream(client, wiring, roles)
    yield from _check_oplog(client, wiring)


# -- rights on the state database ------------------------------------------------------------------


def _roles(wiring: Wiring, user: Allowed) -> Sequence[str]:
    """Return the roles of `grants` that the user has whole; none where the sources are not known."""
    try:
        return roles_of(wiring, user) if wiring.handlers else ()
    except ConfigurationError:
        return ()


def _judge_state_rights(wiring: Wiring, user: Allowed, roles: Sequence[str]) -> Finding:
    """Accept a user who may write everywhere, or has one of the roles of `grants` whole."""
    database = wiring.options.database
    missing = [
        f"{action} on {name}"
        for name in _STATE_COLLECTIONS
        for action in _STATE_ACTIONS
        if not user.may(action, {"db": database, "collection": name})
    ]
    if not missing:
        return ok("state_rights", f"Database {database!r} can be read and written.")
    if roles:
        return ok("state_rights", f"This user has all rights of a bridge's {' and '.join(roles)}.")
    return failing(
        "state_rights",
        f"The MongoDB user lacks {listed(missing)} in database {database!r}. Grant readWrite there, or a role that "
        f"`{wiring.line.changes('grants')}` prints.",
    )


# -- the change stream and its images --------------------------------------------------------------


def _check_stream(client: Client, wiring: Wiring, roles: Sequence[str]) -> Iterator[Finding]:
    if not wiring.handlers:
        return
    try:
        selectors, scope = wiring.stream()
    except ConfigurationError as failure:
        yield failing("sources", str(failure))
        return
    yield _try_stream(client, scope, roles)
    yield from _check_images(client, wiring, selectors)


def _try_stream(client: Client, scope: Scope, roles: Sequence[str]) -> Finding:
    where = str(Source(scope.database, scope.collection))
    try:
        with (
            pymongo.timeout(ANSWER_SECONDS),
            closing(open_cursor(client, scope, Position(None, None))),
        ):
            return ok("change_stream", f"Change stream opened on {where}.")
    except PyMongoError as failure:
        if judge_error(failure) is Verdict.ACCESS and "operator" in roles:
            return degraded(
                "change_stream",
                f"This user has an operator's rights, and not a listener's to open the change stream on {where}. Run "
                "the check as the listener's user, too.",
            )
        reaction = classify_error(failure, opening=True)
        if reaction in {Reaction.REOPEN, Reaction.UNKNOWN}:
            concern = ErrorContext(f"a change stream on {where}", "changeStream and find there")
            text = f"The change stream did not open on {where}: {error_sentence(failure, concern)}"
            return failing("change_stream", text)
        return failing("change_stream", str(final_error(reaction, failure, where)))


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
        yield degraded("images", f"Cannot see which collections keep images; grant listCollections. {short(failure)}.")
        return
    words = " and ".join(asked)
    if not lacking:
        yield ok("images", f"The watched collections keep the images that {words} asks for.")
        return
    report = failing if "required" in asked.values() else degraded
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
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
            fill = oplog_fill(client)
    except DeploymentError as failure:
        starts = [wiring.options.start_from, *(handler.start(wiring.options) for handler in wiring.handlers)]
        if "oldest" in starts and not _has_started(wiring):
            yield failing("oplog_rights", str(failure))
        else:
            yield degraded("oplog_rights", f"The reach of the oplog cannot be read here. {failure}")
        return
    yield ok("oplog_rights", "The reach of the oplog can be read.")
    yield _judge_window(oplog, fill)


def _has_started(wiring: Wiring) -> bool:
    try:
        return (wiring.store.leases.read() or {}).get("startAtOperationTime") is not None
    except OperationFailure:  # no right to read the state; a finding of its own says so
        return False


def _judge_window(oplog: Oplog, fill: float | None) -> Finding:
    text = f"The oplog reaches {duration(oplog.window_seconds)} back"
    if oplog.window_seconds / 3600 >= OPLOG_HOURS_MIN:
        return ok("oplog_window", f"{text}: a listener may be away for so long.")
    if fill is not None and fill < NEARLY_FULL:
        return ok("oplog_window", f"{text}, to the beginning of this cluster; {fill:.0%} of it is in use.")
    return degraded(
        "oplog_window",
        f"{text} only. If the listener is away for longer, changes are lost. Enlarge it "
        "with replSetResizeOplog, or set minRetentionHours.",
    )


# -- sources ------------------------------------------------------------------------------------


def check_sources(wiring: Wiring) -> Iterator[Finding]:
    """Look for the collections that handlers name, as far as the user may see them."""
    try:
        selectors, _ = wiring.stream()
    except ConfigurationError:
        return  # a finding of its own says so
    for handler, selector in zip(wiring.handlers, selectors, strict=True):
        yield from judge_feedback(handler, selector, wiring.default_database)
    wanted = {selector.name: selector.sources for selector in selectors}
    databases = {source.database for sources in wanted.values() for source in sources if source.database}
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            there = {
                name: {
                    str(each["name"]): str(each["type"])
                    for each in wiring.client[name].list_collections(nameOnly=True, authorizedCollections=True)
                }
                for name in sorted(databases)
            }
    except OperationFailure as failure:
        yield degraded("sources", f"Cannot see which collections exist; grant listCollections. {short(failure)}.")
        return
    yield from judge_sources(wanted, there)


def judge_sources(wanted: Mapping[str, Iterable[Source]], there: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """
    Findings from what handlers listen to.

    Args:
        wanted: sources by handler.
        there: the kinds of collections, by their names, by database.
    """
    named: dict[Source, list[str]] = {}
    for handler, sources in sorted(wanted.items()):
        for source in sources:
            named.setdefault(source, []).append(handler)
    absent, foreign = [], False
    for source, handlers in named.items():
        found = there.get(source.database or "", {})
        kind = found.get(source.collection or "", "")
        if kind and kind != _STREAMED:
            foreign = True
            yield failing(
                "sources",
                f"{listed(handlers)} {_listens(handlers)} to {source}, which is {_KINDS.get(kind, kind)}: MongoDB has "
                "no changes of it. Listen to the collection that is written to.",
            )
        elif source.database is not None and not (kind or (found and source.collection is None)):
            absent.append((source, handlers))
    for source, handlers in absent[:NAMED]:
        meant = nearest(source.collection or "", sorted(there.get(source.database or "", {})))
        yield degraded(
            "sources",
            f"{listed(handlers)} {_listens(handlers)} to {source}, which does not exist{meant}: nothing comes until "
            "somebody writes there. Check for a typo, or ignore this if the collection is created later.",
        )
    if len(absent) > NAMED:
        yield degraded("sources", f"{len(absent) - NAMED} more that handlers listen to do not exist.")
    if named and not absent and not foreign:
        yield ok("sources", "All watched collections exist.")


def judge_feedback(handler: Handler, selector: Selector, default_database: str | None) -> Iterator[Finding]:
    """Warn of a handler whose code fences its own source by name; what it writes otherwise is not known."""
    if selector.filter.fields is not None or not selector.filter.wants_operation("update"):
        return
    names, texts = _words_of(inspect.unwrap(handler.function).__code__)
    for source in selector.sources:
        written = {str(source), source.collection if source.database == default_database else str(source)}
        if source.collection is not None and "fenced" in names and written & texts:
            yield degraded(
                "feedback",
                f"{handler.name} listens to {source}, and its code has fenced() beside that name: what it writes there "
                "is a change that it is given next. Watch only other fields, with fields=.",
            )


def _words_of(code: CodeType) -> tuple[set[str], set[str | None]]:
    """Return the attributes and the texts that code uses, with the functions in it."""
    names, texts = set(code.co_names), {each for each in code.co_consts if isinstance(each, str)}
    below = [_words_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return names.union(*(each[0] for each in below)), set[str | None]().union(texts, *(each[1] for each in below))


def _listens(handlers: Sequence[str]) -> str:
    return "listens" if len(handlers) == 1 else "listen"


# -- encryption ------------------------------------------------------------------------------------


def check_encryption(wiring: Wiring) -> Iterator[Finding]:
    """Look for documents and passwords that leave this machine in plain text."""
    yield _judge_hosts("mongodb_tls", "MongoDB", plain_mongodb_hosts(wiring.url), "add tls=true to its URL")
    conf = wiring.app.conf
    given = conf.broker_write_url or conf.broker_url or ""
    urls = given.split(";") if isinstance(given, str) else [str(url) for url in given]
    hosts = [] if conf.broker_use_ssl else [host for url in urls for host in plain_broker_hosts(url)]
    yield _judge_hosts("broker_tls", "the broker", hosts, "use rediss:// or amqps://, or broker_use_ssl")


def _judge_hosts(code: str, server: str, hosts: Sequence[str], remedy: str) -> Finding:
    if not hosts:
        return ok(code, f"The connection to {server} uses TLS or is local.")
    return degraded(
        code,
        f"Passwords and documents travel to {server} at {', '.join(hosts)} in plain text. Unless the network protects "
        f"them, {remedy}.",
    )


def plain_mongodb_hosts(url: str) -> list[str]:
    """Return the hosts of a MongoDB URL that are neither encrypted nor on this machine. Asks no DNS."""
    scheme, _, rest = url.partition("://")
    address, _, options = rest.partition("?")
    asked = {name.lower(): value.lower() for name, _, value in (each.partition("=") for each in options.split("&"))}
    tls = asked.get("tls", asked.get("ssl"))
    if tls in ("true", "1") or (tls is None and scheme == "mongodb+srv"):
        return []
    return [host for host, _ in split_hosts(address.rpartition("@")[2].partition("/")[0]) if not _is_here(host)]


def plain_broker_hosts(url: str) -> list[str]:
    """Return the hosts of a broker URL that are neither encrypted nor on this machine."""
    try:
        found = parse_url(url.strip()) if "://" in url else {}
    except ValueError:  # the check of the broker says so
        return []
    if found.get("transport") not in _PLAIN_BROKERS:
        return []
    return [host for each in str(found["hostname"] or "").split(",") if not _is_here(host := each.partition(":")[0])]


def _is_here(host: str | None) -> bool:
    if not host or host == "localhost" or host.endswith(".sock"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
