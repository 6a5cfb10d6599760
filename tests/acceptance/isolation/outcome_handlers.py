"""Handlers whose failures, retries and hooks are hard to write down."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from celery import Task
from celery.signals import task_prerun

from mongo_celery import Change
from tests.acceptance.chain_project.acts import perform
from tests.acceptance.chain_project.application import DATA, app, bridge
from tests.acceptance.chain_project.recording import record, record_start

_CHOSEN = set(filter(None, os.environ.get("CHAIN_HANDLERS", "").split(",")))


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
        """Fail, as a connection that cannot be opened would."""
        record("prepared", handler=self.name)
        raise RuntimeError("not prepared")


def refuse_to_start(task: Any, *_arguments: Any) -> NoReturn:
    """What an annotation puts in the place of `before_start`."""
    RefusingTask.before_start(task)
    raise AssertionError


app.conf.task_annotations = {f"{__name__}.annotated": {"before_start": refuse_to_start}}


class HookedTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """A base class whose hooks record what Celery says of the task."""

    def before_start(self, *_arguments: Any) -> None:
        """Say so."""
        record("hook", name="before_start")

    def on_success(self, *_arguments: Any) -> None:
        """Say so."""
        record("hook", name="on_success")

    def on_failure(self, *_arguments: Any) -> None:
        """Say so."""
        record("hook", name="on_failure")


class BrokenHooksTask(HookedTask):
    """The same, and each of them fails after the outcome is there."""

    def on_success(self, *arguments: Any) -> NoReturn:
        """Fail."""
        super().on_success(*arguments)
        raise RuntimeError("on_success")

    def on_failure(self, *arguments: Any) -> NoReturn:
        """Fail."""
        super().on_failure(*arguments)
        raise RuntimeError("on_failure")

    def after_return(self, *_arguments: Any) -> NoReturn:
        """Fail."""
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


def _handler(name: str, **options: Any) -> None:
    if name not in _CHOSEN:
        return

    def handle(task: Any, change: Change) -> None:
        document = change.full_document
        assert document is not None
        fact = {
            "handler": name,
            "key": document["_id"],
            "n": document["n"],
            "partition": change.partition,
            "seq": change.seq,
            "fence": change.fencing_token,
        }
        start = record_start(fact, retries=task.request.retries)
        perform(task, document, start, after=False)
        if document.get("tampers"):
            change.raw["_id"]["_data"] = "F" * 32
        if document.get("ends"):
            _ENDS[document["ends"]](task)
        perform(task, document, start, after=True)

    handle.__name__ = handle.__qualname__ = name
    bridge.on_change(f"{DATA}.{name}", name=name, bind=True, **options)(handle)


_handler("halting_words", failure_policy="halt")
_handler("skipping_words", failure_policy="skip")
_handler("letter_words", failure_policy="dead_letter")
_handler("unprepared", failure_policy="dead_letter", base=RefusingTask)
_handler("annotated", failure_policy="dead_letter")
_handler("hooked", failure_policy="dead_letter", base=HookedTask)
_handler("broken_hooks", failure_policy="dead_letter", base=BrokenHooksTask)
