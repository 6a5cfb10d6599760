"""
The meaning of server and driver errors: one verdict for each, and a sentence if a person must fix it.

A verdict names the cause, not the reaction. A call repeats if its error is transient (`repeating`). A change stream has
its own rules (`bridge.stream.verdicts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Self

from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    DuplicateKeyError,
    OperationFailure,
    PyMongoError,
    WTimeoutError,
)

from mongo_celery.errors import AccessError, DeploymentError, TopologyError
from mongo_celery.mongo.redaction import format_traceback, short, terse
from mongo_celery.mongo.rights import missing_right


class Verdict(Enum):
    """The verdict on an error of a server or the driver."""

    TRANSIENT = "the call may succeed if it is repeated"
    LOGIN = "the login was refused"
    ACCESS = "a right is missing"
    TOPOLOGY = "this kind of server cannot do this"
    HISTORY_LOST = "the oplog no longer reaches the position"
    TOKEN_NOT_FOUND = "a resume token was not found"  # noqa: S105 - a verdict
    TOO_LARGE = "a document would be larger than 16 MB"
    IMAGE_MISSING = "a required image of a changed document is missing"
    DUPLICATE_KEY = "a unique index already has this key"
    REFUSED = "the command or its pipeline is wrong"
    UNKNOWN = "this error is not known"


class Code(IntEnum):
    """
    The known error codes of the server by name, each with at most one verdict.

    A code without a verdict is only compared by name.

    They come from `error_codes.yml`. An assertion without a name is named by its number, as in the server's `codeName`.
    """

    verdict: Verdict

    def __new__(cls, number: int, verdict: Verdict | None = None) -> Self:
        """Return a number with its verdict."""
        code = int.__new__(cls, number)
        code._value_, code.verdict = number, verdict or Verdict.UNKNOWN
        return code

    BadValue = 2, Verdict.REFUSED
    HostUnreachable = 6, Verdict.TRANSIENT
    HostNotFound = 7, Verdict.TRANSIENT
    FailedToParse = 9, Verdict.REFUSED
    Unauthorized = 13, Verdict.ACCESS
    TypeMismatch = 14, Verdict.REFUSED
    Overflow = 15, Verdict.REFUSED
    ProtocolError = 17, Verdict.REFUSED
    AuthenticationFailed = 18, Verdict.LOGIN
    IllegalOperation = 20, Verdict.TOPOLOGY
    LockTimeout = 24
    PathNotViable = 28
    CursorNotFound = 43, Verdict.TRANSIENT
    NoMatchingDocument = 47, Verdict.IMAGE_MISSING
    MaxTimeMSExpired = 50, Verdict.TRANSIENT
    StaleShardVersion = 63, Verdict.TRANSIENT
    InvalidOptions = 72, Verdict.REFUSED
    InvalidNamespace = 73, Verdict.REFUSED
    IndexOptionsConflict = 85
    IndexKeySpecsConflict = 86
    NetworkTimeout = 89, Verdict.TRANSIENT
    ShutdownInProgress = 91, Verdict.TRANSIENT
    WriteConflict = 112, Verdict.TRANSIENT
    DocumentValidationFailure = 121
    FailedToSatisfyReadPreference = 133, Verdict.TRANSIENT
    ReadConcernMajorityNotAvailableYet = 134, Verdict.TRANSIENT
    CappedPositionLost = 136, Verdict.HISTORY_LOST
    StaleEpoch = 150, Verdict.TRANSIENT
    CommandNotSupportedOnView = 166, Verdict.REFUSED
    InvalidPipelineOperator = 168, Verdict.REFUSED
    QueryPlanKilled = 175, Verdict.TRANSIENT
    PrimarySteppedDown = 189, Verdict.TRANSIENT
    NoShardingEnabled = 193, Verdict.REFUSED
    KeyNotFound = 211, Verdict.TRANSIENT
    ElectionInProgress = 216, Verdict.TRANSIENT
    RetryChangeStream = 234, Verdict.TRANSIENT
    CursorKilled = 237, Verdict.TRANSIENT
    ProducerConsumerQueueEndClosed = 248, Verdict.TRANSIENT
    InvalidResumeToken = 260, Verdict.HISTORY_LOST
    ExceededTimeLimit = 262, Verdict.TRANSIENT
    ChangeStreamFatalError = 280, Verdict.TOKEN_NOT_FOUND
    ChangeStreamHistoryLost = 286, Verdict.HISTORY_LOST
    ChangeStreamInvalidated = 346, Verdict.TRANSIENT
    TemporarilyUnavailable = 365, Verdict.TRANSIENT
    ConnectionError = 384, Verdict.TRANSIENT
    AtlasError = 8000, Verdict.LOGIN
    SocketException = 9001, Verdict.TRANSIENT
    NotWritablePrimary = 10107, Verdict.TRANSIENT
    BSONObjectTooLarge = 10334, Verdict.TOO_LARGE
    DuplicateKey = 11000, Verdict.DUPLICATE_KEY
    InterruptedAtShutdown = 11600, Verdict.TRANSIENT
    Interrupted = 11601, Verdict.TRANSIENT
    InterruptedDueToReplStateChange = 11602, Verdict.TRANSIENT
    StaleConfig = 13388, Verdict.TRANSIENT
    NotPrimaryNoSecondaryOk = 13435, Verdict.TRANSIENT
    NotPrimaryOrSecondary = 13436, Verdict.TRANSIENT
    Location17419 = 17419, Verdict.TOO_LARGE  # the updated document is larger than 16 MB
    Location17420 = 17420, Verdict.TOO_LARGE  # the same for a replacement
    Location40324 = 40324, Verdict.REFUSED  # the stage does not exist
    Location40415 = 40415, Verdict.REFUSED  # an option has no such field
    Location40573 = 40573, Verdict.TOPOLOGY  # $changeStream needs a replica set
    Location40647 = 40647, Verdict.REFUSED
    Location50811 = 50811, Verdict.REFUSED
    Location51058 = 51058, Verdict.REFUSED
    Location51075 = 51075, Verdict.IMAGE_MISSING
    Location51144 = 51144, Verdict.TRANSIENT  # no $$CLUSTER_TIME: a set with authentication is still making its keys


_NAMES = {code.value: code.name for code in Code}
_VERDICTS = {code.value: code.verdict for code in Code}
_ENDED_ALONE = frozenset({
    Code.CursorNotFound, Code.MaxTimeMSExpired, Code.QueryPlanKilled, Code.RetryChangeStream, Code.CursorKilled,
    Code.ProducerConsumerQueueEndClosed, Code.ChangeStreamInvalidated,
})  # fmt: skip
"""Transient codes with which a healthy server ends one operation."""
_NO_OUTAGE = _ENDED_ALONE | {Code.WriteConflict}

_TRANSIENT_TRANSACTION = "TransientTransactionError"
_REPEAT_LABELS = ("RetryableWriteError", _TRANSIENT_TRANSACTION, "RetryableError")  # the last one is for an overload
_OUTAGE_LABELS = ("RetryableWriteError", "RetryableError", "UnknownTransactionCommitResult")
_MESSAGE_CHARS = 500


def judge_error(error: BaseException | None) -> Verdict:
    """
    Classify an error of PyMongo.

    A known code takes precedence over a label. Labels are for new codes of newer servers.
    """
    if is_unanswered(error):
        return Verdict.TRANSIENT
    if isinstance(error, DocumentTooLarge):
        return Verdict.TOO_LARGE
    if not isinstance(error, OperationFailure):
        return Verdict.UNKNOWN
    verdict = _VERDICTS.get(error.code or 0, Verdict.UNKNOWN)
    if verdict is Verdict.UNKNOWN and any(map(error.has_error_label, _REPEAT_LABELS)):
        return Verdict.TRANSIENT
    # Atlas uses one code for its own limits and for codes 13 and 18 of other servers.
    if error.code == Code.AtlasError and not re.search("bad auth|authentication failed", str(error), re.IGNORECASE):
        return Verdict.ACCESS
    return verdict


def is_unanswered(error: BaseException | None) -> bool:
    """Return True if no server has answered in time, or the one that did is not ready for any client."""
    if isinstance(error, ConnectionFailure) or is_refused_session(error) or is_unresolved(error):
        return True
    return isinstance(error, PyMongoError) and error.timeout


def is_unresolved(error: BaseException | None) -> bool:
    """
    Return True if no name server resolved a `mongodb+srv://` URL, which PyMongo reports as a wrong configuration.

    A name that does not exist counts, too, like an unknown host of a `mongodb://` URL. A name that no server can have
    does not.
    """
    if not isinstance(error, ConfigurationError):
        return False
    module = type(error.__cause__ or error.__context__).__module__  # older versions suppress the cause
    return module.startswith("dns.") and module != "dns.name"


def is_refused_session(error: BaseException | None) -> bool:
    """
    Return True if a session was refused, which PyMongo reports without its own class or code.

    Every supported server has sessions, but a member of a set has none while it is neither primary nor secondary.
    """
    return isinstance(error, ConfigurationError) and "Sessions are not supported" in str(error)


def is_logged_out(error: BaseException | None) -> bool:
    """
    Return True if the server no longer knows a connection's user, because the user was dropped.

    A user that is created again is a different one, so the server refuses every call on this connection.
    """
    return (
        isinstance(error, OperationFailure)
        and error.code == Code.Unauthorized
        and "requires authentication" in str(error)
    )


def is_refused_user(error: BaseException) -> bool:
    """Return True if a right is missing or the login was refused. An operator usually causes and ends this."""
    return judge_error(error) in (Verdict.ACCESS, Verdict.LOGIN)


def is_transient(error: BaseException) -> bool:
    """Return True if a repeated call may succeed. The server's own label takes precedence."""
    labelled = isinstance(error, PyMongoError) and any(map(error.has_error_label, _REPEAT_LABELS))
    return labelled or judge_error(error) is Verdict.TRANSIENT


