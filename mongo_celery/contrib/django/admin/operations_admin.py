"""
What all the pages have in common: who may see and do what, how a page is shown, and how something is done.

Nothing is changed by a GET. An action comes twice as a POST with Django's token against forgery: the first shows what
is ahead, with the question; the second does it. What it names is what the person was shown, so that what has changed
meanwhile is refused, and not hit by accident. Whoever does something is written into Django's log before it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import pymongo
from django.contrib import messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.views.decorators.clickjacking import xframe_options_deny

from mongo_celery.app import Registry
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.cli.apps import sentence_for
from mongo_celery.contrib.django.admin.words import block, line, shown
from mongo_celery.contrib.django.project import celery_app
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.plan import Plan
from mongo_celery.visible import visible

S = TypeVar("S")
T = TypeVar("T")

logger = logging.getLogger("mongo_celery.contrib.django")

_READ_SECONDS = 10.0
_SENTENCES_MAX = 5
_REPRESENTATION_MAX = 160  # Django's log has room for 200 characters, and how many more there are takes some
_PAGE_DIGITS_MAX = 7
_NAMED_MAX = 5
_CHOSEN_MAX = 100
_YES = "yes"
_PAGE = "page"
_BACK = "back"
"""What the list was asked for from which somebody came, in the addresses of all pages behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """
    What a person is asked before something is done.

    Attributes:
        question: what is about to happen.
        about: what it happens to, a line each.
        notes: what is to be known about it; also what will not be done, and why.
        choices: names and labels of what may be ticked.
        keeps: fields that say what was shown, so that nothing else is hit.
        contents: a document or a message, as text; empty where the person may not see it, or there is none.
        ready: whether there is anything to do.
    """

    question: str
    about: Sequence[str]
    notes: Sequence[str] = ()
    choices: Sequence[tuple[str, str]] = ()
    keeps: Sequence[tuple[str, str]] = ()
    contents: str = ""
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """
    What was done.

    Attributes:
        said: in one sentence.
        refused: a sentence for each thing that was not done.
    """

    said: str
    refused: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAction:
    """
    Something that a page can do.

    Attributes:
        label: as it stands on the button.
        names: fields of the form that name what it acts on; the confirmation repeats these and no others.
        target: what it acts on, for Django's log.
        ask: reads what is ahead.
        run: does it.
    """

    label: str
    names: Sequence[str]
    target: Callable[[QueryDict], str]
    ask: Callable[[HttpRequest], Confirmation]
    run: Callable[[HttpRequest], ActionOutcome]


