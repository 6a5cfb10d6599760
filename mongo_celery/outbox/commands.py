"""
Commands for many documents. None waits long. If one fails because of some documents, it is repeated for each.

If a transaction has written a document, other writers wait until it ends, up to a minute. MongoDB may refuse a damaged
document. Neither delays the other documents.
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
"""Time limit of one command. A user's transaction may block a document for a minute."""

_SINGLE_SECONDS = 2.5
"""Time limit of a majority write on one document, after a command for many did not wait for it."""

_OVERDUE_MAX = 3
"""After this many timeouts in a row, no further documents are tried one by one."""

_Thing = TypeVar("_Thing")
Failure = tuple[Any, PyMongoError]
"""A document's `_id`, and the reason why MongoDB did not perform the command."""


def limit_command() -> AbstractContextManager[None]:
    """Limit the time of one command in the block."""
    return pymongo.timeout(COMMAND_SECONDS)


def limit_single_command() -> AbstractContextManager[None]:
    """Limit the time of a command for one document in the block: a majority may need longer."""
    return pymongo.timeout(max(COMMAND_SECONDS, _SINGLE_SECONDS))


def is_about_some(error: PyMongoError) -> bool:
    """Return True if a command for many documents may have failed because of a few of them."""
    return error.timeout or (isinstance(error, OperationFailure) and not is_transient(error))


def do_each(things: Sequence[_Thing], call: Callable[[_Thing], object]) -> list[tuple[_Thing, PyMongoError]]:
    """
    Call the function for each document, after the call for all of them failed.

    Returns:
        Those that failed, or were not tried after too many timeouts.

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
                return [*((each, error) for each in things[place + 1 :]), *failed]  # try those first the next time
        else:
            overdue = 0
    return failed


def iterate_bounded(documents: Iterable[_Thing]) -> Iterator[_Thing]:
    """Yield a cursor's documents, with each answer within a command's time limit."""
    rest = iter(documents)
    while True:
        with limit_command():
            document = next(rest, None)
        if document is None:
            return
        yield document


def log_undeliverable(outbox: str, document_id: object, error: BaseException) -> None:
    """Log that a document cannot be delivered, while others can."""
    logger.error(
        "outbox %s: document %r cannot be delivered. Other documents continue: %s",
        outbox,
        document_id,
        short(error),
        extra={"event": "document_undeliverable"},
    )
