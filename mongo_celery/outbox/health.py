"""How outboxes stand, in words: what is pending, whether the broker answers, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.broker.connection import reach_broker, write_connection
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.errors import ConfigurationError, DeploymentError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import ping
from mongo_celery.mongo.redaction import short, without_credentials
from mongo_celery.mongo.verdicts import ErrorContext, explain_error
from mongo_celery.outbox.backing import OutboxStatus
from mongo_celery.outbox.entries import FIELD
from mongo_celery.outbox.sweep import SWEEP_TASK
from mongo_celery.outbox.swept import patience
from mongo_celery.quantities import duration, number

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.outbox.registry import AnyOutbox

BROKER_SECONDS = 3
"""How long a command waits for the broker's answer."""

_LATE = 3
"""An entry that is older than so many times `sweep_after`, or has been due for two sweeps, should be delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """
    One outbox and what its delivery needs.

    Attributes:
        name: of the outbox.
        status: counts and ages.
        sweep_after: seconds after which the sweep takes an entry.
        scheduled: whether the app has a beat entry for the sweep.
        swept_seconds: how long ago somebody has noted a sweep; None where there is no note, or it cannot be read.
        patience: seconds after which somebody should have swept.
        indexed: whether the index is there; None where it cannot be seen.
        broker_error: why the broker does not answer; None when it does.
        index: name under which the index is created.
        sweeps_known: whether the notes of sweeps could be read.
        sweep_every: seconds between two sweeps; None where nobody knows.
    """

    name: str
    status: OutboxStatus
    sweep_after: float
    scheduled: bool
    swept_seconds: float | None
    patience: float
    indexed: bool | None
    broker_error: str | None
    index: str = FIELD
    sweeps_known: bool = True
    sweep_every: float | None = None

    @property
    def late(self) -> bool:
        """Whether an entry has waited for so long that a sweep should have delivered it."""
        oldest = self.status.oldest_seconds
        return oldest is not None and oldest > late_after(self.sweep_after, self.sweep_every)

    @property
    def swept(self) -> bool:
        """Return True if somebody has swept lately, as far as that can be known."""
        if self.swept_seconds is None:
            return not self.sweeps_known
        return self.swept_seconds <= self.patience

    def advice(self) -> list[str]:
        """What to do, most urgent first; empty when all is well."""
        broker, hidden = [], {"late"}
        if self.broker_error is not None:
            broker = [f"The broker does not answer: {self.broker_error}. Entries wait in MongoDB until it is back."]
            hidden = {"late", "sweep"}
        elif self.swept and self.status.failing + self.status.other_apps < self.status.documents:
            hidden = set()  # else another sentence says why it is late
        wrong = [each for each in judge_health(self, ANY_APP) if each.severity != "ok" and each.code not in hidden]
        return [*broker, *(f"{each.sentence} `{each.command}`" if each.command else each.sentence for each in wrong)]


def judge_health(health: Health, line: CommandLine) -> Iterator[Finding]:
    """Judge what is pending, for how long, what has failed, and whether somebody sweeps."""
    status = health.status
    if not health.late:
        yield ok("late", f"{number(status.pending, 'entry is', 'entries are')} pending, none for long.")
    else:
        yield failing(
            "late",
            f"{number(status.pending, 'entry waits', 'entries wait')}, the oldest for "
            f"{duration(status.oldest_seconds or 0.0)}; a sweep should take them after {health.sweep_after:g} s. Look "
            "for `outbox` in the worker's log. This delivers them now:",
            line.celery("outbox", "sweep"),
        )
    if health.swept:
        yield ok("sweep", "Somebody sweeps it.")
    else:
        since = "yet" if health.swept_seconds is None else f"for {duration(health.swept_seconds)}"
        beat = "" if health.scheduled else "This app has no beat entry for it: make the outbox with sweep_every. "
        yield failing(
            "sweep",
            f"Nobody has swept it {since}: what a crash or an outage leaves is never sent. {beat}Run beat, or the "
            "listener of a bridge, and a worker on the queue of the sweep, each with the module that makes the outbox.",
            line.celery("beat"),
        )
    yield from _judge_failures(status, line)
    if health.indexed is False and status.pending:
        yield degraded(
            "index",
            f"The index {health.index} is missing: each sweep reads the whole collection. The first delivery creates "
            "it, unless the user may not create indexes, or a transaction stays open; then create it by hand.",
        )


def _judge_failures(status: OutboxStatus, line: CommandLine) -> Iterator[Finding]:
    letters = line.celery("outbox", "dead-letters", "list")
    if status.stuck:
        yield failing(
            "stuck",
            f"{number(status.stuck, 'document is', 'documents are')} stuck behind an entry that fails again and again "
            "through its own fault; the worker's log says why. Fix the cause, or set such entries aside with "
            "failure_policy='dead_letter'.",
        )
    failed = status.failing - status.stuck
    if failed > 0:
        yield degraded(
            "failing",
            f"{number(failed, 'document holds', 'documents hold')} an entry that could not be published; the worker's "
            "log says why. It is tried again, with growing pauses.",
        )
    if status.other_apps:
        yield degraded(
            "other_apps",
            f"{number(status.other_apps, 'document waits', 'documents wait')} for another app, whose entry is the next "
            "one there: run that app's sweep, or name the app in delivers= here.",
        )
    if status.unsigned:
        yield failing(
            "unsigned",
            f"{number(status.unsigned, 'dead letter was', 'dead letters were')} not signed by the outbox, and not "
            "sent. Somebody else writes to its field, its signing key was lost, or its writers have another option "
            "database. Find out who wrote them, and discard them or replay them with --sign:",
            letters,
        )
    if status.dead_letters:
        entries = number(status.dead_letters, "entry was", "entries were")
        yield degraded("dead_letters", f"{entries} set aside: look at them, then replay or discard them:", letters)


def late_after(sweep_after: float, sweep_every: float | None) -> float:
    """From which age in seconds on an entry should have been delivered by a sweep."""
    return max(_LATE * sweep_after, sweep_after + 2 * (sweep_every or 0.0))


def is_scheduled(app: Celery) -> bool:
    """Whether the app has a beat entry for the sweep."""
    return any(entry.get("task") == SWEEP_TASK for entry in app.conf.beat_schedule.values())


def reach(outbox: AnyOutbox) -> None:
    """
    Have the primary answer once, within some seconds.

    Raises:
        PyMongoError: it did not.
        ConfigurationError: the collection cannot be opened.
    """
    try:
        client = outbox.collection.database.client
    except ValueError as error:  # what the driver raises for a port that is none
        raise ConfigurationError(f"the collection of {outbox!r} cannot be opened: {short(error)}") from error
    ping(client)


def read_health(app: Celery, outboxes: Sequence[AnyOutbox]) -> tuple[list[Health], dict[str, Exception]]:
    """
    Look at outboxes of one app; the broker is asked once.

    Returns:
        Those that could be read, and by its name why another could not.

    Raises:
        DeploymentError: none could be read: a right is missing, or the login was refused.
        PyMongoError: none could be read: MongoDB did not answer.
        ConfigurationError: none could be read: a collection cannot be opened.
    """
    found, unread, broker_error = list[Health](), dict[str, Exception](), None
    for outbox in outboxes:
        try:
            reach(outbox)
            broker_error = ask_broker(app) if not found else broker_error
            found.append(read_outbox(outbox, app, broker_error))
        except (DeploymentError, ConfigurationError, PyMongoError) as error:
            unread[known_name(outbox)] = error
    if unread and not found:
        raise next(iter(unread.values()))
    return found, unread


def known_name(outbox: AnyOutbox) -> str:
    """Return the name of an outbox, also where its collection cannot be opened."""
    try:
        return outbox.name
    except Exception:  # noqa: BLE001 - whatever the user's function raises
        return repr(outbox)


def concern_of(outbox: AnyOutbox) -> ErrorContext:
    """Whom an error of MongoDB concerns that an outbox meets, and what the outbox needs."""
    documents, dead_letters = outbox.collection.full_name, outbox.dead_letters.full_name
    notes, keys = outbox.backing.sweeps.full_name, outbox.backing.signer.full_name
    return ErrorContext(
        f"the outbox's collection {documents}, its dead letters, {dead_letters}, the notes of its sweeps, {notes}, or "
        f"its signing keys, {keys}",
        f"find, insert, update, remove and createIndex on {documents}, find, insert, update and remove on "
        f"{dead_letters}, and find, insert and update on {notes} and {keys}",
    )


def _last_sweep(outbox: AnyOutbox) -> tuple[float | None, bool]:
    """How many seconds ago, and whether that could be read at all: whoever may not read the notes sees the rest."""
    try:
        last = outbox.backing.sweeps.last()
    except OperationFailure:
        return None, False
    return (None if last is None else last.seconds), True


def read_outbox(outbox: AnyOutbox, app: Celery, broker_error: str | None) -> Health:
    """Look at one whose primary has answered, and of whose broker is known why it does not; errors as above."""
    try:
        status, (seconds, is_known) = outbox.status(), _last_sweep(outbox)
    except PyMongoError as error:
        known = explain_error(error, concern_of(outbox))
        if known is None:
            raise
        raise known from error
    return Health(
        name=outbox.name,
        status=status,
        sweep_after=outbox.sweep_after,
        scheduled=is_scheduled(app),
        swept_seconds=seconds,
        sweeps_known=is_known,
        patience=patience(outbox.backing.options.sweep_every),
        sweep_every=outbox.backing.options.sweep_every,
        indexed=outbox.backing.is_indexed(),
        broker_error=broker_error,
        index=outbox.backing.field.name,
    )


def ask_broker(app: Celery) -> str | None:
    """Why the broker does not answer within some seconds, without credentials; None when it does."""
    try:
        reach_broker(app, BROKER_SECONDS)
    except (ConfigurationError, KeyError, ImportError, ValueError) as error:
        return f"its URL is not usable ({short(error)})"
    except Exception as error:  # noqa: BLE001 - every transport raises its own
        with write_connection(app) as connection:
            where = without_credentials(connection.as_uri())
        return f"no answer from {where} within {BROKER_SECONDS} s ({short(error)})"
    return None
