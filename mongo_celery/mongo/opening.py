"""Opening of collections, whatever their owner or the URL has set, and the check that a server answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pymongo
from bson.codec_options import CodecOptions
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.client_session import ClientSession, TransactionOptions  # type: ignore[attr-defined]
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import ConfigurationError, MongoCeleryError, ServerUnavailableError
from mongo_celery.findings import Finding, failing
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.mongo.verdicts import (
    ErrorContext,
    brief,
    explain_error,
    is_logged_out,
    is_refused_session,
    is_unanswered,
)

DEFAULT_DATABASE = "mongo_celery"
"""The database of the state unless an option names another one."""

ANSWER_SECONDS = 4.0
"""Time that a command waits for the first answer of a server."""

Source = Collection[Any] | Callable[[], Collection[Any]]
"""A collection, or what returns it: prefork workers make their clients after the fork."""

Client = MongoClient[Any] | Callable[[], MongoClient[Any]]
"""A client, or what returns it, for the same reason."""

AsyncClient = AsyncMongoClient[Any] | Callable[[], AsyncMongoClient[Any]]
"""The same for asyncio."""

STRICT = TransactionOptions(ReadConcern("majority"), WriteConcern("majority"), ReadPreference.PRIMARY)
"""Of the package's own transactions, whatever the URL has set."""

Opened = TypeVar("Opened", Collection[Any], Database[Any])
Made = TypeVar("Made", MongoClient[Any], AsyncMongoClient[Any])


def resolve_collection(source: Source) -> Collection[Any]:
    """
    Return the collection itself, or what the callable returns now; ask through `PerProcess` to ask once a process.

    Raises:
        ConfigurationError: it is one of an `AsyncMongoClient`.
    """
    # A collection is callable, only to say that it is not.
    found: Any = source if isinstance(source, Collection | AsyncCollection) else source()
    if isinstance(found, AsyncCollection):
        raise ConfigurationError(
            f"{found.full_name} is a collection of an AsyncMongoClient, and its methods return coroutines that nobody "
            "awaits here. Give a collection of a MongoClient.",
        )
    return cast("Collection[Any]", found)


def resolve_client(given: Made | Callable[[], Made]) -> Made:
    """Return the client itself, or what the callable returns now."""
    return given if isinstance(given, MongoClient | AsyncMongoClient) else given()


def with_majority(target: Opened, types: CodecOptions[Any] | None = None) -> Opened:
    """
    The same collection or database with majority writes and majority reads from the primary.

    What its owner or the URL has set is meant for other purposes; what a fail-over could take back would give one
    right to two holders.

    Args:
        target: as it was given.
        types: what documents decode to; by default as it is.
    """
    return target.with_options(
        codec_options=types,
        write_concern=WriteConcern("majority"),
        read_concern=ReadConcern("majority"),
        read_preference=ReadPreference.PRIMARY,
    )


def plain_types(collection: Collection[Any], **options: Any) -> CodecOptions[dict[str, Any]]:
    """Plain dicts and times with a zone, whatever a collection decodes to; its UUIDs stay as they are."""
    given = collection.codec_options.uuid_representation
    return CodecOptions(tz_aware=True, uuid_representation=given, **options)


@contextmanager
def renewing_connections(client: MongoClient[Any] | AsyncMongoClient[Any]) -> Iterator[None]:
    """Renew the connections of a client after an error of the block, as `renew_connections` does."""
    try:
        yield
    except PyMongoError as error:
        renew_connections(client, error)
        raise


def renew_connections(client: MongoClient[Any] | AsyncMongoClient[Any], error: BaseException) -> None:
    """
    Replace the connections of a client, if the error says that one of them is of no use any more; else do nothing.

    The user of a connection may have been dropped and made again (`is_logged_out`). With `directConnection=true`
    PyMongo asks a member once for each connection if it takes sessions: one of a member that recovered refuses
    them permanently.

    Args:
        client: ours or a user's, of either kind.
        error: by which a call failed, or one that was raised from it.
    """
    if any(is_refused_session(each) or is_logged_out(each) for each in (error, error.__cause__)):
        replace_connections(client)


def replace_connections(client: MongoClient[Any] | AsyncMongoClient[Any]) -> None:
    """Have a client open new connections. One that is in use is closed afterwards, so no operation fails by this."""
    # PyMongo has no public way, and close() ends a client for all who hold it.
    topology: Any = client._topology  # noqa: SLF001
    for server in list(topology._servers.values()):  # noqa: SLF001
        server.pool.gen.inc(None)


def start_session(client: MongoClient[Any], **options: Any) -> ClientSession:
    """Return a session with the options of `client.start_session`, whose transactions are `STRICT` by default."""
    return client.start_session(default_transaction_options=STRICT, **options)


@contextmanager
def open_session(client: MongoClient[Any], **options: Any) -> Iterator[ClientSession]:
    """Open a session for the block, whose transactions are `STRICT` by default; see `renewing_connections`."""
    with renewing_connections(client), start_session(client, **options) as session:
        yield session


def ping(client: MongoClient[Any]) -> None:
    """
    Have the primary answer once, within `ANSWER_SECONDS`.

    Raises:
        PyMongoError: it did not.
    """
    with pymongo.timeout(ANSWER_SECONDS):
        client.admin.command("ping")


def to_user_error(error: PyMongoError, concern: ErrorContext) -> Exception:
    """Return our error for one that ends a command; the error itself if there is no better text."""
    if is_unanswered(error):
        return ServerUnavailableError(
            f"MongoDB gave no answer within {ANSWER_SECONDS:.0f} s; check its URL, the network and the servers. "
            f"Last error: {short(error)}",
        )
    return explain_error(error, concern) or error


def error_sentence(error: PyMongoError, concern: ErrorContext) -> str:
    """Return the text of `to_user_error`; an error without a better text is cut to name, code and sentence."""
    known = to_user_error(error, concern)
    return brief(error) if known is error else str(known)


def collect_findings(name: str, part: Callable[[], Iterable[Finding]], concern: ErrorContext) -> list[Finding]:
    """Return the findings of a part of a preflight; an error that ends it early is one more, by this name."""
    found: list[Finding] = []
    try:
        for finding in part():
            found.append(finding)  # noqa: PERF402 - what was found before an error counts
    except MongoCeleryError as failure:
        found.append(failing(name, without_credentials(str(failure))))
    except PyMongoError as failure:
        found.append(failing(name, without_credentials(error_sentence(failure, concern))))
    return found
