"""
The reaction to an error of the change stream.

The drivers' specification resumes once, and only after some errors. The listener recovers from more: everything that
is not known to be final reopens the stream from the right token, with growing pauses, for as long as the lease is held.
Unknown errors reopen too, but only so many times in a row. An error that may be about one event lets the reader look
for that event first.
"""

from __future__ import annotations

from enum import Enum

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
from mongo_celery.mongo.verdicts import Code, Verdict, judge_error, login_refused, quote

UNKNOWN_LIMIT = 5
"""How often in a row an error of unknown kind reopens the stream before it counts as final."""


class Reaction(Enum):
    """
    The kinds of reactions.

    Attributes:
        error: of ours, with which the stream ends if there is no other way.
    """

    REOPEN = "reopen", StreamRefusedError
    REOPEN_BY_TIME = "reopen by time", HistoryLostError
    UNKNOWN = "unknown", StreamRefusedError
    HISTORY_LOST = "history lost", HistoryLostError
    REFUSED = "refused", StreamRefusedError
    TOPOLOGY = "topology", TopologyError
    ACCESS = "access", AccessError
    UNREADABLE = "unreadable", UnreadableEventError

    def __init__(self, _name: str, error: type[MongoCeleryError]) -> None:
        self.error = error


_REACTIONS = {
    Verdict.TRANSIENT: Reaction.REOPEN,
    Verdict.LOGIN: Reaction.ACCESS,
    Verdict.ACCESS: Reaction.ACCESS,
    Verdict.TOPOLOGY: Reaction.TOPOLOGY,
    Verdict.HISTORY_LOST: Reaction.HISTORY_LOST,
    Verdict.TOKEN_NOT_FOUND: Reaction.REOPEN_BY_TIME,
    Verdict.TOO_LARGE: Reaction.UNREADABLE,
    Verdict.IMAGE_MISSING: Reaction.UNREADABLE,
    Verdict.REFUSED: Reaction.REFUSED,
}
_ABOUT_AN_EVENT = frozenset({Reaction.UNREADABLE, Reaction.REFUSED, Reaction.UNKNOWN})
_RESUMABLE = "ResumableChangeStreamError"
_FIRST_LOCATION = 10_000  # assertions in the aggregation parser have numbers of this size


def classify_error(error: BaseException, *, opening: bool) -> Reaction:
    """
    Classify an error.

    Args:
        error: what PyMongo raised.
        opening: whether the stream was being opened. Then a parser's assertion is final.
    """
    if isinstance(error, OperationFailure) and not isinstance(error, WTimeoutError):
        return _classify_failure(error, opening=opening)
    if isinstance(error, ClientConfigurationError):
        return Reaction.REFUSED
    if isinstance(error, ConnectionFailure):
        return Reaction.REOPEN
    return Reaction.UNKNOWN


def concerns_an_event(error: BaseException) -> bool:
    """
    Return True if one event may be the reason: its size, an image, or an expression.

    Only a try shows whether it has.
    """
    return isinstance(error, OperationFailure) and classify_error(error, opening=False) in _ABOUT_AN_EVENT


def closes_connection(error: BaseException) -> bool:
    """
    Return True if the connection was closed before the answer came.

    A server does that, too, where an event and the token behind it are larger than an answer may be.
    """
    return type(error) is AutoReconnect  # a time-out and a deposed primary are subclasses


def _classify_failure(error: OperationFailure, *, opening: bool) -> Reaction:
    reaction = _REACTIONS.get(judge_error(error))
    resumable = error.has_error_label(_RESUMABLE)
    if reaction is Reaction.REFUSED and resumable and not opening:
        return Reaction.REOPEN  # what was accepted once is not wrong; the server knows better
    if reaction is not None:
        return reaction
    if resumable:
        return Reaction.REOPEN
    if error.has_error_label("NonResumableChangeStreamError"):
        return Reaction.HISTORY_LOST
    return Reaction.REFUSED if opening and (error.code or 0) >= _FIRST_LOCATION else Reaction.UNKNOWN


def final_error(reaction: Reaction, error: BaseException, scope: str) -> MongoCeleryError:
    """Return the error of a final reaction: our sentence with the fix, then code, name and words of the server."""
    code = getattr(error, "code", None)
    if judge_error(error) is Verdict.LOGIN:
        return AccessError(login_refused(error), code=code)
    kind = reaction.error
    if kind is AccessError:
        sentence = (
            f"The MongoDB user may not open a change stream on {scope}: grant the actions changeStream and find there, "
            "or register narrower sources."
        )
    elif code == Code.CommandNotSupportedOnView:
        sentence = (
            f"{scope} is a view or a time series: MongoDB has no changes of it. Listen to the collection that is "
            "written to."
        )
    elif reaction is Reaction.UNKNOWN:
        sentence = (
            f"The change stream on {scope} failed again and again in a way that is not known to pass. Look for the "
            "cause in the server's log, and start the listener again; nothing is lost as "
            "long as the oplog reaches back."
        )
    else:
        sentence = " ".join((kind.__doc__ or "").split())
    return kind(f"{sentence} {quote(error)}", code=code)
