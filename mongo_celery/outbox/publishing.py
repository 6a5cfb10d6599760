"""
Publishing what is pending in documents that are held, from the head, up to what cannot be published.

What is published was acknowledged to its writer by a majority, or was read by a majority after a claim that a majority
has: nothing of a write that a fail-over takes back is ever published, with whatever concern it was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.claims import age_of
from mongo_celery.outbox.commands import bounded
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, HeldDocument, PublishedPart
from mongo_celery.outbox.entries import Entry, entries_of
from mongo_celery.outbox.failures import FailureKind, FailurePolicy, FailureVerdict, entry_id_of
from mongo_celery.outbox.groups import ENTRIES_MAX, size_together
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.publisher import BatchAbandonedError, BrokerUnavailableError, Publisher, UnknownTaskError
from mongo_celery.outbox.removals import Removals
from mongo_celery.outbox.signing import EntrySigner, UnsignedEntryError


@dataclass(slots=True)
class _Begun:
    """A document of which the broker has had some entries."""

    held: HeldDocument
    entries: Sequence[Entry | Mapping[str, Any]]
    names: list[Any] = field(default_factory=list)

    @property
    def next(self) -> Entry | Mapping[str, Any]:
        return self.entries[len(self.names)]

    @property
    def is_done(self) -> bool:
        return len(self.names) == len(self.entries)

    def part(self, **how: Any) -> PublishedPart:
        return PublishedPart(held=self.held, names=self.names, dispatched=len(self.names), **how)

    def given_up(self) -> PublishedPart:
        """What the broker has of it; the rest is for whoever claims it next."""
        return self.part() if self.is_done else self.part(lets_go=True, ran_out=True)


class PendingPublisher:
    """
    Publishes what is pending in the documents of one collection.

    Args:
        collection: opened with majority reads.
        field: in which entries wait.
        publisher: to the broker.
        dead_letters: gives the store for what cannot be published.
        signer: verifies entries.
        removals: of what was published.
        claim_ttl: seconds of a claim.
        policy: what becomes of an entry that fails through its own fault.
        counters: of this process.
    """

    def __init__(
        self,
        collection: Collection[dict[str, Any]],
        field: PendingField,
        publisher: Publisher,
        dead_letters: Callable[[], OutboxDeadLetters],
        *,
        signer: EntrySigner,
        removals: Removals,
        claim_ttl: float,
        policy: FailurePolicy,
        counters: Counters,
    ) -> None:
        self._collection = collection
        self._field = field
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._signer = signer
        self._removals = removals
        self._claim_ttl = claim_ttl
        self._policy = policy
        self._counters = counters

    def publish_together(
        self, documents: Sequence[HeldDocument], *, judge: bool, step: Callable[[], object] = lambda: None
    ) -> Iterator[PublishedPart]:
        """
        As `publish` of each document, by fewer commands, where the broker takes several messages by one.

        A command has one entry of a document at most, and the entry behind it goes when the broker has that: of one
        command a broker may refuse a message and take those behind it. What does not go so goes one by one.

        Args:
            documents: as `groups_of` gives them.
            judge: as of `publish`.
            step: is told of each command, and of each document that goes alone, before it begins.

        Returns:
            The parts, those of which everything has gone together first. Whoever does not ask for all of them has let
            the others go; what was published of them is removed.

        Raises:
            PyMongoError: of `step`, or of the store for dead letters; the parts of all documents came before.
        """
        begun = [_Begun(held, self.entries_of(held.events[:ENTRIES_MAX])) for held in documents]
        try:
            try:
                yield from self._parts(begun, step, judge=judge)
            except PyMongoError:  # what the broker has is known to whoever asks, and is removed when it can be
                while begun:
                    yield begun.pop(0).given_up()
                raise
        except (SoftTimeLimitExceeded, GeneratorExit):
            with suppress(PyMongoError):
                self._removals.settle([each.part(lets_go=True) for each in begun if each.names])
            raise

    def _parts(self, begun: list[_Begun], step: Callable[[], object], *, judge: bool) -> Iterator[PublishedPart]:
        """Publish documents; those that are still there have given no part."""
        outage = self._publish_by_turns(begun, step, judge=judge) if _may_gain(begun) else None
        begun.sort(key=lambda each: not each.is_done)  # whoever asks has them all before anything else can fail
        while begun:
            first = begun[0]
            if first.is_done:
                part = first.part()
            elif outage is not None:
                part = first.part(verdict=outage.verdict, error=outage.error, lets_go=True)
            else:
                step()
                part = self._publish(first, judge=judge)
                outage = part if part.is_outage else None
            del begun[0]
            yield part

    def _publish_by_turns(
        self, begun: Sequence[_Begun], step: Callable[[], object], *, judge: bool
    ) -> PublishedPart | None:
        """Publish what goes together; the first part that is not done, if the broker does not answer."""
        going = [each for each in begun if not each.is_done]
        try:
            with suppress(BatchAbandonedError), self._publisher.together() as send:
                while going:
                    step()
                    turn = [each for each in going if self._goes_together(each)]
                    send()
                    self._counters.dispatched += len(turn)
                    for each in turn:
                        each.names.append(entry_id_of(each.next))
                    going = [each for each in turn if not each.is_done]
        except BrokerUnavailableError as error:
            first = going[0]
            verdict = self.judged(first.held, first.next, error, judge=judge)
            return first.part(verdict=verdict, error=_text_of(error), lets_go=True)
        return None

    def _goes_together(self, begun: _Begun) -> bool:
        """Collect the next entry of a document; False if there is something the matter with it."""
        if self._is_old(begun.held):
            return False
        try:
            self.publish_entry(begun.next, begun.held.document_id)
        except (BatchAbandonedError, BrokerUnavailableError, SoftTimeLimitExceeded):
            raise
        except Exception:  # noqa: BLE001 - whatever it is, it is met again when the entry goes by itself
            return False
        return True

    def _is_old(self, held: HeldDocument) -> bool:
        """Whether a claim may be another's soon."""
        return time.monotonic() - held.claimed_at > self._claim_ttl / 2

    def _publish(self, begun: _Begun, *, judge: bool) -> PublishedPart:
        """
        Publish the first entries of a document, in order, up to one that cannot be.

        Args:
            begun: the document; the names of entries grow by those that are published or set aside.
            judge: whether failures are counted.

        Raises:
            SoftTimeLimitExceeded: what was published before is removed, and the document let go.
            PyMongoError: what cannot be published could not be set aside.
        """
        held, names = begun.held, begun.names
        dispatched, dead = len(names), 0
        knows = bool(self._publisher.app.finalized)  # type: ignore[attr-defined] # else it has not heard of its tasks yet
        for entry in begun.entries[len(names) :]:
            if self._is_old(held):
                return PublishedPart(
                    held=held, names=names, dispatched=dispatched, dead=dead, lets_go=True, ran_out=True
                )
            try:
                self.publish_entry(entry, held.document_id)
            except SoftTimeLimitExceeded:
                with suppress(PyMongoError):
                    self._removals.settle([PublishedPart(held=held, names=names, dispatched=dispatched, lets_go=True)])
                raise
            except Exception as error:  # noqa: BLE001 - whatever a serializer, a canvas or a broker raises
                judges = judge and (knows or not isinstance(error, UnknownTaskError))
                verdict = self.judged(held, entry, error, judge=judges)
                if verdict is None or verdict.kind is not FailureKind.DEAD_LETTER:
                    return PublishedPart(
                        held=held, names=names, dispatched=dispatched, dead=dead, verdict=verdict, lets_go=True,
                        error=_text_of(error),
                        failed=entry_id_of(entry) if verdict is not None and verdict.counts else None,
                    )  # fmt: skip
                aside = [entry]
                if entry_id_of(entry) is None:  # they are removed together
                    aside = [] if None in names else self._nameless(held.document_id)
                for each in aside:
                    self._dead_letters().add(held.document_id, each, error)  # before it is removed: it may be repeated
                dead += len(aside)
                self._counters.dead += len(aside)
                names.append(entry_id_of(entry))
                continue
            names.append(entry_id_of(entry))
            dispatched += 1
            self._counters.dispatched += 1
        return PublishedPart(held=held, names=names, dispatched=dispatched, dead=dead)

    def _nameless(self, document_id: object) -> list[Entry | Mapping[str, Any]]:
        """All entries of a document that have no id."""
        with bounded():
            document = self._collection.find_one({"_id": document_id}, {self._field.events: 1}) or {}
        stored = document.get(self._field.name)
        events = stored.get("events") if isinstance(stored, Mapping) else None
        return [each for each in self.entries_of(events or []) if entry_id_of(each) is None]

    def entries_of(self, stored: Sequence[Mapping[str, Any]]) -> Sequence[Entry | Mapping[str, Any]]:
        """
        Return stored entries; one that the outbox has not signed stays a mapping, for `publish_entry` to refuse.

        An entry of an app that this process does not deliver for stays that app's, which may have another key.

        Raises:
            PyMongoError: the keys could not be read.
        """
        return entries_of(stored, lambda each: not self._publisher.delivers_for(each) or self._signer.is_signed(each))

    def publish_entry(self, entry: Entry | Mapping[str, Any], document_id: object) -> None:
        """As `Publisher.publish`, of what `entries_of` gives; an entry without a right signature is refused."""
        if not isinstance(entry, Entry):
            raise UnsignedEntryError(
                f"The outbox has not signed this entry: somebody else writes to {self._field.name}, its key was lost, "
                "or its writer has another option database. Its name and arguments may be false: the payload says "
                "what it would run."
            )
        self._publisher.publish(entry, document_id)

    def judged(
        self, held: HeldDocument, entry: Entry | Mapping[str, Any], error: Exception, *, judge: bool
    ) -> FailureVerdict | None:
        """What becomes of an entry; None where this process leaves that to another."""
        at = entry.at if isinstance(entry, Entry) else None
        verdict = self._policy.verdict(entry, error, age_of(held.field, self._claim_ttl, at))
        if isinstance(error, UnsignedEntryError):  # any process can tell
            self._counters.unsigned += 1
        elif verdict.kind is not FailureKind.WAIT_FOR_BROKER and not judge:
            return None
        elif verdict.kind not in (FailureKind.OTHER_APP, FailureKind.WAIT_FOR_TASK):  # nobody's failures
            self._counters.failures += 1
        self._policy.tell(verdict, entry, held.document_id, error)
        return verdict


def _may_gain(begun: Sequence[_Begun]) -> bool:
    """Whether there are several messages that may go together."""
    if not all(each.entries for each in begun):
        return False
    return len(begun) > 1 or (len(begun[0].entries) > 1 and size_together(begun[0].held) is not None)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {short(error)}"
