"""The page of bridges: the verdict, handlers, what stands, and what lets it go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.http import HttpRequest, QueryDict
from django.urls import reverse

from mongo_celery.bridge.operations.overview import overview
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.bridge.operations.verdict import judge
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
        return {"bridges": [*map(self._row, wirings, each_of(wirings, read_status))]}

    def _row(self, wiring: Wiring, status: dict[str, Any] | BaseException) -> Mapping[str, Any]:
        row = {"name": wiring.name, "url": self.url("show", bridge=wiring.name)}
        if isinstance(status, BaseException):
            sentence = sentence_for(status)
            if sentence is None:
                raise status
            return {**row, "verdict": "failing", "state": "unknown", "sentence": shown(sentence)}
        verdict = judge(status, line=line_in_project(wiring.name))
        return {
            **row,
            "verdict": verdict.state,
            "state": status["state"],
            "lag": duration(status["lag_seconds"]),
            "dead_letters": status["dead_letters"],
            "sentence": shown(verdict.reasons[0].sentence if verdict.reasons else verdict.note or ""),
        }

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """One bridge, as `changes status` has it."""
        wiring = one_in_project(BRIDGES, chosen(request, "bridge"))
        status = read_status(wiring)
        verdict = judge(status, line=line_in_project(wiring.name))
        seen = overview(status)
        letters = self._letters_url(request, wiring.name)
        return (
            "bridge.html",
            f"Bridge {wiring.name}",
            {
                "bridge": wiring.name,
                "status": seen,
                "lag": duration(seen["lag_seconds"]),
                "listener": _listener(seen["listener"]),
                "error": shown(seen["error"]) if seen["error"] else "",
                "verdict": verdict.state,
                "note": shown(verdict.note or ""),
                "reasons": [
                    {"severity": each.severity, "sentence": shown(each.sentence), "command": shown(each.command or "")}
                    for each in verdict.reasons
                ],
                "handlers": [_handler(each, letters) for each in seen["handlers"]],
                "standing": [_partition(each) for each in seen["attention"]],
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


def _listener(listener: Mapping[str, Any] | None) -> str:
    if listener is None:
        return "nobody leads"
    return shown(f"{listener['host']}, pid {listener['pid']}, since {moment(listener['since'])}")


def _handler(each: Mapping[str, Any], letters: str) -> Mapping[str, Any]:
    found = {"shown": shown(each["name"]), "lag": duration(each["lag_seconds"])}
    query = urlencode({"handler": each["name"]})
    return {**each, **found, "letters_url": f"{letters}{query}" if letters and each["dead_letters"] else ""}


def _partition(each: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **each,
        "shown": shown(each["subscription"]),
        "index": str(each["index"]),  # in a form: Django writes numbers in the manner of the user's language
        "key": shown(each["key"] or ""),
        "error": shown(each["error"] or ""),
        "cures": _CURES.get(each["state"], ()),
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
