"""The pages of dead letters: a list, details with traceback and change, replay and discard."""

from __future__ import annotations

import json
from collections.abc import Mapping

from django.core.paginator import Paginator
from django.http import HttpRequest, QueryDict

from mongo_celery.bridge.operations.dead_letter_commands import Found, change_of, plain, short_ids
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.state.dead_letters import DeadChange
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.cli.dead_letters_view import describe_parked, describe_passed, describe_replay
from mongo_celery.contrib.django.admin.pages import (
    AdminCell,
    AdminPage,
    AdminRow,
    AdminTable,
    ListFilter,
    OperationsAdmin,
    find_bridge,
    make_operations,
)
from mongo_celery.contrib.django.project import celery_app
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan
from mongo_celery.quantities import moment, number, size


class DeadLetterAdmin(OperationsAdmin):
    """The dead letters of one bridge at a time."""

    labels: Mapping[str, str] = {
        "replay": "Replay",
        "replay_over_newer": "Replay over newer changes",
        "discard": "Discard",
    }
    names = ("bridge", "letter")
    details = "letter"

    def read_page(self, request: HttpRequest) -> AdminPage:
        """Read one dead letter, or a page of a handler's or a document's dead letters."""
        names = [each.name for each in BRIDGES.of(celery_app())]
        if not names:
            return AdminPage(title="Dead letters", lines=["The project's Celery app has no bridge."])
        bridge = request.GET.get("bridge") or names[0]
        operations = make_operations(request, bridge)
        if "letter" in request.GET:
            return self._show_letter(request, operations, bridge)
        handler, key = request.GET.get("handler", ""), request.GET.get("key", "")
        letters = Paginator(_Letters(operations, handler or None, key or None), self.list_per_page)
        part = letters.get_page(request.GET.get("page"))
        found: Found = part.object_list
        ids = short_ids([each.id for each in found.letters])
        rows = [self._list_letter(request, each, id_, found) for each, id_ in zip(found.letters, ids, strict=True)]
        listener = "" if found.leads or not rows else " No listener is running, so replays wait."
        return AdminPage(
            title="Dead letters",
            lines=[f"{number(letters.count, 'dead letter', 'dead letters')}.{listener}"],
            filters=[
                ListFilter(name="bridge", label="Bridge", value=bridge, options=names),
                ListFilter(name="handler", label="Handler", value=handler),
                ListFilter(name="key", label="Document's _id, as JSON or text", value=key),
            ],
            tables=[AdminTable(rows=rows, choices="letter", actions=self.labels, fields={"bridge": bridge})],
            part=part,
        )

    def _list_letter(self, request: HttpRequest, letter: DeadChange, id_: str, found: Found) -> AdminRow:
        query = request.GET.copy()
        query["bridge"], query["letter"] = letter.document_id.partition("/")[0], letter.document_id
        cells = {"Id": AdminCell(id_, url=f"?{query.urlencode()}", style="code"), **_describe(letter, found)}
        return AdminRow(cells, choice=letter.document_id)

    def _show_letter(self, request: HttpRequest, operations: Operations, bridge: str) -> AdminPage:
        found = operations.find_dead_letters(ids=_check_names(bridge, request.GET))
        if not found.letters:
            raise CommandRefusedError("This dead letter no longer exists. Go back to the list.")
        letter = found.letters[0]
        facts = {
            "Id": letter.id,
            **_describe(letter, found),
            "Attempts": number(letter.attempts, "attempt", "attempts"),
            "Kept": f"{letter.kept}, {size(letter.bytes)}",
        }
        change = change_of(find_bridge(bridge), letter) if self.may_see_contents(request) else {}
        event = change.get("event")
        text = json.dumps(event, indent=2, ensure_ascii=False) if event is not None else change.get("raw")
        return AdminPage(
            title=f"Dead letter {short_ids([letter.id])[0]}",
            tables=[AdminTable(rows=[AdminRow({"": name, " ": value}) for name, value in facts.items() if value])],
            contents={"Traceback": letter.traceback or "", "Change": text or ""},
            actions=self.labels,
            fields={"bridge": bridge, "letter": letter.document_id},
        )

    def make_plan(self, operations: Operations, action: str, form: QueryDict, reason: str | None) -> Plan:
        """Plan to replay or discard the dead letters in a form."""
        ids = _check_names(form.get("bridge", ""), form)
        if action == "discard":
            return operations.discard_dead_letters(ids=ids, reason=reason)
        return operations.replay_dead_letters(ids=ids, over_newer=action == "replay_over_newer", reason=reason)


class _Letters:
    """The dead letters of a selection, for Django's paginator."""

    def __init__(self, operations: Operations, handler: str | None, key: str | None) -> None:
        self._operations = operations
        self._handler = handler
        self._key = key

    def __len__(self) -> int:
        return self._operations.find_dead_letters(self._handler, key=self._key, limit=1).count

    def __getitem__(self, part: slice) -> Found:
        limit = max(part.stop - part.start, 1)
        return self._operations.find_dead_letters(self._handler, key=self._key, limit=limit, skip=part.start)


def _check_names(bridge: str, given: QueryDict) -> list[str]:
    """
    Return the full `_id`s of the dead letters in a form or an address.

    Raises:
        CommandRefusedError: there is none, or one belongs to another bridge.
    """
    names = list(dict.fromkeys(given.getlist("letter")))
    if not names or not all(each.startswith(f"{bridge}/") for each in names):
        raise CommandRefusedError("No dead letters are chosen. Choose some first.")
    return names


def _describe(letter: DeadChange, found: Found) -> dict[str, object]:
    fields = plain(letter, found.key_of(letter))
    notes = (describe_passed(fields), describe_parked(fields), describe_replay(fields, leads=found.leads))
    return {
        "Handler": letter.subscription,
        "Change": letter.key,
        "Error": letter.error,
        "Cause": letter.cause.replace("_", " "),
        "Since": moment(letter.at),
        "Notes": "; ".join(filter(None, notes)),
    }