class OperationsAdmin(ModelAdmin):  # type: ignore[misc] # Django has no types
    """A page of the admin that shows no rows of a table."""

    template = ""
    """Of the first page."""
    registry: Registry[Any]
    """What it is about."""
    list_page = "changelist"
    """The page from which something is chosen: `changelist` or `show`."""
    list_names: Sequence[str] = ()
    """What that page is asked for, beside one of its pages."""

    # -- rights ------------------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002 - Django's
        """Nothing is added here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Nothing is edited here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Nothing is deleted as rows are."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: object = None) -> bool:  # noqa: ARG002
        """Whoever may not see the page does not see that there is one."""
        return self._is_allowed(request, "view")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """The same for the index."""
        return self._is_allowed(request, "view")

    def may_act(self, request: HttpRequest) -> bool:
        """Whether the user may do more than look."""
        return self._is_allowed(request, "view") and self._is_allowed(request, "act_on")

    def may_see_contents(self, request: HttpRequest) -> bool:
        """Whether the user may see documents and arguments."""
        return self._is_allowed(request, "view") and self._is_allowed(request, "see_contents_of")

    def _is_allowed(self, request: HttpRequest, verb: str) -> bool:
        return bool(request.user.has_perm(f"{self.opts.app_label}.{verb}_{self.opts.model_name}"))

    # -- addresses ---------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        """The first page under the name that the index looks for, one of details, and what is posted."""
        return [
            path("", self._guarded(self._first_page), name=self._url_name("changelist")),
            path("show/", self._guarded(self._details), name=self._url_name("show")),
            path("act/", self._guarded(self._act), name=self._url_name("act")),
        ]

    def _guarded(self, view: Callable[[HttpRequest], HttpResponse]) -> Any:
        """Behind the site's own guard, which knows staff and forgery; in no frame, in no transaction."""

        def allowed(request: HttpRequest) -> HttpResponse:
            if not self.has_view_permission(request):
                raise PermissionDenied
            request.current_app = self.admin_site.name  # where templates look
            return view(request)

        guarded = self.admin_site.admin_view(xframe_options_deny(allowed))
        for alias in connections:  # ATOMIC_REQUESTS would take back the log of what was done in MongoDB
            guarded = transaction.non_atomic_requests(alias)(guarded)
        return guarded

    def _url_name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def url(self, page: str, /, **query: str) -> str:
        """The address of one of the pages: `changelist`, `show` or `act`."""
        found: str = reverse(f"admin:{self._url_name(page)}", current_app=self.admin_site.name)
        return f"{found}?{urlencode(query)}" if query else found

    def asked(self, request: HttpRequest) -> dict[str, str]:
        """What the list is asked for at which the user looks, or from which he has come."""
        back = request.GET.get(_BACK)
        given = request.GET if back is None else QueryDict(back)
        return {name: str(given[name]) for name in (*self.list_names, _PAGE) if given.get(name)}

    def place(self, request: HttpRequest) -> str:
        """The address of that list, to which everybody comes back who has acted."""
        asked = self.asked(request)
        return self.url(self.list_page if asked else "changelist", **asked)

    def back(self, request: HttpRequest) -> Mapping[str, str]:
        """What the address of a page behind the list has beside its own, so that the list is found again."""
        return {_BACK: urlencode(self.asked(request))}

    def pages(self, request: HttpRequest, count: int) -> Mapping[str, Any]:
        """What a list shows of its place among all there is, with the addresses of the pages beside it."""
        page, listed, asked = page_of(request), self.list_per_page, self.asked(request)
        asked.pop(_PAGE, None)

        def at(number: int) -> str:
            return self.url(self.list_page, **asked, **({_PAGE: str(number)} if number else {}))

        last = max(count - 1, 0) // listed
        return {
            "count": count,
            "from_": page * listed + 1,
            "to": min((page + 1) * listed, count),
            "before_url": at(min(page, last + 1) - 1) if page else "",
            "after_url": at(page + 1) if page < last else "",
        }

    # -- pages -------------------------------------------------------------------------------------

    def first_page(self, request: HttpRequest) -> Mapping[str, Any]:
        """What the first page shows."""
        raise NotImplementedError

    def details(self, request: HttpRequest) -> tuple[str, str, Mapping[str, Any]]:
        """Of what is named in the address: a template, a title, and what it shows."""
        raise NotImplementedError

    def concern_of(self, request: HttpRequest) -> Callable[[], ErrorContext] | None:  # noqa: ARG002
        """Gives whom an error of MongoDB concerns, where that is not said already; asked after MongoDB has answered."""
        return None

    def page_actions(self) -> Mapping[str, PageAction]:
        """What can be done here, by the name in the form."""
        raise NotImplementedError

    def _first_page(self, request: HttpRequest) -> HttpResponse:
        found, sentence = self._told(request, _in_time(lambda: self._first_or_none(request)))
        title = str(self.opts.verbose_name_plural).capitalize()
        template = "page.html" if found is None or "none" in found else self.template
        return self._shown(request, template, title, {**(found or {}), "sentence": sentence, "first": True})

    def _first_or_none(self, request: HttpRequest) -> Mapping[str, Any]:
        if not self.registry.of(celery_app()):
            return {"none": f"The project's Celery app has no {self.registry.kind}."}
        return self.first_page(request)

    def _details(self, request: HttpRequest) -> HttpResponse:
        """A sentence in its place where it cannot be read: the list would wait for the same server once more."""
        found, sentence = self._told(request, _in_time(lambda: self.details(request)))
        if found is None:
            return self._shown(request, "page.html", str(self.opts.verbose_name).capitalize(), {"sentence": sentence})
        return self._shown(request, *found)

    def _shown(self, request: HttpRequest, template: str, title: str, found: Mapping[str, Any]) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": visible(title),
            "may_act": self.may_act(request),
            "may_see_contents": self.may_see_contents(request),
            "list_url": self.url("changelist"),
            "act_url": self.url("act", **self.back(request)),
            **found,
        }
        return TemplateResponse(request, f"mongo_celery/admin/{template}", context)

    def _told(self, request: HttpRequest, read: Callable[[], T]) -> tuple[T | None, str]:
        """What is read; or None, and the sentence on the error that users can cure."""
        try:
            return read(), ""
        except Exception as error:
            sentence = sentence_for(error, self.concern_of(request))
            if sentence is None:
                raise
            return None, shown(sentence)

    def _returned(self, request: HttpRequest, sentences: Sequence[str]) -> HttpResponse:
        for sentence in sentences[:_SENTENCES_MAX]:
            messages.error(request, sentence)
        if len(sentences) > _SENTENCES_MAX:
            messages.error(request, f"And {len(sentences) - _SENTENCES_MAX} more.")
        return HttpResponseRedirect(self.place(request))

    # -- actions -----------------------------------------------------------------------------------

    def _act(self, request: HttpRequest) -> HttpResponse:
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.may_act(request):
            raise PermissionDenied
        name = request.POST.get("action", "")
        action = self.page_actions().get(name)
        if action is None:
            return self._returned(request, ["Choose what is to be done."])
        if request.POST.get("confirmed") == _YES:
            return self._done(request, name, action)
        confirmation, sentence = self._told(request, lambda: action.ask(request))
        if confirmation is None:
            return self._returned(request, [sentence])
        found = {
            "confirmation": confirmation,
            "about": [shown(each) for each in confirmation.about],
            "notes": [shown(each) for each in confirmation.notes],
            "action": name,
            "action_label": action.label,
            "place_url": self.place(request),
            "confirmed": _YES,
            "fields": [
                *((name, value) for name in action.names for value in request.POST.getlist(name)),
                *confirmation.keeps,
            ],
        }
        return self._shown(request, "confirm.html", action.label, found)

    def _done(self, request: HttpRequest, name: str, action: PageAction) -> HttpResponse:
        """Do it, between two writes of Django's log: nobody acts unseen, whatever becomes of this process."""
        target = line(action.target(request.POST))  # databases refuse some of what is hidden
        several = _several(request.POST, action.names)
        reason = reason_in(request)
        several += f" Reason: {line(reason)}" if reason else ""
        entry = self._begun(request, name, target, several)
        try:
            outcome, sentence = self._told(request, lambda: action.run(request))
        except BaseException as error:
            self._ended(entry, f"{name} ended by {type(error).__name__}: what it has done is not known.{several}")
            raise
        if outcome is None:
            self._ended(entry, f"{name} ended with an error: {sentence}{several}")  # what came before it is done
            return self._returned(request, [sentence])
        self._ended(entry, line(" ".join([f"{name}: {outcome.said}", *outcome.refused])) + several)
        messages.success(request, shown(outcome.said))
        return self._returned(request, [shown(each) for each in outcome.refused])

    def _begun(self, request: HttpRequest, name: str, target: str, several: str) -> Any:
        logger.info(
            "%s of %s, asked for in the admin by user %s",
            name,
            target,
            request.user.pk,
            extra={"event": "admin_action", "action": name, "target": target, "user": str(request.user.pk)},
        )
        return LogEntry.objects.create(
            user_id=request.user.pk,
            content_type=ContentType.objects.get_for_model(self.model),
            object_id=target,
            object_repr=shown(target, _REPRESENTATION_MAX),
            action_flag=CHANGE,
            change_message=f"{name} was begun.{several}",
        )

    def _ended(self, entry: Any, message: str) -> None:
        """Only what was said of it: who, when and what stand as they were written first."""
        LogEntry.objects.filter(pk=entry.pk).update(change_message=message)


