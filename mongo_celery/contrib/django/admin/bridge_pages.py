"""The page of bridges: the verdict, handlers, what stands, and what lets it go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.http import HttpRequest, QueryDict
from django.urls import reverse

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
    ask_for,
    chosen,
    each_of,
    operations_of,
    reason_in,
    refuse,
    run_plan,
)
from mongo_celery.contrib.django.admin.project_app import all_in_project, line_in_project, one_in_project
from mongo_celery.contrib.django.admin.words import shown
from mongo_celery.contrib.django.models import ChangeDeadLetter
from mongo_celery.quantities import duration, moment

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.plan import Plan

_BLOCKED_MAX = 50
_NAMES = ("bridge", "handler", "partition")
_DOES = {"pause": "Pause", "resume": "Resume", "retry": "Retry"}
_CURES: Mapping[str, Sequence[tuple[str, str]]] = {
    "halted": (("retry", "Retry"), ("skip", "Skip")),
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
                "does": [*_DOES.items()],
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
        """As `changes pause`, `resume`, `retry` and `skip`."""
        return {
            name: PageAction(
                label=label,
                names=_NAMES,
                target=_target,
                ask=partial(self._ask, name, label),
                run=partial(_run, name),
            )
            for name, label in {**_DOES, "skip": "Skip"}.items()
        }

    def _ask(self, name: str, label: str, request: HttpRequest) -> Confirmation:
        return ask_for(request, _plan(name, request), self, label=label, about=[_target(request.POST)])


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


def _run(name: str, request: HttpRequest) -> ActionOutcome:
    return run_plan(request, _plan(name, request))


def _plan(name: str, request: HttpRequest) -> Plan:
    operations = operations_of(request, one_in_project(BRIDGES, chosen(request, "bridge")))
    handler, partition = chosen(request, "handler") or None, chosen(request, "partition")
    plan: Plan = getattr(operations, name)(handler, _index(partition) if partition else None, reason=reason_in(request))
    return plan


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(1 << 16)):
        raise refuse(f"{text!r} is no partition.")
    return int(text)
