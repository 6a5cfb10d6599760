"""
What a person does with dead letters: look at them, put them back, throw them away.

A dead letter that is put back gets a new id as an entry (`<id>~1`, then `~2`); its tasks and its event keep theirs, by
which consumers deduplicate. The new id is what makes it safe: entries are removed by name, and a relay that was
paused between setting an entry aside and removing it may wake up at any time. It then removes the old name only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson import json_util
from bson.binary import UuidRepresentation
from pymongo.errors import DuplicateKeyError

from mongo_celery.command_line import CommandLine
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.entries import Entry, decode_canvas, show_arguments, without_payload
from mongo_celery.outbox.pending import explain_refusals
from mongo_celery.outbox.publisher import BrokerUnavailableError

if TYPE_CHECKING:
    from mongo_celery.outbox.registry import AnyOutbox

_ROUNDS = 3

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """
    One dead letter.

    Attributes:
        id: of its entry; what commands take.
        document: `_id` of the document that it belongs to.
        at: when it was set aside, by the server's clock.
        entry: as it was stored.
        error: what its last attempt failed with.
        traceback: of that error.
    """

    id: str
    document: Any
    at: datetime | None
    entry: Mapping[str, Any]
    error: str
    traceback: str

    def plain(self, *, payload: bool = True) -> dict[str, Any]:
        """As JSON can hold it; what is not JSON's own becomes extended JSON."""
        found = asdict(self)
        if not payload:
            found["entry"] = without_payload(self.entry)
        plain: dict[str, Any] = json.loads(json_util.dumps(found, json_options=_JSON))
        return plain | {"at": None if self.at is None else self.at.isoformat()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """
    What became of a dead letter.

    Attributes:
        id: of the dead letter.
        result: `pending` where it is back in its document, `published` where it went straight to the broker.
        entry: its id as an entry from now on; None where it is none any more.
    """

    id: str
    result: str
    entry: str | None


def dead_letters(outbox: AnyOutbox, limit: int, *, skip: int = 0) -> list[DeadLetter]:
    """The dead letters of an outbox, the oldest first, without the payloads of their entries."""
    return [_dead_letter(outbox, stored) for stored in outbox.dead_letters.find(limit, skip=skip)]


def dead_letter(outbox: AnyOutbox, id: str) -> DeadLetter | None:  # noqa: A002
    """One dead letter by the id of its entry."""
    stored = outbox.dead_letters.get(id)
    return None if stored is None else _dead_letter(outbox, stored)


def replay(
    outbox: AnyOutbox,
    id: str,  # noqa: A002
    *,
    without_document: bool = False,
    sign: bool = False,
) -> Replay:
    """
    Put a dead letter back at the end of what is pending in its document, or under its key, with its attempts at zero.

    Relays deliver it like any entry. Repeating this is harmless: while the entry waits it is not added twice.
    Where the process ends between adding the entry and removing the dead letter, it stays, and replaying it
    once more can publish the task a second time, under the same id.

    Args:
        outbox: the dead letter's.
        id: of the dead letter.
        without_document: publish it now if its document is gone. Nothing stands behind that: whoever needs the
            document will not find it.
        sign: vouch for an entry that the outbox has not signed, or by a key that is lost. Its payload says what will
            run, and its name and arguments are read from there again.

    Raises:
        CommandRefusedError: there is no such dead letter, its document is gone, its entry is still in it, cannot be
            read, or is not signed and `sign` is not given; the dead letter is still there.
        OutboxRefusedError: the document would be too large; the dead letter is still there.
    """
    found = dead_letter(outbox, id)
    if found is None:
        raise CommandRefusedError(f"Outbox {outbox.name} has no dead letter {id}.")
    entry = _signed(outbox, found, sign=sign)
    again = outbox.backing.signer.sign(replace(entry, id=next_id(id), attempts=0, at=datetime.now(UTC)))
    for _ in range(_ROUNDS):
        if _append(outbox, found.document, entry.id, again):
            break
        there = _ids_in(outbox, found.document)
        if there is None:
            return _replay_without_document(outbox, found, entry, allowed=without_document)
        if again.id in there:
            break
        if entry.id in there:
            raise CommandRefusedError(
                f"Entry {id} is still in document {found.document!r}: the relay that set it aside has not removed it "
                "yet, or ended before. Try again in some seconds.",
            )
    else:
        raise CommandRefusedError(f"Document {found.document!r} kept changing while {id} was put back; try again.")
    outbox.dead_letters.remove(id)
    return Replay(id=id, result="pending", entry=again.id)


def discard(outbox: AnyOutbox, id: str) -> bool:  # noqa: A002
    """Throw a dead letter away: its task or event will never be published. False if there is none."""
    return outbox.dead_letters.remove(id)


def next_id(id: str) -> str:  # noqa: A002
    """The id under which a dead letter's entry is put back; always the same, so that a repetition finds it."""
    base, mark, number = id.rpartition("~")
    return f"{base}~{int(number) + 1}" if mark and number.isdecimal() else f"{id}~1"


def _append(outbox: AnyOutbox, document_id: Any, id: str, again: Entry) -> bool:  # noqa: A002
    """
    Add the entry, by one update; False where the document is gone or holds it under either id.

    A document of the outbox's own collection is made anew where it is gone.
    """
    backing, field = outbox.backing, outbox.backing.field
    guard = {"_id": {"$eq": document_id}, f"{field.events}.id": {"$nin": [id, again.id]}}
    with explain_refusals(outbox.collection.full_name, field.name), suppress(DuplicateKeyError):
        change = field.with_entries({}, [again])
        result = backing.plain.update_one(guard, change, upsert=backing.is_own)
        return bool(result.raw_result and result.raw_result["n"])
    return False


def _ids_in(outbox: AnyOutbox, document_id: Any) -> list[Any] | None:
    """The ids of the entries in a document; None where there is no document."""
    field = outbox.backing.field
    document = outbox.backing.plain.find_one({"_id": document_id}, {f"{field.events}.id": 1})
    if document is None:
        return None
    stored = document.get(field.name)
    events = stored.get("events") if isinstance(stored, Mapping) else None
    return [entry.get("id") for entry in events or [] if isinstance(entry, Mapping)]


def _replay_without_document(outbox: AnyOutbox, found: DeadLetter, entry: Entry, *, allowed: bool) -> Replay:
    if not allowed:
        raise CommandRefusedError(
            f"Document {found.document!r} of dead letter {found.id} is gone, so there is nothing to put it back into. "
            "Discard it, or publish it all the same with --without-document.",
        )
    try:
        outbox.publisher.publish(entry, found.document)
    except BrokerUnavailableError as error:
        raise CommandRefusedError(
            f"The broker did not take {found.id}: {short(error)}. Nothing was changed."
        ) from error
    except Exception as error:
        raise CommandRefusedError(f"{found.id} still cannot be published: {short(error)}.") from error
    outbox.dead_letters.remove(found.id)
    return Replay(id=found.id, result="published", entry=None)


def _entry(found: DeadLetter) -> Entry:
    try:
        return Entry.from_document(found.entry)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CommandRefusedError(
            f"Dead letter {found.id} cannot be read, so it can only be discarded: somebody else has written to it "
            f"(missing or wrong: {short(error)}).",
        ) from error


def _signed(outbox: AnyOutbox, found: DeadLetter, *, sign: bool) -> Entry:
    """Return the entry of a dead letter that the outbox has signed, or that somebody vouches for."""
    entry = _entry(found)
    if outbox.backing.signer.is_signed(entry):
        return entry
    if not sign:
        line = CommandLine.of(outbox.app)
        raise CommandRefusedError(
            f"Dead letter {found.id} is not signed by the outbox, so it stays. Look at what it would run: "
            f"{line.celery('outbox', 'dead-letters', 'show', str(found.id), '--payload')}. If that is right: "
            f"{line.celery('outbox', 'dead-letters', 'replay', str(found.id), '--sign')}."
        )
    if entry.kind != "task":
        return entry
    try:
        canvas = decode_canvas(outbox.app, replace(entry, bind=""), None)
    except Exception as error:
        raise CommandRefusedError(f"Dead letter {found.id} cannot be read: {short(error)}.") from error
    return replace(entry, name=str(canvas.task), argsrepr=show_arguments(canvas))


def _dead_letter(outbox: AnyOutbox, stored: Mapping[str, Any]) -> DeadLetter:
    """What is of another type than relays write is taken for missing: one letter must not hide the others."""
    at, entry = stored.get("at"), stored.get("entry")
    return DeadLetter(
        id=str(stored["_id"]).removeprefix(f"{outbox.collection.full_name}/"),
        document=stored.get("document"),
        at=at if isinstance(at, datetime) else None,
        entry=entry if isinstance(entry, Mapping) else {},
        error=str(stored.get("error", "")),
        traceback=str(stored.get("traceback", "")),
    )
