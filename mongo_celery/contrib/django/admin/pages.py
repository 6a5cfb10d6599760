"""
Tables and plans as pages of the admin.

A GET changes nothing. An action needs two posts: the first shows its plan, the second runs it. The form names the
target of the plan, so nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pymongo
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page as DjangoPage
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.views.decorators.clickjacking import xframe_options_deny

from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.wiring import BRIDGES, Wiring
from mongo_celery.cli.apps import sentence_for
from mongo_celery.command_line import CommandLine
from mongo_celery.contrib.django.project import app_address, celery_app
from mongo_celery.contrib.django.templatetags.mongo_celery import to_line
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan
from mongo_celery.visible import visible

READ_SECONDS = 10.0
_REFUSED_MAX = 5


@dataclass(frozen=True, slots=True)
class AdminCell:
    """A value in a table, with an optional link and a CSS class, such as a state."""

    text: object
    url: str = ""
    style: str = ""

    def __str__(self) -> str:
        return str(self.text)


@dataclass(frozen=True, slots=True)
class AdminRow:
    """
    One row of a table.

    Attributes:
        cells: values or an `AdminCell`, by column name. All rows of a table have the same columns.
        actions: buttons, by action name.
        fields: the target of the buttons.
        choice: value of the row's checkbox. Empty for no checkbox.
    """

    cells: Mapping[str, object]
    actions: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    choice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminTable:
    """
    A table.

    Attributes:
        title: the heading.
        rows: the rows, in order.
        none: text for a table without rows. Without this text, an empty table is omitted.
        choices: name of the checkboxes. The buttons below the table act on checked rows.
        actions: buttons below the table, by action name.
        fields: additional fields that these buttons send.
    """

    title: str = ""
    rows: Sequence[AdminRow]
    none: str = ""
    choices: str = ""
    actions: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_actions(self) -> bool:
        """Return True if a row has buttons."""
        return any(each.actions for each in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFilter:
    """A field that filters a list. With `options`, the user selects one."""

    name: str
    label: str
    value: str
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPage:
    """
    A page.

    Attributes:
        lines: sentences above the tables.
        problem: reason why the page can show nothing.
        part: the displayed part of a list, in the page's last table.
        contents: documents and tracebacks, by heading.
    """

    title: str
    lines: Sequence[str] = ()
    problem: str = ""
    filters: Sequence[ListFilter] = ()
    tables: Sequence[AdminTable] = ()
    part: DjangoPage | None = None
    contents: Mapping[str, str] = field(default_factory=dict)
    actions: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


class OperationsAdmin(ModelAdmin):  # type: ignore[misc] # Django has no types
    """Pages of a model without a table: `view` shows them, and `change` is the permission for every action."""

    read_page: Callable[[HttpRequest], AdminPage]
    """Method of each page: read the content for an address."""
    make_plan: Callable[[Operations, str, QueryDict, str | None], Plan]
    """Method of each page: plan an action on the target in a form, with a reason."""
    labels: Mapping[str, str] = {}
    """The actions of the page, with their button texts."""
    names: Sequence[str] = ()
    """Form fields that name the target of an action."""
    details: str = ""
    """Address field of a details page. A list does not have it."""

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002 - Django's
        """Return False. Not even a superuser can add anything here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Return False. Rows cannot be deleted here."""
        return False

    def may_see_contents(self, request: HttpRequest) -> bool:
        """Return True if the user may see the documents of changes."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.see_contents"))

    def get_urls(self) -> list[Any]:
        """Return the addresses of the page and of its forms."""
        prefix = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(address, self.admin_site.admin_view(xframe_options_deny(view)), name=f"{prefix}_{name}")
            for address, view, name in (("", self._show, "changelist"), ("act/", self._act, "act"))
        ]

    def _show(self, request: HttpRequest) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            with pymongo.timeout(READ_SECONDS):
                page = self.read_page(request)
        except Exception as error:  # noqa: BLE001 - it is raised again unless users can fix it
            page = AdminPage(title=str(self.opts.verbose_name_plural).capitalize(), problem=to_sentence(error))
            return self._render(request, "page.html", page.title, page=page, first_url=self.url("changelist"))
        return self._render(request, "page.html", page.title, page=page)

    def _act(self, request: HttpRequest) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_change_permission(request):
            raise PermissionDenied
        form = request.POST
        action, reason = form.get("action", ""), form.get("reason", "").strip() or None
        try:
            if action not in self.labels:
                raise CommandRefusedError("Choose an action.")
            with pymongo.timeout(READ_SECONDS):
                plan = self.make_plan(make_operations(request, form.get("bridge", "")), action, form, reason)
            if "confirmed" in form and form.get("seen", "") != plan.seen:
                raise CommandRefusedError(
                    "The state has changed since you opened this page, so nothing was done. Check it, then repeat "
                    "the action."
                )
        except Exception as error:  # noqa: BLE001
            messages.error(request, to_line(to_sentence(error)))
            return HttpResponseRedirect(self._list_url(request))
        if "confirmed" not in form:
            return self._confirm(request, plan, action)
        self._run(request, plan, action, reason)
        return HttpResponseRedirect(self._list_url(request))

    def _confirm(self, request: HttpRequest, plan: Plan, action: str) -> HttpResponse:
        found = {
            "command": plan.command,
            "refused": plan.refused,
            "lines": plan.lines,
            "question": plan.question,
            "seen": plan.seen,
            "contents": "\n".join(plan.contents) if self.may_see_contents(request) else "",
            "is_ready": plan.act is not None,  # a template with the plan itself would call `act`
            "action": action,
            "label": self.labels[action],
            "fields": [(name, value) for name in self.names for value in request.POST.getlist(name)],
        }
        return self._render(request, "confirm.html", self.labels[action], **found)

    def _run(self, request: HttpRequest, plan: Plan, action: str, reason: str | None) -> None:
        """Run a plan, show its result, and write it to Django's log. The plan includes the audit record."""
        try:
            result = plan.run()
        except Exception as error:  # noqa: BLE001
            done, refused = "", [to_sentence(error)]
        else:
            done, refused = ". ".join(result.lines), [*result.refused]
            messages.success(request, to_line(f"Done: {done}"))
        for sentence in refused[:_REFUSED_MAX]:
            messages.error(request, to_line(sentence))
        if len(refused) > _REFUSED_MAX:
            messages.error(request, f"And {len(refused) - _REFUSED_MAX} more.")
        named = ", ".join(value for name in self.names for value in request.POST.getlist(name))
        parts = [f"{action} {named}:", done, *refused, f"Reason: {reason}" if reason else ""]
        bridge = self.model(name=request.POST["bridge"])
        self.log_change(request, bridge, visible(" ".join(filter(None, parts))))

    def _list_url(self, request: HttpRequest) -> str:
        """Return the address of the list with its filters and its page."""
        query = request.GET.copy()
        query.pop(self.details, None)
        return f"{self.url('changelist')}?{query.urlencode()}"

    def url(self, page: str, model: type | None = None) -> str:
        """Return the address of `changelist` or `act`, of this model by default."""
        opts = getattr(model or self.model, "_meta")  # noqa: B009 - Django's public name
        name = f"admin:{opts.app_label}_{opts.model_name}_{page}"
        return str(reverse(name, current_app=self.admin_site.name))

    def _render(self, request: HttpRequest, template: str, title: str, **found: object) -> HttpResponse:
        query = request.GET.copy()
        act_url = f"{self.url('act')}?{query.urlencode()}"
        query.pop("page", None)
        request.current_app = self.admin_site.name  # templates read it
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": to_line(title),
            "may_act": self.has_change_permission(request),
            "list_url": self._list_url(request),
            "first_url": self._list_url(request) if self.details else self.url("changelist"),
            "act_url": act_url,
            "query": query.urlencode(),
            **found,
        }
        return TemplateResponse(request, f"mongo_celery/admin/{template}", context)


def make_operations(request: HttpRequest, bridge: str) -> Operations:
    """
    Return the commands of a bridge for the user.

    Raises:
        CommandRefusedError: the bridge does not exist.
        ConfigurationError: there is no Celery app.
    """
    wiring = find_bridge(bridge)
    line = CommandLine(app_address(), bridge if len(BRIDGES.of(wiring.app)) > 1 else None)
    return Operations(wiring, f"{request.user.get_username()} (Django)", line)


def find_bridge(name: str) -> Wiring:
    """Return a bridge of the project's app. Errors as in `make_operations`."""
    wiring = BRIDGES.find(celery_app(), name)
    if wiring is None:
        raise CommandRefusedError(f"There is no bridge {name!r}. Go back to the list.")
    return wiring


def to_sentence(error: Exception) -> str:
    """Return the sentence for an error that users can fix. Raise other errors."""
    sentence = sentence_for(error)
    if sentence is None:
        raise error
    return sentence
