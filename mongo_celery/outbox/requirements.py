"""The needs of an outbox in MongoDB: a primary that answers, rights, and a collection that keeps entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pymongo

from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ANSWER_SECONDS, ping
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.rights import Allowed, read_rights
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.outbox.pending import FIELD

if TYPE_CHECKING:
    from mongo_celery.outbox.registry import BaseOutbox

_ON_DOCUMENTS = ("find", "insert", "update", "remove")


def reach(outbox: BaseOutbox) -> None:
    """
    Wait until the primary answers once, within some seconds.

    Raises:
        PyMongoError: it did not answer.
        ConfigurationError: the collection cannot be opened.
    """
    try:
        client = outbox.collection.database.client
    except ValueError as error:  # from the driver, for an invalid port
        raise ConfigurationError(f"The collection of {outbox!r} cannot be opened: {short(error)}") from error
    ping(client)


def _list_rights(outbox: BaseOutbox) -> dict[str, Sequence[str]]:
    """Return the actions for writers and relays, by namespace. The outbox's collection comes first."""
    return {
        outbox.collection.full_name: _ON_DOCUMENTS,
        outbox.runtime.dead_letters.full_name: _ON_DOCUMENTS,
        outbox.runtime.sweeps.full_name: _ON_DOCUMENTS[:3],
        outbox.runtime.signer.full_name: _ON_DOCUMENTS[:3],
    }


def error_context(outbox: BaseOutbox) -> ErrorContext:
    """Return the rights of an outbox, for the text of a MongoDB error."""
    rights = _list_rights(outbox)
    documents, letters, notes, keys = rights
    return ErrorContext(
        f"the outbox's collection {documents}, its dead letters {letters}, its sweep records {notes}, or its "
        f"signing keys {keys}",
        ", and ".join(f"{', '.join(each[:-1])} and {each[-1]} on {namespace}" for namespace, each in rights.items()),
    )


def check_rights(outbox: BaseOutbox) -> Iterator[Finding]:
    """Yield whether the user may perform the actions of writers and relays."""
    with pymongo.timeout(ANSWER_SECONDS):
        may = read_rights(outbox.runtime.plain.database.client)
    yield judge_rights(may, _list_rights(outbox))


def check_collection(outbox: BaseOutbox) -> Iterator[Finding]:
    """Yield whether the collection accepts documents with entries, and keeps them."""
    collection = outbox.runtime.plain
    with pymongo.timeout(ANSWER_SECONDS):
        about = next(iter(collection.database.list_collections(filter={"name": collection.name})), None)
    yield judge_kind(collection.full_name, about)
    yield from judge_validator((about or {}).get("options", {}))


def judge_rights(may: Allowed, needed: Mapping[str, Sequence[str]]) -> Finding:
    """
    Judge whether the user has the needed rights.

    Args:
        may: the server's answer about the user.
        needed: actions by namespace. The outbox's collection comes first.
    """
    missing = []
    for namespace, actions in needed.items():
        database, _, name = namespace.partition(".")
        lacking = [each for each in actions if not may.may(each, {"db": database, "collection": name})]
        missing += [f"{', '.join(lacking)} on {namespace}"] if lacking else []
    first = next(iter(needed))
    database, _, name = first.partition(".")
    if missing:
        return failing("rights", f"This user lacks {' and '.join(missing)}. Grant these rights to writers and workers.")
    if not may.may("createIndex", {"db": database, "collection": name}):
        return degraded("rights", f"This user lacks createIndex on {first}. Create the index manually.")
    return ok("rights", "This user has the rights that writers and relays need.")


def judge_kind(name: str, about: Mapping[str, Any] | None) -> Finding:
    """
    Judge whether documents can grow and stay there.

    Args:
        name: the name of the collection.
        about: the answer of `listCollections`. None if it does not exist.
    """
    if about is None:
        return degraded(
            "collection", f"{name} does not exist yet. If the name is correct, the first document creates it."
        )
    kind, options = about.get("type", "collection"), about.get("options", {})
    if kind != "collection":
        return failing("collection", f"{name} is of type {kind}, which an outbox cannot use. Use a plain collection.")
    if options.get("capped"):
        return failing(
            "collection",
            f"{name} is capped, so it removes old documents with their pending entries. Use a collection that is not "
            "capped.",
        )
    return ok("collection", f"{name} exists.")


def judge_validator(options: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge a validator whose schema lists properties without the field."""
    schema = options.get("validator", {}).get("$jsonSchema")
    if options.get("validationLevel") == "off" or not isinstance(schema, Mapping):
        return
    is_closed = schema.get("additionalProperties", True) is False and not schema.get("patternProperties")
    if not is_closed or FIELD in schema.get("properties", {}):
        yield ok("validator", f"The schema of the collection's validator allows {FIELD}.")
        return
    report = degraded if options.get("validationAction") == "warn" else failing
    yield report(
        "validator",
        f"The collection's validator refuses or logs every write with entries. Allow {FIELD} in its properties, "
        "as an object.",
    )