def operations_of(request: HttpRequest, wiring: Wiring) -> Operations:
    """Return the commands of a bridge, on behalf of the user."""
    return Operations(wiring, f"{request.user.get_username()} (Django)")


def reason_in(request: HttpRequest) -> str | None:
    """Return the reason that the user gives, for the audit record."""
    return str(request.POST.get("reason", "")).strip() or None


def ask_for(
    request: HttpRequest, plan: Plan, page: OperationsAdmin, *, label: str, about: Sequence[str]
) -> Confirmation:
    """Return the confirmation of a plan; its form names what was seen."""
    return Confirmation(
        question=plan.question or f"{label}?",
        about=about,
        notes=[*plan.refused, *plan.lines],
        keeps=[("seen", plan.seen)],
        contents=block("\n".join(plan.contents)) if page.may_see_contents(request) else "",
        ready=plan.act is not None,
    )


def run_plan(request: HttpRequest, plan: Plan) -> ActionOutcome:
    """
    Run a plan that the user has confirmed.

    Raises:
        CommandRefusedError: it is about something else than the user has seen, or as of the plan.
    """
    if plan.seen != chosen(request, "seen"):
        raise refuse("This has changed since you looked at it: look again, then repeat the command.")
    if plan.act is None:
        return ActionOutcome(said=". ".join(plan.lines), refused=plan.refused)
    result = plan.run()
    return ActionOutcome(said=". ".join(result.lines), refused=result.refused)


