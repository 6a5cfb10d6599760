"""The page of outboxes: what is pending, a sweep, and the entries that could not be published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, QueryDict

from mongo_celery.cli.apps import sentence_for
from mongo_celery.contrib.django.admin.operations_admin import (
    ActionOutcome,
    Confirmation,
    OperationsAdmin,
    PageAction,
    chosen,
    chosen_letters,
    each_of,
    listed,
    page_of,
    refuse,
)
from mongo_celery.contrib.django.admin.project_app import all_in_project, one_in_project
from mongo_celery.contrib.django.admin.words import block, document, shown
from mongo_celery.contrib.django.project import celery_app
from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
from mongo_celery.outbox import replay as commands
from mongo_celery.outbox.health import ask_broker, concern_of, reach, read_outbox
from mongo_celery.outbox.registry import OUTBOXES
from mongo_celery.quantities import duration, moment, number

if TYPE_CHECKING:
    from mongo_celery.mongo.verdicts import ErrorContext
    from mongo_celery.outbox.health import Health
    from mongo_celery.outbox.registry import AnyOutbox
    from mongo_celery.outbox.replay import DeadLetter

_SWEPT = 200
"""Documents of one sweep: somebody waits for the page."""


class OutboxAdmin(OperationsAdmin):
    """All outboxes of the project's app."""

    template = "outboxes.html"
    registry = OUTBOXES
    list_page = "show"
    list_names = ("outbox",)

    def first_page(self, request: HttpRequest) -> Mapping[str, Any]:  # noqa: ARG002
        """A row for each; one that cannot be read says why."""
        app, outboxes = celery_app(), all_in_project(OUTBOXES)
        broker_error = ask_broker(app)  # which all have in common

        def read(outbox: AnyOutbox) -> Health:
            reach(outbox)
            return read_outbox(outbox, app, broker_error)

        return {"outboxes": [*map(self._row, outboxes, each_of(outboxes, read))]}

    def _row(self, outbox: AnyOutbox, health: Health | BaseException) -> Mapping[str, Any]:
        row = {"name": outbox.name, "url": self.url("show", outbox=outbox.name)}
        if isinstance(health, BaseException):
            sentence = sentence_for(health, lambda: concern_of(outbox))
            if sentence is None:
                raise health
            return {**row, "advice": [shown(sentence)]}
        return {**row, **_figures(health)}

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """The dead letters of an outbox, or one of them with its traceback."""
        outbox = one_in_project(OUTBOXES, chosen(request, "outbox"))
        name = chosen(request, "letter")
        reach(outbox)
        if name:
            return "outbox_letter.html", f"Dead letter {name}", self._letter(request, outbox, _one(outbox, name))
        skip = page_of(request) * self.list_per_page
        found, count = commands.dead_letters(outbox, self.list_per_page, skip=skip), outbox.dead_letters.count()
        back = self.back(request)
        rows = [
            {**_letter_row(each), "url": self.url("show", outbox=outbox.name, letter=each.id, **back)} for each in found
        ]
        shown_ = {"outbox": outbox.name, "letters": rows, **self.pages(request, count)}
        return "outbox.html", f"Outbox {outbox.name}", shown_

    def concern_of(self, request: HttpRequest) -> Callable[[], ErrorContext] | None:
        """Of the outbox that is named."""
        return lambda: concern_of(one_in_project(OUTBOXES, chosen(request, "outbox")))

    def _letter(self, request: HttpRequest, outbox: AnyOutbox, found: DeadLetter) -> Mapping[str, Any]:
        return {
            "outbox": outbox.name,
            "letter": {**_letter_row(found), "traceback": block(found.traceback)},
            "contents": document(found.entry) if self.may_see_contents(request) else "",
        }

    def page_actions(self) -> Mapping[str, PageAction]:
        """As `outbox sweep`, `outbox dead-letters replay` and `discard`."""
        names = ("outbox", "letter")
        return {
            "sweep": PageAction(label="Sweep now", names=("outbox",), target=_target, ask=_ask_to_sweep, run=_sweep),
            "replay": PageAction(label="Replay", names=names, target=_target, ask=_ask_to_replay, run=_replay),
            "discard": PageAction(label="Discard", names=names, target=_target, ask=_ask_to_discard, run=_discard),
        }


