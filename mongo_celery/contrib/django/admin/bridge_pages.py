"""The page of bridges: the verdict, handlers, what stands, and what lets it go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.http import HttpRequest, QueryDict
from django.urls import reverse

from mongo_celery.bridge.operations import commands, heads
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerStatus, LeaderStatus, PartitionStatus
from mongo_celery.bridge.operations.judgement import cut
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.cli.apps import sentence_for
from mongo_celery.contrib.django.admin.operations_admin import (
    ActionOutcome,
    Confirmation,
    OperationsAdmin,
    PageAction,
    chosen,
    each_of,
    refuse,
)
from mongo_celery.contrib.django.admin.project_app import all_in_project, line_in_project, one_in_project
from mongo_celery.contrib.django.admin.words import document, shown
from mongo_celery.contrib.django.models import ChangeDeadLetter
from mongo_celery.quantities import duration, moment, number

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.commands import CommandResult
    from mongo_celery.bridge.wiring import Wiring

_BLOCKED_MAX = 50
_NAMES = ("bridge", "handler", "partition")
_DOES: Mapping[str, tuple[str, str, str]] = {
    "pause": ("Pause", "paused", "No new handler starts; those that run may finish, and nothing is lost."),
    "resume": ("Resume", "resumed", "Paused partitions flow again."),
    "retry": ("Retry", "retried", "Halted and parked changes run again at once, and their attempts count anew."),
}
_CURES: Mapping[str, Sequence[tuple[str, str]]] = {
    "halted": (("retry", "Retry"), ("set_aside", "Set aside")),
    "retrying": (("retry", "Retry"),),
    "paused": (("resume", "Resume"),),
}
"""What can be done about a partition in some state: the action, and its button."""


class BridgeAdmin(OperationsAdmin):
    """All bridges of the project's app."""

    template = "bridges.html"
    registry = BRIDGES
    list_page = "show"
    list_names = ("bridge",)

    def first_page(self, request: HttpRequest) -> Mapping[str, Any]:  # noqa: ARG002
        """A row for each; one that cannot be read says why."""
        wirings = all_in_project(BRIDGES)
        return {"bridges": [*map(self._row, wirings, each_of(wirings, _read))]}

    def _row(self, wiring: Wiring, seen: BridgeSnapshot | BaseException) -> Mapping[str, Any]:
        row = {"name": wiring.name, "url": self.url("show", bridge=wiring.name)}
        if isinstance(seen, BaseException):
            sentence = sentence_for(seen)
            if sentence is None:
                raise seen
            return {**row, "verdict": "failing", "state": "unknown", "sentence": shown(sentence)}
        return {
            **row,
            "verdict": seen.verdict,
            "state": seen.state.replace("_", " "),
            "lag": duration(seen.lag_seconds),
            "dead_letters": seen.dead_letters,
            "sentence": shown(seen.findings[0].sentence if seen.findings else seen.note or ""),
        }

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """One bridge, as `changes status` has it."""
        wiring = one_in_project(BRIDGES, chosen(request, "bridge"))
        seen = _read(wiring)
        letters = self._letters_url(request, wiring.name)
        blocked = [(handler, each) for handler in seen.handlers for each in handler.partitions if each.is_blocked]
        return (
            "bridge.html",
            f"Bridge {wiring.name}",
            {
                "bridge": wiring.name,
                "status": seen,
                "lag": duration(seen.lag_seconds),
                "leader": _leader(seen.leader),
                "note": shown(seen.note or ""),
                "findings": [
                    {**asdict(each), "sentence": shown(each.sentence), "command": shown(each.command or "")}
                    for each in seen.findings
                ],
                "handlers": [_handler(each, letters) for each in seen.handlers],
                "blocked": [_partition(*each) for each in blocked[:_BLOCKED_MAX]],
                "more": max(len(blocked) - _BLOCKED_MAX, 0),
                "does": [(name, label) for name, (label, _, _) in _DOES.items()],
            },
        )

    def _letters_url(self, request: HttpRequest, bridge: str) -> str:
        """The page of its dead letters, up to the handler's name; empty for who may not see it, or has none."""
        if not self.admin_site.is_registered(ChangeDeadLetter):
            return ""
        if not request.user.has_perm(f"{self.opts.app_label}.view_changedeadletter"):
            return ""
        page = reverse("admin:mongo_celery_changedeadletter_changelist", current_app=self.admin_site.name)
        return f"{page}?{urlencode({'bridge': bridge})}&"

    def page_actions(self) -> Mapping[str, PageAction]:
        """As `changes pause`, `resume`, `retry` and `set-aside`."""
        found = {
            name: PageAction(
                label=label,
                names=_NAMES,
                target=_target,
                ask=partial(self._ask, name),
                run=partial(_run, getattr(commands, name), past),
            )
            for name, (label, past, _) in _DOES.items()
        }
        return {
            **found,
            "set_aside": PageAction(
                label="Set aside",
                names=_NAMES,
                target=_target,
                ask=self._ask_about_head,
                run=_set_aside,
            ),
        }

    def _ask(self, name: str, request: HttpRequest) -> Confirmation:
        label, _, note = _DOES[name]
        one_in_project(BRIDGES, chosen(request, "bridge"))
        return Confirmation(question=f"{label}?", about=[_target(request.POST)], notes=[note])

    def _ask_about_head(self, request: HttpRequest) -> Confirmation:
        """With the change itself, for who may see it; the form keeps which one it is."""
        wiring, handler, partition = _place(request)
        head = heads.read_halted(wiring, handler, _index(partition))
        contents = document(head.event) if head.event is not None and self.may_see_contents(request) else ""
        return Confirmation(
            question="Move this change to the dead letters, and let its partition go on?",
            about=[f"{head.subscription} {head.index}: {head.key}"],
            notes=[f"It halted with {cut(head.error)}.", "Nothing is thrown away: it can be replayed later."],
            keeps=[("token", head.token or "")],
            contents=contents,
        )


