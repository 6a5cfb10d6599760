"""The text of an exception for logs and state: it can always be stored, whatever the exception does."""

from __future__ import annotations

from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import format_traceback, terse
from mongo_celery.mongo.verdicts import brief, error_code

_ERROR_CHARS = 2000
_TRACEBACK_CHARS = 4 * _ERROR_CHARS


def error_text(error: BaseException | None) -> str:
    """Class and message, of bounded length; one whose message cannot be read shows its class alone."""
    name = type(error).__name__
    try:
        return storable(f"{name}: {_words(error)}"[:_ERROR_CHARS])
    except Exception as failure:  # noqa: BLE001 - whatever a user's __str__ raises
        return storable(f"{name} (its text cannot be had: {type(failure).__name__})"[:_ERROR_CHARS])


def _words(error: BaseException | None) -> str:
    """Of a server's error its code, name and sentence; what drivers append to any is left out."""
    if isinstance(error, PyMongoError) and error_code(error) is not None:
        return brief(error)
    return terse(str(error))


def traceback_text(error: BaseException) -> str:
    """The end of its traceback; what cannot be formatted shows the class alone."""
    try:
        return storable(format_traceback(error)[-_TRACEBACK_CHARS:])
    except Exception as failure:  # noqa: BLE001 - a user's __str__, __notes__ or attributes
        return storable(f"{type(error).__name__} (its traceback cannot be had: {type(failure).__name__})")


def storable(text: str) -> str:
    """Without lone surrogates, as file names have them: BSON and streams refuse those and what they are part of."""
    return text.encode("utf-8", "replace").decode()
