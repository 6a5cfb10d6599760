"""Handlers whose failures, retries and hooks are hard to write down."""

from __future__ import annotations

from typing import Any, NoReturn

from celery import Task, current_task
from celery.signals import task_prerun

from mongo_celery import Change
from tests.rig.scripted.application import app
from tests.rig.scripted.handlers import Fact, add_handler
from tests.rig.scripted.recording import record


class UnprintableError(Exception):
    """An error that cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class OddlyWordedError(Exception):
    """An error with what texts cannot always carry."""


class RefusingTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """A base class whose preparation fails."""

    def before_start(self, *_arguments: Any) -> None:
        record("prepared", handler=self.name)
        raise RuntimeError("not prepared")


def refuse_to_start(task: Any, *_arguments: Any) -> NoReturn:
    """What an annotation puts in the place of `before_start`."""
    RefusingTask.before_start(task)
    raise AssertionError


app.conf.task_annotations = {"tests.rig.scripted.handlers.annotated": {"before_start": refuse_to_start}}


class HookedTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """A base class whose hooks record what Celery says of the task; those behind its outcome fail."""

    def before_start(self, *_arguments: Any) -> None:
        record("hook", name="before_start")

    def on_success(self, *_arguments: Any) -> NoReturn:
        record("hook", name="on_success")
        raise RuntimeError("on_success")

    def on_failure(self, *_arguments: Any) -> NoReturn:
        record("hook", name="on_failure")
        raise RuntimeError("on_failure")

    def after_return(self, *_arguments: Any) -> NoReturn:
        raise RuntimeError("after_return")


@task_prerun.connect
def refuse(**_arguments: Any) -> NoReturn:
    """A receiver that fails before each task."""
    raise RuntimeError("prerun")


def _unprintable(_task: Any) -> NoReturn:
    raise UnprintableError


def _oddly(_task: Any) -> NoReturn:
    raise OddlyWordedError("nul \0 surrogate \udce9 dollar $x")


def _retry_never(task: Any) -> NoReturn:
    raise task.retry(countdown=float("nan"))


_ENDS = {"unprintable": _unprintable, "oddly": _oddly, "retry_never": _retry_never}


def _end(change: Change, _fact: Fact) -> None:
    """Do to the change what its document asks for."""
    document = change.full_document or {}
    if document.get("tampers"):
        change.raw["_id"]["_data"] = "F" * 32
    if document.get("ends"):
        _ENDS[document["ends"]](current_task)


add_handler("halting_words", _end, failure_policy="halt")
add_handler("skipping_words", _end, failure_policy="skip")
add_handler("letter_words", _end, failure_policy="dead_letter")
add_handler("unprepared", _end, failure_policy="dead_letter", base=RefusingTask)
add_handler("annotated", _end, failure_policy="dead_letter")
add_handler("hooked", _end, failure_policy="dead_letter", base=HookedTask)
