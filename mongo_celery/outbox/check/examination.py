"""
The preflight of outboxes: everything outside our code that their writes and their delivery depend on; and what stands.

Nothing is written. A server that does not answer is a finding, and the rest is still looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import Celery

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.broker.server_check import BROKER_SECONDS, check_server
from mongo_celery.broker.workers import WorkerReplies
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError
from mongo_celery.findings import Finding, degraded, failing, ok
from mongo_celery.mongo.opening import collect_findings
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.outbox.backing import OutboxStatus
from mongo_celery.outbox.check.contents import check_contents
from mongo_celery.outbox.check.odm import check_models
from mongo_celery.outbox.check.storage import WantedIndex, check_rights, check_storage
from mongo_celery.outbox.check.sweeping import Sweeping, ask_about_sweeps, judge_sweeping, sweep_queue
from mongo_celery.outbox.entries import task_entry
from mongo_celery.outbox.health import concern_of, is_scheduled, late_after, reach, unsigned_sentence
from mongo_celery.outbox.index import of_pending
from mongo_celery.outbox.parcel_backing import ParcelBacking
from mongo_celery.outbox.parcels import ORDER
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.swept import patience
from mongo_celery.quantities import duration, number

if TYPE_CHECKING:
    from mongo_celery.outbox.registry import AnyOutbox


@dataclass(frozen=True, slots=True)
class AppFacts:
    """
    What all outboxes of an app share, asked for once.

    Attributes:
        findings: on the broker and the app's settings.
        said: what workers say, why they cannot be asked, or None where the broker does not answer.
    """

    findings: Sequence[Finding]
    said: WorkerReplies | str | None


def look_around(app: Celery) -> AppFacts:
    """Ask the broker and the workers, for some seconds."""
    found = list(_check_settings(app))
    try:
        with bounded_connection(app, BROKER_SECONDS) as connection:
            found += check_server(connection)
    except (ConfigurationError, KeyError, ImportError, ValueError) as failure:
        found.append(failing("broker", f"Its URL is not usable ({short(failure)}); correct broker_url."))
    answers = not any(each.code == "broker" and each.severity == "failing" for each in found)
    return AppFacts(found, ask_about_sweeps(app) if answers else None)


def _check_settings(app: Celery) -> Iterator[Finding]:
    if app.conf.task_always_eager:
        yield failing("task_always_eager", "Whoever delivers runs the tasks itself, one after the other; unset it.")


def check(outbox: AnyOutbox, facts: AppFacts) -> list[Finding]:
    """
    Look at everything that one outbox needs, and at what is pending in it, for some seconds.

    Not promised: that what is well now stays so.
    """
    found = collect_findings(
        "mongodb", lambda: _check_answer(outbox), ErrorContext("what this command needs", "readWrite there")
    )
    if found[-1].severity == "failing":
        return [*found, *facts.findings]
    concern = concern_of(outbox)
    for name, part in _parts(outbox, facts).items():
        found += collect_findings(name, part, concern)
    return [*found, *facts.findings]


def _check_answer(outbox: AnyOutbox) -> Iterator[Finding]:
    reach(outbox)
    yield ok("mongodb", f"The primary answers, and {outbox.collection.full_name} can be opened.")


def _parts(outbox: AnyOutbox, facts: AppFacts) -> Mapping[str, Callable[[], Iterable[Finding]]]:
    backing = outbox.backing
    plain, options, field = backing.plain, backing.options, backing.field
    return {
        "rights": lambda: check_rights(plain, _others(outbox)),
        "key": lambda: _check_key(outbox),
        "collection": lambda: check_storage(plain, field.name, _index_of(outbox), _example(outbox.app, field)),
        "models": lambda: check_models(plain.database.name, plain.name, field.name),
        "pending": lambda: check_contents(
            plain,
            field.name,
            apps=[app or "" for app in outbox.publisher.apps],
            tasks=None if options.foreign_tasks else outbox.app.tasks,
            late=late_after(outbox.sweep_after, options.sweep_every),
            max_pending=None if isinstance(backing, ParcelBacking) else options.max_pending,
        ),
        "sweep": lambda: _check_sweeping(outbox, facts),
        "state": lambda: judge_state(
            outbox.status(), outbox.sweep_after, options.sweep_every, CommandLine.of(outbox.app)
        ),
    }


def _check_key(outbox: AnyOutbox) -> Iterator[Finding]:
    signer = outbox.backing.signer
    there = "is there" if signer.exists() else "is not there yet: the first write or sweep stores it"
    yield ok("key", f"This user may read {signer.full_name}. The key that signs entries {there}.")


def _others(outbox: AnyOutbox) -> list[tuple[str, str]]:
    """Database and name of the outbox's own collections."""
    _, *further = outbox.backing.full_names
    own = [*further, outbox.dead_letters.full_name, outbox.backing.sweeps.full_name]
    return [(database, name) for database, _, name in (each.partition(".") for each in own)]


def _index_of(outbox: AnyOutbox) -> WantedIndex:
    """The index by which a sweep finds what is due."""
    backing = outbox.backing
    if isinstance(backing, ParcelBacking):
        return WantedIndex(backing.index_name, (("key", 1), *ORDER), None)
    wanted = of_pending(backing.plain, backing.field)
    return WantedIndex(wanted.name, tuple(wanted.keys), wanted.condition)


def _example(app: Celery, field: PendingField) -> dict[str, Any]:
    """A value of the field, as a write stores it."""
    now = datetime.now(UTC)
    signature = app.signature("example")
    return field.new_field([task_entry(app, signature, now)])


def _check_sweeping(outbox: AnyOutbox, facts: AppFacts) -> Iterable[Finding]:
    options = outbox.backing.options
    sweeping = Sweeping(
        last=outbox.backing.sweeps.last(),
        patience=patience(options.sweep_every),
        is_scheduled=is_scheduled(outbox.app),
        queue=sweep_queue(outbox.app),
        line=CommandLine.of(outbox.app),
    )
    return judge_sweeping(sweeping, facts.said)


def judge_state(
    status: OutboxStatus, sweep_after: float, sweep_every: float | None, line: CommandLine
) -> Iterator[Finding]:
    """What is pending, for how long, and what has failed."""
    oldest = status.oldest_seconds
    if oldest is not None and oldest > late_after(sweep_after, sweep_every):
        entries = number(status.pending, "entry waits", "entries wait")
        yield failing(
            "late",
            f"{entries} in {number(status.documents, 'document', 'documents')}, the oldest for {duration(oldest)}; a "
            f"sweep should take them after {sweep_after:g} s. What else is wrong here says why; see the workers' log, "
            "too.",
        )
    else:
        yield ok("late", f"{number(status.pending, 'entry is', 'entries are')} pending, none for long.")
    if status.stuck:
        documents = number(status.stuck, "document is", "documents are")
        yield failing(
            "stuck",
            f"{documents} stuck behind an entry that fails again and again through its own fault; the workers' log "
            "says why. Cure the cause, or set such entries aside with failure_policy='dead_letter'.",
        )
    if status.failing > status.stuck:
        documents = number(status.failing - status.stuck, "document holds", "documents hold")
        yield degraded("failing", f"{documents} an entry that could not be published; the workers' log says why.")
    if status.unsigned:
        yield failing("unsigned", unsigned_sentence(status.unsigned))
    if status.dead_letters:
        yield degraded(
            "dead_letters",
            f"{number(status.dead_letters, 'entry was', 'entries were')} set aside: look at them, then replay or "
            "discard them.",
            line.celery("outbox", "dead-letters", "list"),
        )