def _read(wiring: Wiring) -> BridgeSnapshot:
    return read_snapshot(wiring, line_in_project(wiring.name))


def _leader(leader: LeaderStatus | None) -> str:
    return "none" if leader is None else shown(f"{leader.host}, pid {leader.pid}, since {moment(leader.since)}")


def _handler(each: HandlerStatus, letters: str) -> Mapping[str, Any]:
    query = urlencode({"handler": each.name})
    return {
        "name": each.name,
        "shown": shown(each.name),
        "state": each.state,
        "lag": duration(each.lag_seconds),
        "partitions": len(each.partitions),
        "committed": each.committed,
        "stored": each.stored,
        "dead_letters": each.dead_letters,
        "letters_url": f"{letters}{query}" if letters and each.dead_letters else "",
    }


def _partition(handler: HandlerStatus, each: PartitionStatus) -> Mapping[str, Any]:
    return {
        "handler": handler.name,
        "shown": shown(handler.name),
        "index": str(each.index),  # in a form: Django writes numbers in the manner of the user's language
        "state": each.state,
        "key": shown(each.key or ""),
        "error": shown(cut(each.error) if each.error else ""),
        "retries": each.retries,
        "cures": _CURES.get(each.state, ()),
    }


def _target(form: QueryDict) -> str:
    handler, partition = form.get("handler", ""), form.get("partition", "")
    where = f"partition {partition} of {handler}" if partition else handler or "all handlers"
    return f"{form.get('bridge', '')}: {where}"


def _place(request: HttpRequest) -> tuple[Wiring, str | None, str]:
    wiring = one_in_project(BRIDGES, chosen(request, "bridge"))
    return wiring, chosen(request, "handler") or None, chosen(request, "partition")


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(1 << 16)):
        raise refuse(f"{text!r} is no partition.")
    return int(text)


def _run(
    command: Callable[[Wiring, str | None, int | None], list[CommandResult]], past: str, request: HttpRequest
) -> ActionOutcome:
    wiring, handler, partition = _place(request)
    results = command(wiring, handler, _index(partition) if partition else None)
    return _told(past, results)


def _set_aside(request: HttpRequest) -> ActionOutcome:
    wiring, handler, partition = _place(request)
    token = chosen(request, "token") or None
    return _told("set aside", [commands.set_aside(wiring, handler, _index(partition), token=token)])


def _told(past: str, results: Sequence[CommandResult]) -> ActionOutcome:
    """As the commands say it."""
    done = [each for each in results if each.result == "done"]
    left = [
        each.reason
        for each in results
        if each.result == "refused" or (each.result == "unfit" and each.state in {"halted", "retrying"})
    ]
    if not done:
        looked = number(len(results), "partition was", "partitions were")
        return ActionOutcome(said=f"Nothing to do: {looked} looked at, and none had to be {past}.", refused=left)
    names = sorted({each.subscription for each in done})
    places = [f"{name} {', '.join(str(each.index) for each in done if each.subscription == name)}" for name in names]
    return ActionOutcome(said=f"{past.capitalize()}: {'; '.join(places)}.", refused=left)
