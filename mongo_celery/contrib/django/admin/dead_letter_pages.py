"""The page of changes that were set aside: listed, looked at, replayed, discarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, QueryDict

from mongo_celery.bridge.operations import letter_commands as commands
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.bridge.operations.letter_commands import short_ids
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.cli.dead_letters_view import parked_line, passed_line, replay_line
from mongo_celery.contrib.django.admin.operations_admin import (
    Confirmation,
    OperationsAdmin,
    PageAction,
    ask_for,
    chosen,
    chosen_letters,
    operations_of,
    page_of,
    reason_in,
    refuse,
    run_plan,
)
from mongo_celery.contrib.django.admin.project_app import all_in_project, one_in_project
from mongo_celery.contrib.django.admin.words import block, document, shown
from mongo_celery.quantities import moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.letter_commands import Found
    from mongo_celery.bridge.state.dead_letters import Letter
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.plan import Plan

_NAMES = ("bridge", "letter")


class DeadLetterAdmin(OperationsAdmin):
    """The dead letters of one bridge at a time."""

    template = "dead_letters.html"
    registry = BRIDGES
    list_names = ("bridge", "handler", "key")

    def first_page(self, request: HttpRequest) -> Mapping[str, Any]:
        """Those of a handler, or of a document, or all; by handler, then in the order of the stream."""
        names = [each.name for each in all_in_project(BRIDGES)]
        wiring = one_in_project(BRIDGES, chosen(request, "bridge") or names[0])
        handler, key = chosen(request, "handler"), chosen(request, "key")
        selection = Selection(subscription=handler or None, keys=keys_of(key) if key else [])
        found = commands.find(wiring, selection, self.list_per_page, skip=page_of(request) * self.list_per_page)
        chosen_by = {"bridges": names, "bridge": wiring.name, "handler": handler, "key": key}
        rows = self._rows(request, wiring, found)
        return {**chosen_by, "letters": rows, "leads": found.leads, **self.pages(request, found.count)}

    def _rows(self, request: HttpRequest, wiring: Wiring, found: Found) -> list[Mapping[str, Any]]:
        ids, back = short_ids([each.id for each in found.letters]), self.back(request)
        return [
            {
                **_row(each, found),
                "id": short,
                "url": self.url("show", bridge=wiring.name, letter=each.document_id, **back),
            }
            for short, each in zip(ids, found.letters, strict=True)
        ]

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """One with its traceback, and with its change for who may see it."""
        wiring, found, (letter, *_) = _named(request)
        change = commands.change_of(wiring, letter) if self.may_see_contents(request) else {}
        contents = document(change["event"]) if change.get("event") is not None else shown(change.get("raw") or "")
        return (
            "dead_letter.html",
            f"Dead letter {short_ids([letter.id])[0]}",
            {
                "bridge": wiring.name,
                "letter": {**_row(letter, found), "id": letter.id, "traceback": block(letter.traceback)},
                "attempts": number(letter.attempts, "attempt", "attempts"),
                "bytes": size(letter.bytes),
                "kept": shown(letter.kept),
                "contents": contents,
            },
        )

    def page_actions(self) -> Mapping[str, PageAction]:
        """As `changes dead-letters replay` and `discard`."""
        return {
            "replay": PageAction(
                label="Replay",
                names=_NAMES,
                target=_target,
                ask=self._ask_to_replay,
                run=lambda request: run_plan(request, _plan_replay(request)),
            ),
            "discard": PageAction(
                label="Discard",
                names=_NAMES,
                target=_target,
                ask=lambda request: ask_for(
                    request, _plan_discard(request), self, label="Discard", about=_about(request)
                ),
                run=lambda request: run_plan(request, _plan_discard(request)),
            ),
        }

    def _ask_to_replay(self, request: HttpRequest) -> Confirmation:
        choices = [("over_newer", "Let them overwrite what newer changes have written through fenced().")]
        plan = _plan_replay(request)
        return replace(ask_for(request, plan, self, label="Replay", about=_about(request)), choices=choices, ready=True)

    def _ask_to_discard(self, request: HttpRequest) -> Confirmation:
        return ask_for(request, _plan_discard(request), self, label="Discard", about=_about(request))


def _row(letter: Letter, found: Found) -> dict[str, Any]:
    plain = commands.plain(letter, found.key_of(letter))
    lines = (passed_line(plain), parked_line(plain), replay_line(plain, leads=found.leads))
    return {
        "document_id": letter.document_id,
        "handler": shown(plain["subscription"]),
        "key": shown(plain["key"]),
        "cause": shown(plain["cause"].replace("_", " ")),
        "at": moment(plain["at"]),
        "error": shown(plain["error"]),
        "notes": [shown(line) for line in lines if line],
    }


def _named(request: HttpRequest) -> tuple[Wiring, Found, Sequence[Letter]]:
    """
    The bridge and the letters that a form or an address names, by their whole `_id`.

    Raises:
        CommandRefusedError: one of them is not there any more, or as of `chosen_letters`.
    """
    wiring = one_in_project(BRIDGES, chosen(request, "bridge"))
    names = chosen_letters(request)
    for name in names:
        if not name.startswith(f"{wiring.name}/"):
            raise refuse(f"{name!r} is no dead letter of bridge {wiring.name}.")
    found = commands.find_by_document_ids(wiring, names)
    there = {each.document_id for each in found.letters}
    for name in names:
        if name not in there:
            raise refuse(f"Dead letter {name.rpartition('/')[2]} is not there any more: go back to the list.")
    return wiring, found, found.letters


def _target(form: QueryDict) -> str:
    names = form.getlist("letter")
    return names[0] if len(names) == 1 else f"{form.get('bridge', '')}: {len(names)} dead letters"


def _plan_replay(request: HttpRequest) -> Plan:
    wiring, found, _ = _named(request)
    ids = [each.document_id for each in found.letters]
    over_newer, reason = "over_newer" in request.POST, reason_in(request)
    return operations_of(request, wiring).replay_dead_letters(ids=ids, over_newer=over_newer, reason=reason)


def _plan_discard(request: HttpRequest) -> Plan:
    wiring, found, _ = _named(request)
    ids = [each.document_id for each in found.letters]
    return operations_of(request, wiring).discard_dead_letters(ids=ids, reason=reason_in(request))


def _about(request: HttpRequest) -> list[str]:
    _, _, letters = _named(request)
    return [f"{each.subscription}: {each.key} ({each.error})" for each in letters]