def _figures(health: Health) -> dict[str, Any]:
    status = health.status
    return {
        "pending": status.pending,
        "documents": status.documents,
        "oldest": duration(status.oldest_seconds) if status.pending else "-",
        "failing": status.failing,
        "dead_letters": status.dead_letters,
        "broker": "answers" if health.broker_error is None else "does not answer",
        "advice": [shown(sentence) for sentence in health.advice()],
    }


def _letter_row(found: DeadLetter) -> dict[str, Any]:
    entry = found.entry
    return {
        "id": found.id,
        "kind": shown(entry.get("kind", "?")),
        "name": shown(entry.get("name", "?")),
        "document": shown(repr(found.document)),
        "at": moment(found.at.isoformat() if found.at is not None else None),
        "error": shown(found.error),
    }


def _one(outbox: AnyOutbox, name: str) -> DeadLetter:
    found = commands.dead_letter(outbox, name)
    if found is None:
        raise refuse(f"Outbox {outbox.name} has no dead letter {name} any more: go back to the list.")
    return found


def _named(request: HttpRequest) -> tuple[AnyOutbox, list[DeadLetter]]:
    """The outbox and the dead letters that a form names; errors as of `_one` and `chosen_letters`."""
    outbox = one_in_project(OUTBOXES, chosen(request, "outbox"))
    names = chosen_letters(request)
    reach(outbox)
    return outbox, [_one(outbox, name) for name in names]


def _target(form: QueryDict) -> str:
    names = form.getlist("letter")
    outbox = str(form.get("outbox", ""))
    if not names:
        return outbox
    return f"{outbox}/{names[0]}" if len(names) == 1 else f"{outbox}: {len(names)} dead letters"


def _ask_to_sweep(request: HttpRequest) -> Confirmation:
    outbox = one_in_project(OUTBOXES, chosen(request, "outbox"))
    return Confirmation(
        question="Deliver now what was left behind?",
        about=[outbox.name],
        notes=[f"What has waited for more than {outbox.sweep_after:g} s, of {_SWEPT} documents at most."],
    )


def _sweep(request: HttpRequest) -> ActionOutcome:
    outbox = one_in_project(OUTBOXES, chosen(request, "outbox"))
    reach(outbox)
    done = outbox.sweep(limit=_SWEPT)
    dead = number(done.dead, "became a dead letter", "became dead letters")
    refused = [] if done.error is None else [f"{done.left} are left: {done.error}"]
    return ActionOutcome(said=f"{done.dispatched} dispatched of {outbox.name}, {dead}.", refused=refused)


def _ask_to_replay(request: HttpRequest) -> Confirmation:
    _, letters = _named(request)
    return Confirmation(
        question=f"Put {number(len(letters), 'dead letter', 'dead letters')} back into their documents?",
        about=_lines(letters),
        notes=["They come last there, and the next sweep delivers them. Cure what they failed of first."],
        choices=[("without_document", "If the document is gone, publish all the same.")],
    )


def _ask_to_discard(request: HttpRequest) -> Confirmation:
    _, letters = _named(request)
    return Confirmation(
        question=f"Throw {number(len(letters), 'dead letter', 'dead letters')} away for good?",
        about=_lines(letters),
        notes=["Their tasks and events will never be published."],
    )


def _replay(request: HttpRequest) -> ActionOutcome:
    """One after the other; a refusal does not keep the others."""
    outbox, letters = _named(request)
    without_document = "without_document" in request.POST
    pending: list[str] = []
    published: list[str] = []
    refused: list[str] = []
    for each in letters:
        try:
            result = commands.replay(outbox, each.id, without_document=without_document)
        except (CommandRefusedError, OutboxRefusedError) as error:
            refused.append(sentence_for(error) or str(error))
        else:
            (published if result.entry is None else pending).append(each.id)
    done = [f"{word}: {listed(ids)}." for word, ids in (("Pending again", pending), ("Published", published)) if ids]
    return ActionOutcome(said=" ".join(done) or "Nothing was replayed.", refused=refused)


def _discard(request: HttpRequest) -> ActionOutcome:
    outbox, letters = _named(request)
    gone = [each.id for each in letters if commands.discard(outbox, each.id)]
    other = [f"{each.id}: somebody else has replayed or discarded it." for each in letters if each.id not in gone]
    count = number(len(gone), "dead letter was", "dead letters were")
    return ActionOutcome(said=f"{count} discarded{': ' if gone else ''}{listed(gone)}.", refused=other)


def _lines(letters: Sequence[DeadLetter]) -> list[str]:
    return [
        f"{each.id}: {each.entry.get('name', '?')} of document {each.document!r} ({each.error})" for each in letters
    ]