def chosen(request: HttpRequest, name: str) -> str:
    """A field of a form, or of the address."""
    fields: QueryDict = request.POST if request.method == "POST" else request.GET
    value = fields.get(name, "")
    return str(value)


def chosen_letters(request: HttpRequest) -> list[str]:
    """
    The dead letters that a form or an address names, each once.

    Raises:
        CommandRefusedError: there is none, or too many for one action.
    """
    fields: QueryDict = request.POST if request.method == "POST" else request.GET
    names = list(dict.fromkeys(map(str, fields.getlist("letter"))))
    if not names:
        raise refuse("Choose dead letters first.")
    if len(names) > _CHOSEN_MAX:
        raise refuse(f"Choose {_CHOSEN_MAX} dead letters at most.")
    return names


def each_of(things: Sequence[S], read: Callable[[S], T]) -> list[T | BaseException]:
    """What is read of each, or its error; side by side, so that those whose servers are away are waited for once."""
    with ThreadPoolExecutor(len(things), thread_name_prefix="mongo-celery-admin") as threads:
        futures = [threads.submit(_in_time(partial(read, each))) for each in things]
    return [future.exception() or future.result() for future in futures]


def _in_time(read: Callable[[], T]) -> Callable[[], T]:
    """The same, which waits for MongoDB no longer than a page may; each thread has a time of its own."""

    def bounded() -> T:
        with pymongo.timeout(_READ_SECONDS):
            return read()

    return bounded


def listed(names: Sequence[str]) -> str:
    """Names for a sentence: some of them where there are many."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _several(form: QueryDict, names: Sequence[str]) -> str:
    """All that an action was asked for, for the log, where its target is only how many these are."""
    given = [each for name in names if len(chosen_ones := form.getlist(name)) > 1 for each in chosen_ones]
    return f" Asked for: {', '.join(map(line, given))}." if given else ""


def page_of(request: HttpRequest) -> int:
    """Which page of a list is asked for, from 0."""
    text = chosen(request, _PAGE)
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > _PAGE_DIGITS_MAX:
        raise refuse(f"{text!r} is no page.")
    return int(text)


def refuse(sentence: str) -> CommandRefusedError:
    """Of a form or an address that this page has not made."""
    return CommandRefusedError(sentence)