def is_outage(error: BaseException) -> bool:
    """
    Return True if a call failed because of servers or the network, not because of the call.

    Not every transient error is an outage. An idle cursor, a time-out chosen by the caller and a conflict
    (`is_conflict`) are not.
    """
    if isinstance(error, BulkWriteError):
        failures = list_failures(error.details)
        return bool(failures) and all(_is_outage_code(each.get("code")) for each in failures)
    if isinstance(error, (ConnectionFailure, WTimeoutError)) or is_refused_session(error) or is_unresolved(error):
        return True
    if not isinstance(error, PyMongoError):
        return False
    if any(map(error.has_error_label, _OUTAGE_LABELS)):
        return True
    return _is_outage_code(getattr(error, "code", None))


def _is_outage_code(code: int | None) -> bool:
    return code not in _NO_OUTAGE and _VERDICTS.get(code or 0) is Verdict.TRANSIENT


def list_failures(answer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the failed writes of a bulk write's or a command's answer, then its failed write concerns."""
    found = answer or {}
    concerns = found.get("writeConcernErrors") or filter(None, [found.get("writeConcernError")])
    return [*found.get("writeErrors", ()), *concerns]


def is_conflict(error: BaseException) -> bool:
    """
    Return True if a transaction ended without a server failure, because of others or of its own writes.

    Reasons are a document that another writer changed or locked, a snapshot that is too old, and a transaction that
    took too long. The error alone does not show the cause.
    """
    if not isinstance(error, PyMongoError) or is_outage(error):
        return False
    return error.has_error_label(_TRANSIENT_TRANSACTION) or getattr(error, "code", None) == Code.WriteConflict


def is_too_large(error: BaseException | None) -> bool:
    """Return True if a write failed because its document would be larger than 16 MB."""
    # An insert reports this with a code that has many meanings.
    inserted = isinstance(error, OperationFailure) and error.code == Code.BadValue and "too large" in str(error)
    return inserted or judge_error(error) is Verdict.TOO_LARGE


def is_duplicate_id(error: BaseException) -> bool:
    """Return True if a write failed because its `_id` exists, not because of another unique index."""
    return isinstance(error, DuplicateKeyError) and list((error.details or {}).get("keyPattern", {})) == ["_id"]


# -- sentences -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """
    The context of a MongoDB error, for its text.

    Attributes:
        subject: the object of the call, such as `the outbox's collection shop.orders`.
        grant: the rights to grant there, such as `find and update on shop.orders`.
    """

    subject: str
    grant: str


def explain_error(error: BaseException, concern: ErrorContext) -> DeploymentError | None:
    """Return an error that waiting cannot fix, in our words with the server's. None for all others."""
    verdict = judge_error(error)
    if verdict is Verdict.LOGIN:
        return AccessError(login_refused(error))
    if verdict is Verdict.ACCESS:
        right = missing_right(error)
        return AccessError(
            f"The MongoDB user may not use {concern.subject}. Grant {concern.grant}. "
            f"{f'The missing right is {right}. ' if right else ''}The server said: {server_words(error)}",
        )
    if verdict is Verdict.TOPOLOGY and "replica set" in str(error):  # IllegalOperation has other meanings
        return TopologyError(_explain_standalone(concern.subject, error))
    if verdict is Verdict.TOPOLOGY:
        return TopologyError(f"This deployment cannot serve {concern.subject}. The server said: {server_words(error)}")
    return None


def _explain_standalone(subject: str, error: BaseException) -> str:
    return (
        f"A standalone server cannot serve {subject}. Start mongod with `--replSet` and run `rs.initiate()`. A set of "
        f"one member is enough. The server said: {server_words(error)}"
    )


def raise_if_final(error: Exception, concern: ErrorContext) -> None:
    """Raise an error that waiting cannot fix, in our words if possible. Return if the call may be repeated."""
    final = explain_error(error, concern)
    if final is not None:
        raise final from error
    if not is_transient(error):
        raise error


def login_refused(error: BaseException) -> str:
    """Return the message of a refused login."""
    return (
        "MongoDB refused the login. Check user, password and authSource in the URL. The server said "
        f"({error_name(error)}): {server_words(error)}"
    )


def error_code(error: BaseException) -> int | None:
    """Return the server's code, also of a driver error without it (`NotPrimaryError`)."""
    code = getattr(error, "code", None) or _error_details(error).get("code")
    return None if code is None else int(code)


def error_name(error: BaseException) -> str:
    """Return an error's name and number: `CursorNotFound, code 43`, or the driver's class if no server answered."""
    code = error_code(error)
    if code is None:
        return type(error).__name__
    # Our name first: a server may use another name for an obsolete code.
    return f"{_NAMES.get(code) or _error_details(error).get('codeName', 'an unnamed error')}, code {code}"


def _error_details(error: BaseException) -> Mapping[str, Any]:
    details = getattr(error, "details", None)
    return details if isinstance(details, Mapping) else {}


def server_words(error: BaseException) -> str:
    """Return the server's message, truncated and without credentials."""
    text = short(error)
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


def quote(error: BaseException) -> str:
    """Return the last sentence of our messages: the server's name, code and words."""
    return f"The server said ({error_name(error)}): {server_words(error)}"


def brief(error: BaseException) -> str:
    """Return a server or driver error for logs: name, code and one sentence without documents."""
    if isinstance(error, BulkWriteError):
        failures = list_failures(error.details)
        if failures and "errmsg" in failures[0]:  # the overall code has no information
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            error = OperationFailure(failures[0]["errmsg"], failures[0].get("code"))
            return brief(error) + more
    right = missing_right(error) if judge_error(error) is Verdict.ACCESS else None
    return f"{error_name(error)}: {f'the MongoDB user lacks {right}' if right else server_words(error)}"


@contextmanager
def standalone_refused() -> Iterator[None]:
    """Raise TopologyError if a standalone server refuses the first operation of a transaction."""
    try:
        yield
    except OperationFailure as error:
        if error.code != Code.IllegalOperation or "replica set member or mongos" not in str(error):
            raise
        raise TopologyError(_explain_standalone("transactions", error)) from error


_ERROR_CHARS = 2000
_TRACEBACK_CHARS = 4 * _ERROR_CHARS


def error_text(error: BaseException | None) -> str:
    """Return class and message, truncated. If the message cannot be read, return the class alone."""
    name = type(error).__name__
    try:
        return storable(f"{name}: {_words(error)}"[:_ERROR_CHARS])
    except Exception as failure:  # noqa: BLE001 - whatever a user's __str__ raises
        return storable(f"{name} (its text cannot be read: {type(failure).__name__})"[:_ERROR_CHARS])


def _words(error: BaseException | None) -> str:
    """Return code, name and sentence of a server's error, without drivers' additions."""
    if isinstance(error, PyMongoError) and error_code(error) is not None:
        return brief(error)
    return terse(str(error))


def traceback_text(error: BaseException) -> str:
    """Return the end of its traceback. If it cannot be formatted, return the class alone."""
    try:
        return storable(format_traceback(error)[-_TRACEBACK_CHARS:])
    except Exception as failure:  # noqa: BLE001 - a user's __str__, __notes__ or attributes
        return storable(f"{type(error).__name__} (its traceback cannot be read: {type(failure).__name__})")


def storable(text: str) -> str:
    """Return a text without lone surrogates, which file names may have, and which BSON and streams refuse."""
    return text.encode("utf-8", "replace").decode()
