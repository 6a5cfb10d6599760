"""
Commands to MongoDB about many documents: none waits long, and what it does not do for all is done one by one.

A document that somebody's transaction has written to is closed to others until that ends, which may take a minute; one
that somebody has damaged may be refused. Neither is to keep the others waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_transient

logger = logging.getLogger("mongo_celery.outbox")

COMMAND_SECONDS = 1.0
"""How long one command may take; somebody's transaction may keep a document closed for a minute."""

_SINGLE_SECONDS = 2.5
"""How long a majority may take for one document; what a command for many does not wait for, goes on slowly so."""

_OVERDUE_MAX = 3
"""So many documents in a row that are not answered in time are not looked at singly any further."""

_Thing = TypeVar("_Thing")
Failure = tuple[Any, PyMongoError]
"""A document's `_id`, and why MongoDB did not do what was asked for it."""


def limit_command() -> AbstractContextManager[None]:
    """Inside, one command has its time."""
    return pymongo.timeout(COMMAND_SECONDS)


def limit_single_command() -> AbstractContextManager[None]:
    """Inside, one command about one document has its time, which a majority may need."""
    return pymongo.timeout(max(COMMAND_SECONDS, _SINGLE_SECONDS))


def once_more(call: Callable[[], _Thing]) -> _Thing:
    """
    Call again if an election or a lost connection came between.

    Drivers do so by themselves for updates of single documents. What is called must bear that it was done already.
    """
    try:
        return call()
    except PyMongoError as error:
        if error.timeout or not is_transient(error):
            raise
    return call()


def is_about_some(error: PyMongoError) -> bool:
    """Whether a command for many documents may have failed for a few of them, so that the others can be done."""
    return error.timeout or (isinstance(error, OperationFailure) and not is_transient(error))


def singly(things: Sequence[_Thing], call: Callable[[_Thing], object]) -> list[tuple[_Thing, PyMongoError]]:
    """
    Do for each thing what could not be done for all together.

    Returns:
        Those for which it failed, or was not tried since too many before it were overdue.

    Raises:
        PyMongoError: MongoDB does not answer at all.
    """
    failed = list[tuple[_Thing, PyMongoError]]()
    overdue = 0
    for place, thing in enumerate(things):
        try:
            call(thing)
        except PyMongoError as error:
            if not is_about_some(error):
                raise
            failed.append((thing, error))
            overdue = overdue + 1 if error.timeout else 0
            if overdue == _OVERDUE_MAX:
                if len(failed) == place + 1:
                    raise
                return [*((each, error) for each in things[place + 1 :]), *failed]  # those first, the next time
        else:
            overdue = 0
    return failed


def iterate_bounded(documents: Iterable[_Thing]) -> Iterator[_Thing]:
    """What a cursor gives, each answer within the time of a command."""
    rest = iter(documents)
    while True:
        with limit_command():
            document = next(rest, None)
        if document is None:
            return
        yield document


def tell_undeliverable(outbox: str, document_id: object, error: BaseException) -> None:
    """Log that a document cannot be delivered, while others can."""
    logger.error(
        "outbox %s: document %r cannot be delivered: %s",
        outbox,
        document_id,
        short(error),
        extra={"event": "document_undeliverable"},
    )
