"""Preflight of MongoDB: topology, rights, the reach of the oplog, images, and test commands."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.listener.horizon import SERIOUS, THRESHOLDS, remedy
from mongo_celery.bridge.operations.grants import roles_of
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.subscriptions import layouts_in_force, parse_lost_history, parse_name, parse_position
from mongo_celery.bridge.stream.cursor import Position, open_cursor
from mongo_celery.bridge.stream.reactions import Reaction, classify_error, final_error
from mongo_celery.bridge.stream.source import Scope, Selector, Source
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError, DeploymentError, TopologyError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS, error_sentence, open_session, with_majority
from mongo_celery.mongo.oplog import NEARLY_FULL, Oplog, check_topology, oplog_fill, read_oplog
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import read_rights
from mongo_celery.mongo.verdicts import Code, Concern, Verdict, brief, judge_error
from mongo_celery.quantities import duration

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Client = MongoClient[dict[str, Any]]

OPLOG_HOURS_MIN = 24
"""Below this reach of a full oplog a listener that is away for a night loses history."""

_STANDING = ("halted", "paused", "waiting", "retrying")
_STATE_COLLECTIONS = (
    "leases",
    "handlers",
    "partitions",
    "dead_letters",
    "backlog",
    "bridge_keys",
    "drops",
)
_WANTS_IMAGES = ("whenAvailable", "required")
_SERVER_DATABASES = frozenset({"admin", "config", "local"})


@dataclass(frozen=True, slots=True)
class History:
    """
    Where one subscription stands.

    Attributes:
        is_lost: whether it stands still since the oplog no longer holds its place.
        partition: the one that holds it there, and its `state`; None where nothing stands.
    """

    name: str
    place: Timestamp
    is_lost: bool = False
    partition: int | None = None
    state: str | None = None


def check_mongodb(client: Client, wiring: Wiring) -> Iterator[Finding]:
    """What a bridge needs of its cluster; ends early where nothing else can be tried."""
    try:
        check_topology(client)
    except TopologyError as failure:
        yield failing("topology", str(failure))
        return
    name = client.admin.command("hello").get("setName")
    kind = f"replica set {name}" if name else "sharded cluster"
    yield ok("topology", f"{kind}, MongoDB {client.server_info()['version']}.")
    yield from _check_state_rights(client, wiring)
    yield from _check_stream(client, wiring)
    yield from _check_oplog(client, wiring)
    yield from _check_test_commands(client)


# -- rights on the state database ------------------------------------------------------------------


def _check_state_rights(client: Client, wiring: Wiring) -> Iterator[Finding]:
    """Who may write everywhere may do everything; else the user has to have one of the roles of `grants` whole."""
    database = wiring.options.database
    missing = []
    for collection in _STATE_COLLECTIONS:
        refused = _refusal(client, database, collection)
        if refused is not None:
            missing.append(f"{collection} ({refused})")
    if not missing:
        yield ok("state_rights", f"Database {database!r} can be read and written.")
        return
    roles = _roles(client, wiring)
    if roles:
        yield ok("state_rights", f"This user has all rights of a bridge's {' and '.join(roles)}.")
        return
    yield failing(
        "state_rights",
        f"The MongoDB user cannot read and write {', '.join(missing)} in database {database!r}: grant readWrite "
        f"there, or a role that `{wiring.line.changes('grants')}` prints.",
    )


def _roles(client: Client, wiring: Wiring) -> Sequence[str]:
    """The roles of `grants` that the user has whole; none where it cannot be told."""
    if not wiring.handlers:
        return ()
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            return roles_of(wiring, read_rights(client))
    except (ConfigurationError, PyMongoError):
        return ()


def _refusal(client: Client, database: str, name: str) -> str | None:
    """Why a collection of the state cannot be read and written, by trying it in a transaction that is aborted."""
    collection = with_majority(client[database][name])
    # No bridge, subscription or partition has such an _id; nothing is stored anyway.
    probe = {"_id": f"/check/{secrets.token_hex(8)}"}
    with pymongo.timeout(ANSWER_SECONDS), open_session(client) as session:
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
            return brief(failure)
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
        yield failing("sources", str(failure))
        return
    yield _try_stream(client, wiring, scope)
    yield from _check_images(client, wiring, selectors)


def _try_stream(client: Client, wiring: Wiring, scope: Scope) -> Finding:
    where = str(Source(scope.database, scope.collection))
    try:
        with (
            pymongo.timeout(ANSWER_SECONDS),
            closing(open_cursor(client, scope, Position(None, None))),
        ):
            return ok("change_stream", f"It opens on {where}.")
    except PyMongoError as failure:
        if judge_error(failure) is Verdict.ACCESS and "operator" in _roles(client, wiring):
            return degraded(
                "change_stream",
                f"This user has an operator's rights, and not a listener's to open it on {where}: run the check as the "
                "listener's user, too.",
            )
        reaction = classify_error(failure, opening=True)
        if reaction in {Reaction.REOPEN, Reaction.UNKNOWN}:
            concern = Concern(f"a change stream on {where}", "changeStream and find there")
            return failing("change_stream", f"It did not open on {where}: {error_sentence(failure, concern)}")
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
    lease = _lease(wiring)
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            oplog = read_oplog(client)
    except DeploymentError as failure:
        starts = [wiring.options.start_from, *(handler.start(wiring.options) for handler in wiring.handlers)]
        if "oldest" in starts and lease.get("startAtOperationTime") is None:
            yield failing("oplog_rights", str(failure))
        else:
            yield degraded("oplog_rights", f"How far the oplog reaches back cannot be seen here. {failure}")
        return
    yield ok("oplog_rights", "How far the oplog reaches back can be seen.")
    fill = _oplog_fill(client)
    yield _judge_window(oplog, fill)
    yield from judge_histories(_histories(wiring, lease), oplog, wiring.line, rolls=oplog.removes(fill))


def _lease(wiring: Wiring) -> Mapping[str, Any]:
    try:
        return wiring.store.leases.read() or {}
    except OperationFailure:
        return {}  # no right to read the state; a finding of its own says so


def _judge_window(oplog: Oplog, fill: float | None) -> Finding:
    text = f"It reaches {duration(oplog.window_seconds)} back"
    if oplog.window_seconds / 3600 >= OPLOG_HOURS_MIN:
        return ok("oplog_window", f"{text}: a listener may be away for so long.")
    if fill is not None and fill < NEARLY_FULL:
        return ok("oplog_window", f"{text}, to the beginning of this cluster; {fill:.0%} of it is in use.")
    return degraded(
        "oplog_window",
        f"{text} only: if the listener is away for longer, changes are lost. Enlarge it "
        "with replSetResizeOplog, or set minRetentionHours.",
    )


def _histories(wiring: Wiring, lease: Mapping[str, Any]) -> list[History]:
    """Where the registered subscriptions stand, as far as they have been led with."""
    registered = {handler.name for handler in wiring.handlers}
    try:
        documents = {parse_name(document): document for document in wiring.store.subscriptions.read_all()}
        names = sorted(registered & documents.keys())
        layouts = layouts_in_force([documents[name] for name in names])
        images = wiring.store.partitions.of({name: layout.generation for name, layout in layouts.items()})
    except OperationFailure:
        return []  # no right to read the state; a finding of its own says so
    reported = {risk["subscription"]: risk for risk in (lease.get("report") or {}).get("atRisk", ())}
    found = []
    for name in names:
        place = parse_position(documents[name])
        if place is not None:
            holder = _holder(reported.get(name), [image for image in images if image.subscription == name])
            found.append(History(name, place, parse_lost_history(documents[name]) is not None, *holder))
    return found


def _holder(reported: Mapping[str, Any] | None, images: Iterable[Image]) -> tuple[int | None, str | None]:
    """The partition that holds a subscription: as the listener says, else one that stands; and its state."""
    if reported is not None and reported.get("partition") is not None:
        return reported["partition"], reported["state"]
    standing = {visible_state(image): image.index for image in images if visible_state(image) != "flowing"}
    return next(((standing[state], state) for state in _STANDING if state in standing), (None, None))


def judge_histories(histories: Sequence[History], oplog: Oplog, line: CommandLine, *, rolls: bool) -> Iterator[Finding]:
    """Who has lost its history, and who is about to: each with the command that helps."""
    well = bool(histories)
    for history in histories:
        share = oplog.lag_share(history.place) if rolls else 0.0
        if history.is_lost:
            well = False
            yield failing(
                "history",
                f"Handler {history.name} has lost its history: it stands at {history.place.as_datetime().isoformat()}, "
                "and the oplog no longer reaches back so far. It stands still until somebody decides: "
                f"`{line.changes('reset', history.name, '--to', 'oldest')}` or "
                f"`{line.changes('reset', history.name, '--to', 'now')}`.",
            )
        elif share >= THRESHOLDS[0]:
            well = False
            yield (failing if share >= SERIOUS else degraded)(
                "history_at_risk",
                f"{share:.0%} of the oplog's window lie behind handler {history.name}, which stands at "
                f"{history.place.as_datetime().isoformat()}; from 100% on changes are lost, but for what is "
                f"stored, or a running listener has buffered. {_sentence_on(history, line)}.",
            )
    if well:
        yield ok("history", "The oplog reaches back to where each handler stands.")


def _sentence_on(history: History, line: CommandLine) -> str:
    held = f"Partition {history.partition}, which is {history.state}, holds it: " if history.state else "Free it: "
    return held + remedy(line, history.name, history.partition, history.state)


def _oplog_fill(client: Client) -> float | None:
    with pymongo.timeout(ANSWER_SECONDS):
        return oplog_fill(client)


def _check_test_commands(client: Client) -> Iterator[Finding]:
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            answer = client.admin.command("getParameter", 1, enableTestCommands=1)
    except OperationFailure:
        return  # no right to ask: then it is not for this user to judge
    if answer.get("enableTestCommands"):
        yield degraded(
            "test_commands",
            "mongod runs with enableTestCommands=1, by which anybody who may log in can make it fail; leave it out in "
            "production.",
        )
