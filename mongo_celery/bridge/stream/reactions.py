"""
What to do about an error of the change stream.

The driver resumes once, and only for some errors. The listener recovers from more: everything that is
not known to be final reopens the stream from the right token, with growing pauses, for as long as the
lease is held. Unknown errors reopen too, but only so many times in a row.
"""

from __future__ import annotations

from enum import Enum

from pymongo.errors import ConfigurationError as ClientConfigurationError
from pymongo.errors import ConnectionFailure, InvalidOperation, OperationFailure, WTimeoutError

from mongo_celery.errors import (
    AccessError,
    HistoryLostError,
    MongoCeleryError,
    StreamRefusedError,
    TopologyError,
    UnreadableEventError,
)
from mongo_celery.mongo.verdicts import Verdict, login_refused, said, verdict_on

UNKNOWN_LIMIT = 5
"""How often in a row an error of unknown kind reopens the stream before it counts as final."""


class Reaction(Enum):
    """What an error asks for."""

    REOPEN = "reopen"
    REOPEN_BY_TIME = "reopen by time"
    UNKNOWN = "unknown"
    HISTORY_LOST = "history lost"
    REFUSED = "refused"
    TOPOLOGY = "topology"
    ACCESS = "access"
    UNREADABLE = "unreadable"


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
_ERRORS: dict[Reaction, type[MongoCeleryError]] = {
    Reaction.HISTORY_LOST: HistoryLostError,
    Reaction.REOPEN_BY_TIME: HistoryLostError,
    Reaction.REFUSED: StreamRefusedError,
    Reaction.UNKNOWN: StreamRefusedError,
    Reaction.TOPOLOGY: TopologyError,
    Reaction.ACCESS: AccessError,
    Reaction.UNREADABLE: UnreadableEventError,
}
_FIRST_LOCATION = 10_000  # assertions in the aggregation parser have numbers of this size


def reaction_to(error: BaseException, *, opening: bool) -> Reaction:
    """
    Classify an error.

    Args:
        error: what PyMongo raised.
        opening: whether the stream was being opened; then a parser's assertion is final.
    """
    if isinstance(error, OperationFailure) and not isinstance(error, WTimeoutError):
        return _to_the_server(error, opening=opening)
    if isinstance(error, InvalidOperation) and "resume token" in str(error):
        return Reaction.REFUSED
    if isinstance(error, ClientConfigurationError):
        return Reaction.REFUSED
    if isinstance(error, ConnectionFailure):
        return Reaction.REOPEN
    return Reaction.UNKNOWN


def _to_the_server(error: OperationFailure, *, opening: bool) -> Reaction:
    reaction = _REACTIONS.get(verdict_on(error))
    if reaction is Reaction.REOPEN_BY_TIME:
        return _without_token(error)
    if reaction is not None:
        return reaction
    if error.has_error_label("ResumableChangeStreamError"):
        return Reaction.REOPEN
    if error.has_error_label("NonResumableChangeStreamError"):
        return Reaction.HISTORY_LOST
    return Reaction.REFUSED if opening and (error.code or 0) >= _FIRST_LOCATION else Reaction.UNKNOWN


def _without_token(error: OperationFailure) -> Reaction:
    """Code 280 also says that the pipeline removed or changed `_id`; that is the pipeline's fault."""
    text = str(error)
    return Reaction.REFUSED if "_id" in text and "modif" in text else Reaction.REOPEN_BY_TIME


def final_error(reaction: Reaction, error: BaseException, scope: str) -> MongoCeleryError:
    """The error of ours for a final reaction: our sentence, then the server's."""
    code = getattr(error, "code", None)
    if verdict_on(error) is Verdict.LOGIN:
        return AccessError(login_refused(error), code=code)
    kind = _ERRORS[reaction]
    if kind is AccessError:
        sentence = (
            f"The MongoDB user may not open a change stream on {scope}: grant the actions changeStream and find there, "
            "or register narrower sources."
        )
    else:
        sentence = " ".join((kind.__doc__ or "").split())
    return kind(f"{sentence} The server said: {said(error)}", code=code)
