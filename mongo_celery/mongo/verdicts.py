"""
What to do about an error of the change stream.

The driver resumes once, and only for some errors. The listener recovers from more: everything that is
not known to be final reopens the stream from the right token, with growing pauses, for as long as the
lease is held. Unknown errors reopen too, but only so many times in a row.

Code numbers are those of MongoDB's `error_codes.yml`; 136 comes without any label when the oplog passes
a cursor that is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from pymongo.errors import (
    ConfigurationError as ClientConfigurationError,
)
from pymongo.errors import (
    ConnectionFailure,
    InvalidOperation,
    OperationFailure,
    PyMongoError,
    WTimeoutError,
)

from mongo_celery.errors import (
    AccessError,
    DeploymentError,
    HistoryLostError,
    MongoCeleryError,
    StreamRefusedError,
    TopologyError,
    UnreadableEventError,
)

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


_HISTORY = {136, 260, 286}  # CappedPositionLost, InvalidResumeToken, ChangeStreamHistoryLost
_FATAL_TOKEN = 280  # ChangeStreamFatalError: token not found, also of a stream with another pipeline
_TOPOLOGY = {40573, 20}  # $changeStream needs a replica set; IllegalOperation
_ACCESS = {13, 18, 8000}  # Unauthorized, AuthenticationFailed, Atlas' own
_UNREADABLE = {10334, 47, 51075}  # BSONObjectTooLarge, NoMatchingDocument (a required image)
_REFUSED = {2, 9, 14, 15, 17, 72, 73, 168, 193, 40324, 40415, 40647, 50811, 51058}
_REOPEN = {
    6, 7, 43, 50, 63, 89, 91, 112, 133, 134, 150, 189, 216, 234, 237, 262, 9001, 10107, 11600, 11601, 11602,
    13388, 13435, 13436, 175, 211, 248, 346, 365, 384,
    51144,  # $$CLUSTER_TIME is not available: a set with authentication that is still making its keys
}  # fmt: skip
_FIRST_LOCATION = 10_000  # assertions in the aggregation parser have numbers of this size


def reaction_to(error: BaseException, *, opening: bool) -> Reaction:
    """
    Classify an error.

    Args:
        error: what PyMongo raised.
        opening: whether the stream was being opened; then a parser's assertion is final.
    """
    if isinstance(error, OperationFailure) and not isinstance(error, WTimeoutError):
        return _by_code(error, opening=opening)
    if isinstance(error, InvalidOperation) and "resume token" in str(error):
        return Reaction.REFUSED
    if isinstance(error, ClientConfigurationError):
        return Reaction.REFUSED
    if isinstance(error, ConnectionFailure):
        return Reaction.REOPEN
    return Reaction.UNKNOWN


def _by_code(error: OperationFailure, *, opening: bool) -> Reaction:
    code = error.code or 0
    for codes, reaction in (
        (_HISTORY, Reaction.HISTORY_LOST),
        ({_FATAL_TOKEN}, Reaction.REOPEN_BY_TIME),
        (_TOPOLOGY, Reaction.TOPOLOGY),
        (_ACCESS, Reaction.ACCESS),
        (_UNREADABLE, Reaction.UNREADABLE),
        (_REOPEN, Reaction.REOPEN),
        (_REFUSED, Reaction.REFUSED),
    ):
        if code in codes:
            return _without_token(error) if reaction is Reaction.REOPEN_BY_TIME else reaction
    if error.has_error_label("ResumableChangeStreamError"):
        return Reaction.REOPEN
    if error.has_error_label("NonResumableChangeStreamError"):
        return Reaction.HISTORY_LOST
    return Reaction.REFUSED if opening and code >= _FIRST_LOCATION else Reaction.UNKNOWN


def _without_token(error: OperationFailure) -> Reaction:
    """Code 280 also says that the pipeline removed or changed `_id`; that is the pipeline's fault."""
    text = str(error)
    return Reaction.REFUSED if "_id" in text and "modif" in text else Reaction.REOPEN_BY_TIME


_ERRORS: dict[Reaction, type[MongoCeleryError]] = {
    Reaction.HISTORY_LOST: HistoryLostError,
    Reaction.REOPEN_BY_TIME: HistoryLostError,
    Reaction.REFUSED: StreamRefusedError,
    Reaction.UNKNOWN: StreamRefusedError,
    Reaction.TOPOLOGY: TopologyError,
    Reaction.ACCESS: AccessError,
    Reaction.UNREADABLE: UnreadableEventError,
}


def final_error(reaction: Reaction, error: BaseException, scope: str) -> MongoCeleryError:
    """The error of ours for a final reaction: our sentence, then the server's."""
    kind = _ERRORS[reaction]
    if kind is AccessError:
        sentence = (
            f"The MongoDB user may not open a change stream on {scope}: grant the actions changeStream and find there, "
            "or register narrower sources."
        )
    else:
        sentence = " ".join((kind.__doc__ or "").split())
    code = getattr(error, "code", None)
    return kind(f"{sentence} The server said: {_short(error)}", code=code)


def _short(error: BaseException) -> str:
    text = str(error).split(", full error", 1)[0]
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


_MESSAGE_CHARS = 500


def is_transient(error: PyMongoError) -> bool:
    """Whether a call on the state database may succeed when it is made again."""
    if isinstance(error, ConnectionFailure) or getattr(error, "timeout", False):
        return True
    if isinstance(error, OperationFailure):
        return (
            error.code in _REOPEN
            or error.has_error_label("RetryableWriteError")
            or error.has_error_label(
                "TransientTransactionError",
            )
        )
    return False


def needs_deployment(error: PyMongoError) -> DeploymentError | None:
    """An error of the state database that waiting cannot cure, in our words; None for all others."""
    if isinstance(error, OperationFailure) and error.code in _ACCESS:
        return AccessError(
            f"The MongoDB user lacks a right on the state database: grant find, insert, update, remove and "
            f"createIndex there (readWrite). The server said: {_short(error)}",
        )
    if isinstance(error, OperationFailure) and error.code in _TOPOLOGY:
        return TopologyError()
    return None


_ILLEGAL_OPERATION = 20


def explain(error: BaseException) -> None:
    """Raise TopologyError if the error is a standalone server's refusal of a transaction; else do nothing."""
    # The code alone has many meanings; only this one names a replica set and mongos.
    if getattr(error, "code", None) == _ILLEGAL_OPERATION and "replica set member or mongos" in str(error):
        raise TopologyError(
            "Transactions need a replica set or a sharded cluster. Start mongod with `--replSet` and run "
            "`rs.initiate()`; a set of one member is enough.",
        ) from error


@contextmanager
def explained() -> Iterator[None]:
    """Raise TopologyError where a standalone server refuses the first operation of a transaction."""
    try:
        yield
    except OperationFailure as error:
        explain(error)
        raise
