"""The page of two-phase transactions: how they stand; run, canceled, taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, QueryDict

from mongo_celery.contrib.django.admin.operations_admin import (
    ActionOutcome,
    Confirmation,
    OperationsAdmin,
    PageAction,
    chosen,
    page_of,
    refuse,
)
from mongo_celery.contrib.django.admin.project_app import all_in_project, one_in_project
from mongo_celery.contrib.django.admin.words import document, shown
from mongo_celery.quantities import moment
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS
from mongo_celery.twophase.values import from_text, plain_id, readings, to_text

if TYPE_CHECKING:
    from mongo_celery.mongo.verdicts import ErrorContext
    from mongo_celery.twophase import TwoPhaseCommit
    from mongo_celery.twophase.states import Transaction

STATES = ("initial", "pending", "applied", "canceling", "done", "canceled")
_UNFINISHED = ("initial", "pending", "applied", "canceling")
_NAMES = ("name", "id")
_CURES: Mapping[str, tuple[str, ...]] = {
    "initial": ("run", "cancel"),
    "pending": ("run", "cancel"),
    "applied": ("run",),
    "canceling": ("run", "cancel"),
    "done": ("compensate",),
}
"""What can be done about a transaction in some state; what its state does not allow is refused in any case."""


class TransactionAdmin(OperationsAdmin):
    """The two-phase transactions of the project's app, those of one coordinator's log at a time."""

    template = "transactions.html"
    registry = TWO_PHASE_COMMITS
    list_names = ("name", "state", "id")

    def first_page(self, request: HttpRequest) -> Mapping[str, Any]:
        """The one of an id; or those of one state, or all that are not final, the one with the oldest step first."""
        names = [each.name for each in all_in_project(TWO_PHASE_COMMITS)]
        coordinator = _coordinator(request)
        state = chosen(request, "state")
        if state and state not in STATES:
            raise refuse(f"{state!r} is no state: it is one of {', '.join(STATES)}.")
        text, listed = chosen(request, "id"), self.list_per_page
        skip = page_of(request) * listed
        if text:
            found = [each for each in map(coordinator.stored, _ids(coordinator, text)) if each is not None]
        else:
            wanted = [state] if state else _UNFINISHED
            found = list(coordinator.log.find(wanted, None, listed + 1, skip=skip))  # one more: is there a page?
        back = self.back(request)
        rows = [
            {**_row(each), "url": self.url("show", name=coordinator.name, id=to_text(each["_id"]), **back)}
            for each in found[:listed]
        ]
        chosen_by = {"names": names, "name": coordinator.name, "state": state, "states": STATES, "id": text}
        return {**chosen_by, "transactions": rows, **self.pages(request, skip + len(found))}

    def concern_of(self, request: HttpRequest) -> Callable[[], ErrorContext] | None:
        """Of the coordinator that is named, or shown."""
        return lambda: _coordinator(request).log.concern

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """One, as it is stored for who may see that."""
        coordinator, found = _named(request)
        row = _row(found.document)
        labels = {name: action.label for name, action in self.page_actions().items()}
        return (
            "transaction.html",
            f"Transaction {row['id']}",
            {
                "name": coordinator.name,
                "id": to_text(found.id),
                "transaction": row,
                "cures": [(name, labels[name]) for name in _CURES.get(str(found.state), ())],
                "contents": document(found.document) if self.may_see_contents(request) else "",
            },
        )

    def page_actions(self) -> Mapping[str, PageAction]:
        """As `transactions run`, `cancel` and `compensate`."""
        return {
            "run": self._action("Run", "Advance this transaction to its end?", _run),
            "cancel": self._action("Cancel", "Roll this transaction back?", _cancel),
            "compensate": self._action("Take back", "Take this transaction back, by its opposite?", _compensate),
        }

    def _action(
        self, label: str, question: str, act: Callable[[TwoPhaseCommit, Any, HttpRequest], Transaction]
    ) -> PageAction:
        def ask(request: HttpRequest) -> Confirmation:
            _, found = _named(request)
            row = _row(found.document)
            return Confirmation(
                question=question,
                about=[f"{row['id']}: {row['state']}, {row['application']}"],
                contents=document(found.document) if self.may_see_contents(request) else "",
            )

        def run(request: HttpRequest) -> ActionOutcome:
            coordinator, found = _named(request)
            after = act(coordinator, found.id, request)
            return ActionOutcome(said=f"{to_text(after.id)}: {after.state}.")

        return PageAction(label=label, names=_NAMES, target=_target, ask=ask, run=run)


def _run(coordinator: TwoPhaseCommit, identity: Any, request: HttpRequest) -> Transaction:  # noqa: ARG001
    return coordinator.run(identity)


def _cancel(coordinator: TwoPhaseCommit, identity: Any, request: HttpRequest) -> Transaction:
    return coordinator.cancel(identity, f"canceled in the admin by user {request.user.pk}")


def _compensate(coordinator: TwoPhaseCommit, identity: Any, request: HttpRequest) -> Transaction:  # noqa: ARG001
    return coordinator.read(coordinator.compensate(identity))


def _named(request: HttpRequest) -> tuple[TwoPhaseCommit, Transaction]:
    """
    The coordinator and the transaction that a form or an address names, by its id as extended JSON.

    Raises:
        CommandRefusedError: the text names none.
        TransactionStateError: there is none, or other code has written it.
    """
    coordinator = one_in_project(TWO_PHASE_COMMITS, chosen(request, "name"))
    text = chosen(request, "id")
    try:
        identity = plain_id("id", from_text(text), coordinator.transactions.codec_options)
    except Exception as error:  # PyMongo raises what it likes on what is no extended JSON, or no document can have
        raise refuse("There is no such transaction: go back to the list.") from error
    return coordinator, coordinator.read(identity)


def _ids(coordinator: TwoPhaseCommit, text: str) -> list[Any]:
    """What an id that somebody has typed may mean."""
    found: list[Any] = [text]
    for reading in readings(text):
        with suppress(Exception):  # no document can have it; see `_named`
            found.append(plain_id("id", reading, coordinator.transactions.codec_options))
    return found


def _coordinator(request: HttpRequest) -> TwoPhaseCommit:
    """The one that is named; by default the first."""
    return one_in_project(TWO_PHASE_COMMITS, chosen(request, "name") or all_in_project(TWO_PHASE_COMMITS)[0].name)


def _target(form: QueryDict) -> str:
    return f"{form.get('name', '')}: {form.get('id', '')}"


def _row(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of it without its contents: whose documents it concerns, and not what becomes of them."""
    modified, application = stored.get("lastModified"), stored.get("application")
    return {
        "id": shown(to_text(stored["_id"])),
        "state": shown(stored.get("state")),
        "application": shown(f"of {application}" if application else "of no application"),
        "modified": moment(modified.isoformat()) if isinstance(modified, datetime) else "-",
        "what": shown(_what(stored)),
        "reason": shown(stored.get("stoppedBy") or stored.get("reason") or _never_begun(stored)),
    }


def _never_begun(stored: Mapping[str, Any]) -> str:
    return "nobody has begun it" if stored.get("state") == "initial" and "queuedAt" not in stored else ""


def _what(stored: Mapping[str, Any]) -> str:
    given = stored.get("changes", stored.get("participants"))
    if isinstance(given, list):
        return ", ".join(_participant(each) for each in given)
    if "source" in stored:
        return f"from {_text(stored.get('source'))} to {_text(stored.get('destination'))}"
    return "of a shape that is not known here"


def _participant(stored: object) -> str:
    if not isinstance(stored, dict):
        return "?"
    where = f"{stored['cluster']}:" if stored.get("cluster") else ""
    return f"{where}{stored.get('collection')} {_text(stored.get('id'))}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_text(value)
