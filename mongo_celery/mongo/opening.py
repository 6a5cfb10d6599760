"""Opening collections with fixed settings, and checking that a server answers."""

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
from pymongo.errors import ConfigurationError as ClientConfigurationError
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.errors import ConfigurationError, MongoCeleryError, ServerUnavailableError
from mongo_celery.findings import Finding, failing
from mongo_celery.mongo.driver_internals import replace_connections
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
"""Default database of the state."""

ANSWER_SECONDS = 4.0
"""Seconds that a command waits for a server's first answer."""

Source = Collection[Any] | Callable[[], Collection[Any]]
"""A collection, or a function that returns it, because prefork workers create clients after the fork."""

Client = MongoClient[Any] | Callable[[], MongoClient[Any]]
"""A client, or a function that returns it, for the same reason."""

AsyncClient = AsyncMongoClient[Any] | Callable[[], AsyncMongoClient[Any]]
"""The same for asyncio."""

STRICT = TransactionOptions(ReadConcern("majority"), WriteConcern("majority"), ReadPreference.PRIMARY)
"""Options of the package's own transactions, whatever the URL sets."""

Opened = TypeVar("Opened", Collection[Any], Database[Any])
Made = TypeVar("Made", MongoClient[Any], AsyncMongoClient[Any])


def check_source(name: str, source: object) -> None:
    """
    Refuse a value that is neither a collection nor a callable that returns one.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(source, Collection) and (isinstance(source, type) or not callable(source)):
        raise ConfigurationError(
            f"{name} {source!r} is neither a PyMongo collection nor a callable that returns one. Pass "
            "client.db.collection. For a Django model, pass "
            "`lambda: connection.get_collection(Model._meta.db_table)`.",
        )


def resolve_collection(source: Source) -> Collection[Any]:
    """
    Return the collection, or the callable's result. Use `PerProcess` to call it once per process.

    Raises:
        ConfigurationError: it belongs to an `AsyncMongoClient`.
    """
    # A PyMongo collection is callable, but only to raise an error.
    found: Any = source if isinstance(source, Collection | AsyncCollection) else source()
    if isinstance(found, AsyncCollection):
        raise ConfigurationError(
            f"{found.full_name} belongs to an AsyncMongoClient, whose methods return coroutines. Pass a "
            "collection of a MongoClient.",
        )
    return cast("Collection[Any]", found)


def resolve_client(given: Made | Callable[[], Made]) -> Made:
    """Return the client, or the callable's result."""
    return given if isinstance(given, MongoClient | AsyncMongoClient) else given()


def find_collection(client: MongoClient[dict[str, Any]], namespace: str) -> Collection[dict[str, Any]]:
    """
    Return a collection by `"db.collection"`, or by `"collection"` in the URL's database.

    Raises:
        ConfigurationError: neither names a database.
    """
    database, dot, name = namespace.partition(".")
    try:
        return client[database][name] if dot else client.get_default_database()[namespace]
    except ClientConfigurationError:
        raise ConfigurationError(
            f"{namespace!r} has no database, and the URL of MongoDB has none either. Write 'db.{namespace}', "
            f"such as 'shop.{namespace}'."
        ) from None


def with_majority(target: Opened, types: CodecOptions[Any] | None = None) -> Opened:
    """
    Return the collection or database with majority writes, and majority reads from the primary.

    The owner's or the URL's settings have other purposes. If a fail-over could undo a write, two holders could have the
    same right.

    Args:
        target: the collection or database.
        types: codec options for documents. By default the target's.
    """
    return target.with_options(
        codec_options=types,
        write_concern=WriteConcern("majority"),
        read_concern=ReadConcern("majority"),
        read_preference=ReadPreference.PRIMARY,
    )


def plain_types(collection: Collection[Any], **options: Any) -> CodecOptions[dict[str, Any]]:
    """Return codec options for plain dicts and times with a zone. UUIDs are as in the collection."""
    given = collection.codec_options.uuid_representation
    return CodecOptions(tz_aware=True, uuid_representation=given, **options)


def renew_connections(client: MongoClient[Any] | AsyncMongoClient[Any], error: BaseException) -> None:
    """
    Replace a client's connections if the error means that one of them is unusable. Otherwise do nothing.

    The user of a connection may have been dropped and created again (`is_logged_out`). With `directConnection=true`
    PyMongo checks once per connection whether a member supports sessions. After the member's recovery such a connection
    refuses sessions permanently.

    Args:
        client: ours or a user's, for threads or asyncio.
        error: the error of a call, or one raised from it.
    """
    if any(is_refused_session(each) or is_logged_out(each) for each in (error, error.__cause__)):
        replace_connections(client)


def start_session(client: MongoClient[Any], **options: Any) -> ClientSession:
    """Return a session like `client.start_session`, with `STRICT` transactions by default."""
    return client.start_session(default_transaction_options=STRICT, **options)


@contextmanager
def open_session(client: MongoClient[Any], **options: Any) -> Iterator[ClientSession]:
    """Open a session for the block, like `start_session`. An error in the block may renew the connections."""
    try:
        with start_session(client, **options) as session:
            yield session
    except PyMongoError as error:
        renew_connections(client, error)
        raise


def ping(client: MongoClient[Any]) -> None:
    """
    Wait until the primary answers once, within `ANSWER_SECONDS`.

    Raises:
        PyMongoError: the primary did not answer.
    """
    with pymongo.timeout(ANSWER_SECONDS):
        client.admin.command("ping")


def to_user_error(error: PyMongoError, concern: ErrorContext) -> Exception:
    """Return our error for one that ends a command, or the original if there is no better text."""
    if is_unanswered(error):
        return ServerUnavailableError(
            f"MongoDB gave no answer in time. Check its URL, the network and the servers. Last error: {short(error)}",
        )
    return explain_error(error, concern) or error


def error_sentence(error: PyMongoError, concern: ErrorContext) -> str:
    """Return the text of `to_user_error`. Otherwise shorten the error to name, code and sentence."""
    known = to_user_error(error, concern)
    return brief(error) if known is error else str(known)


def collect_findings(name: str, part: Callable[[], Iterable[Finding]], concern: ErrorContext) -> list[Finding]:
    """Return the findings of one part of a preflight. If an error ends it early, add a finding with this name."""
    found: list[Finding] = []
    try:
        for finding in part():
            found.append(finding)  # noqa: PERF402 - what was found before an error counts
    except MongoCeleryError as failure:
        found.append(failing(name, without_credentials(str(failure))))
    except PyMongoError as failure:
        found.append(failing(name, without_credentials(error_sentence(failure, concern))))
    return found
