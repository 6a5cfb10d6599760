"""
The verdict on a change stream's error, and its consequence for the reader.

The drivers' specification resumes once, and only after some errors. The listener recovers from more: every error that
is not known as final reopens the stream from the right token, with growing pauses, while the lease is held. Unknown
errors also reopen it, but only a limited number of times in a row. After an error that one event may have caused, the
reader first looks for that event.
"""

from __future__ import annotations

from collections.abc import Mapping

from pymongo.errors import AutoReconnect, ConnectionFailure, OperationFailure, WTimeoutError
from pymongo.errors import ConfigurationError as ClientConfigurationError

from mongo_celery.errors import (
    AccessError,
    HistoryLostError,
    MongoCeleryError,
    StreamRefusedError,
    TopologyError,
    UnreadableEventError,
)
from mongo_celery.mongo.verdicts import Code, Verdict, is_unresolved, judge_error, login_refused, quote

UNKNOWN_LIMIT = 5
"""Number of unknown errors in a row that reopen the stream. The next one is final."""

PASSING = frozenset({Verdict.TRANSIENT, Verdict.UNKNOWN})
"""Verdicts after which the stream reopens at the same place."""

_ABOUT_AN_EVENT = frozenset({Verdict.TOO_LARGE, Verdict.IMAGE_MISSING, Verdict.REFUSED, Verdict.UNKNOWN})
_ERRORS: Mapping[Verdict, type[MongoCeleryError]] = {
    Verdict.ACCESS: AccessError,
    Verdict.TOPOLOGY: TopologyError,
    Verdict.HISTORY_LOST: HistoryLostError,
    Verdict.TOKEN_NOT_FOUND: HistoryLostError,
    Verdict.TOO_LARGE: UnreadableEventError,
    Verdict.IMAGE_MISSING: UnreadableEventError,
}
_RESUMABLE = "ResumableChangeStreamError"
_FIRST_LOCATION = 10_000  # assertions in the aggregation parser have at least this number


def judge_stream_error(error: BaseException, *, opening: bool) -> Verdict:
    """
    Classify an error of the stream.

    Args:
        error: PyMongo's error.
        opening: True if the stream was being opened. Then a parser's assertion is final.
    """
    if isinstance(error, ClientConfigurationError):
        return Verdict.TRANSIENT if is_unresolved(error) else Verdict.REFUSED
    if not isinstance(error, (ConnectionFailure, OperationFailure)) or isinstance(error, WTimeoutError):
        return Verdict.UNKNOWN
    verdict = judge_error(error)
    is_unnamed = verdict in {Verdict.UNKNOWN, Verdict.DUPLICATE_KEY}
    if error.has_error_label(_RESUMABLE) and (is_unnamed or (verdict is Verdict.REFUSED and not opening)):
        return Verdict.TRANSIENT  # a stream that was accepted once is valid: the server may have changed
    if not is_unnamed:
        return verdict
    if error.has_error_label("NonResumableChangeStreamError"):
        return Verdict.HISTORY_LOST
    return Verdict.REFUSED if opening and (getattr(error, "code", None) or 0) >= _FIRST_LOCATION else Verdict.UNKNOWN


def concerns_an_event(error: BaseException) -> bool:
    """
    Return True if one event may be the cause of an error: its size, an image, or an expression.

    Only an attempt shows whether it is.
    """
    return isinstance(error, OperationFailure) and judge_stream_error(error, opening=False) in _ABOUT_AN_EVENT


def closes_connection(error: BaseException) -> bool:
    """
    Return True if the connection closed before the answer arrived.

    A server also does this if an event and the following token are too large for one answer.
    """
    return type(error) is AutoReconnect  # a timeout and a stepped-down primary are subclasses


def final_error(verdict: Verdict, error: BaseException, scope: str) -> MongoCeleryError:
    """Return the error that ends the stream: a sentence with the fix, then the server's code, name and words."""
    code = getattr(error, "code", None)
    if verdict is Verdict.LOGIN:
        return AccessError(login_refused(error), code=code)
    kind = _ERRORS.get(verdict, StreamRefusedError)
    if kind is AccessError:
        sentence = (
            f"The MongoDB user may not open a change stream on {scope}. Grant it the actions changeStream and find "
            "there, or register narrower sources."
        )
    elif code == Code.CommandNotSupportedOnView:
        sentence = (
            f"{scope} is a view or a time series, and MongoDB reports no changes of it. Watch the collection behind it."
        )
    elif verdict is Verdict.UNKNOWN:
        sentence = (
            f"The change stream on {scope} failed repeatedly with an unknown error. Nothing is lost while the oplog "
            "reaches the stored position. Search the MongoDB server's log for the cause, then start the listener again."
        )
    else:
        sentence = " ".join((kind.__doc__ or "").split())
    return kind(f"{sentence} {quote(error)}", code=code)
