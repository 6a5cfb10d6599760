"""
The replay of a dead letter puts its entry back into its document.

The entry gets a new id (`<id>~1`, then `~2`). Its tasks and event keep their ids, by which consumers deduplicate. The
new id makes this safe: entries are removed by id, and a relay that paused between storing a dead letter and removing
its entry may wake up at any time. It then removes only the old id.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pymongo.errors import DuplicateKeyError

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.canvas import is_elsewhere, show_arguments
from mongo_celery.outbox.dead_letters import DeadLetter
from mongo_celery.outbox.entries import Entry, decode_canvas
from mongo_celery.outbox.pending import EVENTS, FIELD, append_entries, explain_refusals
from mongo_celery.outbox.publisher import BrokerUnavailableError

if TYPE_CHECKING:
    from mongo_celery.outbox.registry import BaseOutbox


def replay(
    outbox: BaseOutbox,
    id: str,  # noqa: A002
    *,
    without_document: bool = False,
    sign: bool = False,
) -> str | None:
    """
    Put a dead letter at the end of its document's or key's pending entries, with its attempts at zero.

    Relays deliver it like any entry. Repeating this is harmless: a waiting entry is not added twice. If the process
    ends between adding the entry and removing the dead letter, the dead letter stays. A second replay can then publish
    the task again, with the same id.

    Args:
        outbox: the outbox of the dead letter.
        id: the id of the dead letter.
        without_document: True to publish it now if its document is gone. Code that needs the document will not find it.
        sign: True to vouch for an entry that the outbox has not signed, or signed with a lost key. Its payload
            determines the task, and its name and arguments are read from there again.

    Returns:
        The new id of the entry. None if it was published without its document.

    Raises:
        CommandRefusedError: the dead letter does not exist, its document is gone, or its entry is still there,
            unreadable, or unsigned without `sign`. The dead letter is kept.
        OutboxRefusedError: the document would be too large. The dead letter is kept.
    """
    found = outbox.runtime.dead_letters.get(id)
    if found is None:
        raise CommandRefusedError(f"Outbox {outbox.name} has no dead letter {id}.")
    entry = _read_signed_entry(outbox, found, sign=sign)
    again = outbox.runtime.signer.sign(replace(entry, id=next_id(id), attempts=0, at=datetime.now(UTC)))
    if not _append(outbox, found.document, entry.id, again):
        there = _read_ids(outbox, found.document)
        if there is None:
            _publish_without_document(outbox, found, entry, allowed=without_document)
            outbox.runtime.dead_letters.remove(id)
            return None
        if entry.id in there:
            raise CommandRefusedError(
                f"Entry {id} is still in document {found.document!r}, because its move to the dead letters is "
                "not finished. Try again in some seconds.",
            )
        if again.id not in there:
            raise CommandRefusedError(f"Document {found.document!r} has just changed. Nothing was done. Try again.")
    outbox.runtime.dead_letters.remove(id)
    return again.id


def next_id(id: str) -> str:  # noqa: A002
    """Return the entry id for putting a dead letter back. It is always the same, so that a repetition finds it."""
    base, mark, number = id.rpartition("~")
    return f"{base}~{int(number) + 1}" if mark and number.isdecimal() else f"{id}~1"


def _append(outbox: BaseOutbox, document_id: Any, id: str, again: Entry) -> bool:  # noqa: A002
    """
    Add the entry with one update. Return False if the document is gone or contains either id.

    If a document of the outbox's own collection is gone, it is created again.
    """
    guard = {"_id": {"$eq": document_id}, f"{EVENTS}.id": {"$nin": [id, again.id]}}
    with explain_refusals(outbox.collection.full_name), suppress(DuplicateKeyError):
        change = append_entries({}, [again])
        result = outbox.runtime.plain.update_one(guard, change, upsert=outbox.runtime.is_own)
        return bool(result.raw_result and result.raw_result["n"])
    return False


def _read_ids(outbox: BaseOutbox, document_id: Any) -> list[Any] | None:
    """Return the ids of the entries in a document. None if it does not exist."""
    document = outbox.runtime.plain.find_one({"_id": document_id}, {f"{EVENTS}.id": 1})
    if document is None:
        return None
    stored = document.get(FIELD)
    events = stored.get("events") if isinstance(stored, Mapping) else None
    return [entry.get("id") for entry in events or [] if isinstance(entry, Mapping)]


def _publish_without_document(outbox: BaseOutbox, found: DeadLetter, entry: Entry, *, allowed: bool) -> None:
    if not allowed:
        raise CommandRefusedError(
            f"Document {found.document!r} of dead letter {found.id} no longer exists, so the entry cannot be put "
            "back. Discard it, or publish it with --without-document.",
        )
    try:
        outbox.runtime.origin.check(entry)
        outbox.runtime.publisher.publish(entry, found.document, outbox.runtime.options.exchange)
    except BrokerUnavailableError as error:
        raise CommandRefusedError(
            f"The broker did not accept {found.id}: {short(error)}. Nothing was changed."
        ) from error
    except Exception as error:
        raise CommandRefusedError(f"{found.id} still cannot be published: {short(error)}.") from error


def _read_signed_entry(outbox: BaseOutbox, found: DeadLetter, *, sign: bool) -> Entry:
    """Return the entry of a dead letter that is signed, or that the caller vouches for."""
    try:
        entry = Entry.from_document(found.entry)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CommandRefusedError(
            f"Dead letter {found.id} cannot be read, because another program has changed it (missing or wrong: "
            f"{short(error)}). You can only discard it.",
        ) from error
    if outbox.runtime.signer.is_signed(entry):
        return entry
    if not sign:
        line = CommandLine.of(outbox.app)
        raise CommandRefusedError(
            f"Dead letter {found.id} is not signed by the outbox, so it was not replayed. See what it would run: "
            f"`{line.celery('outbox', 'dead-letters', 'list', str(found.id), '--payload')}`. If that is right: "
            f"`{line.celery('outbox', 'dead-letters', 'replay', str(found.id), '--sign')}`."
        )
    if entry.kind != "task":
        return entry
    try:
        canvas = decode_canvas(outbox.app, replace(entry, bind=""), None)
    except Exception as error:
        raise CommandRefusedError(f"Dead letter {found.id} cannot be read: {short(error)}.") from error
    return replace(entry, name=str(canvas.task), argsrepr=show_arguments(canvas), elsewhere=is_elsewhere(canvas))
