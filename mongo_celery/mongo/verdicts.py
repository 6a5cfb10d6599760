"""
The meaning of an error of the server or the driver: one verdict each, and the sentence for what a person has to fix.

A verdict says what is the matter, not what to do: a call repeats what is transient (`repeating`), a change stream
has reactions of its own (`bridge.stream.reactions`).
"""

from __future__ import annotations

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
    """The meaning of an error."""

    TRANSIENT = "the same call may succeed when it is made again"
    LOGIN = "the login was refused"
    ACCESS = "a right is missing"
    TOPOLOGY = "not on this kind of server"
    HISTORY_LOST = "the oplog no longer reaches back"
    TOKEN_NOT_FOUND = "a resume token was not found"  # noqa: S105 - a verdict
    TOO_LARGE = "a document would be larger than 16 MB"
    IMAGE_MISSING = "a required image of a changed document is missing"
    DUPLICATE_KEY = "a unique index has the key already"
    REFUSED = "the command or its pipeline is wrong"
    UNKNOWN = "nobody has met it yet"


class Code(IntEnum):
    """
    The server's codes that mean something to us, by the server's names, each with one verdict at most.

    One without a verdict has a meaning only where it is asked for by name.

    They are those of `error_codes.yml`. An assertion that has no name of its own is called after its number, as in
    the server's `codeName`.
    """

    verdict: Verdict

    def __new__(cls, number: int, verdict: Verdict | None = None) -> Self:
        """Return a number that has a verdict."""
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
    SnapshotTooOld = 239
    SnapshotUnavailable = 246
    ProducerConsumerQueueEndClosed = 248, Verdict.TRANSIENT
    InvalidResumeToken = 260, Verdict.HISTORY_LOST
    ExceededTimeLimit = 262, Verdict.TRANSIENT
    OperationNotSupportedInTransaction = 263
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
    Location17419 = 17419, Verdict.TOO_LARGE  # the document after an update is larger than 16 MB
    Location17420 = 17420, Verdict.TOO_LARGE  # the same, of a replacement
    Location40324 = 40324, Verdict.REFUSED  # no such stage
    Location40415 = 40415, Verdict.REFUSED  # no such field of an option
    Location40573 = 40573, Verdict.TOPOLOGY  # $changeStream needs a replica set
    Location40647 = 40647, Verdict.REFUSED
    Location50811 = 50811, Verdict.REFUSED
    Location51058 = 51058, Verdict.REFUSED
    Location51075 = 51075, Verdict.IMAGE_MISSING
    Location51144 = (
        51144,
        Verdict.TRANSIENT,
    )  # $$CLUSTER_TIME is not available: a set with authentication still makes its keys


_NAMES = {code.value: code.name for code in Code}
_VERDICTS = {code.value: code.verdict for code in Code}
_ENDED_ALONE = frozenset({
    Code.CursorNotFound, Code.MaxTimeMSExpired, Code.QueryPlanKilled, Code.RetryChangeStream, Code.CursorKilled,
    Code.ProducerConsumerQueueEndClosed, Code.ChangeStreamInvalidated,
})  # fmt: skip
"""Of the transient codes, those by which a server that is well ends one operation."""
_NO_OUTAGE = _ENDED_ALONE | {Code.WriteConflict}

_TRANSIENT_TRANSACTION = "TransientTransactionError"
_REPEAT_LABELS = ("RetryableWriteError", _TRANSIENT_TRANSACTION, "RetryableError")  # the last: of an overload
_OUTAGE_LABELS = ("RetryableWriteError", "RetryableError", "UnknownTransactionCommitResult")
_MESSAGE_CHARS = 500


def judge_error(error: BaseException | None) -> Verdict:
    """
    Classify an error of PyMongo.

    A code that we know says more than a label: the labels are for what a newer server names first.
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
    if error.code == Code.AtlasError and not _is_about_the_login(error):
        return Verdict.ACCESS
    return verdict


def _is_about_the_login(error: OperationFailure) -> bool:
    """Atlas gives one code to what servers of one's own tell apart as 13 and 18, and to its own limits."""
    text = str(error).lower()
    return "bad auth" in text or "authentication failed" in text


_LOGGED_OUT = "requires authentication"


def is_unanswered(error: BaseException | None) -> bool:
    """Return True if no server has answered, or none in time, or one that is not ready for anybody."""
    if isinstance(error, ConnectionFailure) or is_refused_session(error):
        return True
    return isinstance(error, PyMongoError) and error.timeout


def is_refused_session(error: BaseException | None) -> bool:
    """
    Return True if a session was not taken, as PyMongo reports without its own class or code.

    Every server that it supports has sessions; a member of a set has none while it is neither primary nor secondary.
    """
    return isinstance(error, ConfigurationError) and "Sessions are not supported" in str(error)


def is_logged_out(error: BaseException | None) -> bool:
    """
    Return True if the server no longer knows who a connection has logged in as.

    That is so where its user was dropped. Made again, the user is another one: such a connection is refused everything
    for as long as it lives.
    """
    return isinstance(error, OperationFailure) and error.code == Code.Unauthorized and _LOGGED_OUT in str(error)


def is_refused_user(error: BaseException) -> bool:
    """Return True if a right is missing, or the login was refused: an operator's doing, most often, that ends again."""
    return judge_error(error) in (Verdict.ACCESS, Verdict.LOGIN)


def is_transient(error: BaseException) -> bool:
    """Return True if a call may succeed when it is made again; the server's own label for it counts most."""
    labelled = isinstance(error, PyMongoError) and any(map(error.has_error_label, _REPEAT_LABELS))
    return labelled or judge_error(error) is Verdict.TRANSIENT


def is_outage(error: BaseException) -> bool:
    """
    Return True if a call failed through servers or the network, whatever it asked for.

    Less than `is_transient`: a cursor that was not used for too long and a time-out of the caller's own choice are no
    outage, though the call may be made again; nor is what `is_conflict`.
    """
    if isinstance(error, BulkWriteError):
        return _is_bulk_of_outages(error)
    if isinstance(error, (ConnectionFailure, WTimeoutError)) or is_refused_session(error):
        return True
    if not isinstance(error, PyMongoError):
        return False
    if any(map(error.has_error_label, _OUTAGE_LABELS)):
        return True
    code = getattr(error, "code", None)
    return code not in _NO_OUTAGE and _VERDICTS.get(code or 0) is Verdict.TRANSIENT


def is_conflict(error: BaseException) -> bool:
    """
    Return True if a transaction has ended though no server failed: by others, or by its own writes.

    A document that somebody else has written or holds, a snapshot that is too old, a transaction that the server no
    longer knows, because it took too long: the error alone does not say whose doing it is.
    """
    if not isinstance(error, PyMongoError) or is_outage(error):
        return False
    return error.has_error_label(_TRANSIENT_TRANSACTION) or getattr(error, "code", None) == Code.WriteConflict


def _is_bulk_of_outages(error: BulkWriteError) -> bool:
    details = error.details or {}
    failures = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
    return bool(failures) and all(
        each.get("code") not in _NO_OUTAGE and _VERDICTS.get(each.get("code") or 0) is Verdict.TRANSIENT
        for each in failures
    )


def is_too_large(error: BaseException | None) -> bool:
    """Return True if a write failed because its document would be larger than 16 MB."""
    # An insert says so with a code that has many meanings.
    inserted = isinstance(error, OperationFailure) and error.code == Code.BadValue and "too large" in str(error)
    return inserted or judge_error(error) is Verdict.TOO_LARGE


def is_duplicate_id(error: BaseException) -> bool:
    """Return True if a write failed because there is a document of its `_id`, not by another unique index."""
    return isinstance(error, DuplicateKeyError) and list((error.details or {}).get("keyPattern", {})) == ["_id"]


# -- sentences -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorContext:
    """
    The environment of an error of MongoDB, for its text.

    Attributes:
        subject: what the call was made on, such as `the outbox's collection shop.orders`.
        grant: what has to be granted there, such as `find and update on shop.orders`.
    """

    subject: str
    grant: str


def explain_error(error: BaseException, concern: ErrorContext) -> DeploymentError | None:
    """Return an error that waiting cannot fix, in our words with the server's; None for all others."""
    verdict = judge_error(error)
    if verdict is Verdict.LOGIN:
        return AccessError(login_refused(error))
    if verdict is Verdict.ACCESS:
        right = missing_right(error)
        return AccessError(
            f"The MongoDB user lacks a right on {concern.subject}: grant {concern.grant}. "
            f"{f'Missing is {right}. ' if right else ''}The server said: {server_words(error)}",
        )
    if verdict is Verdict.TOPOLOGY and _names_a_set(error):
        return TopologyError(
            f"A standalone server cannot serve {concern.subject}. Start mongod with `--replSet` and run "
            f"`rs.initiate()`; a set of one member is enough. The server said: {server_words(error)}",
        )
    if verdict is Verdict.TOPOLOGY:
        return TopologyError(f"This deployment cannot serve {concern.subject}. The server said: {server_words(error)}")
    return None


def raise_if_final(error: Exception, concern: ErrorContext) -> None:
    """Raise an error that waiting cannot fix, in our words if there are any; return if it may be tried again."""
    final = explain_error(error, concern)
    if final is not None:
        raise final from error
    if not is_transient(error):
        raise error


def login_refused(error: BaseException) -> str:
    """Return the message of a refused login, whatever was asked for after it."""
    return (
        "MongoDB refused the login; check user, password and authSource in the URL. "
        f"It said ({error_name(error)}): {server_words(error)}"
    )


def error_code(error: BaseException) -> int | None:
    """Return the server's code, also where the driver has made an error without it (`NotPrimaryError`)."""
    code = getattr(error, "code", None) or _error_details(error).get("code")
    return None if code is None else int(code)


def error_name(error: BaseException) -> str:
    """Return an error's name and number: `CursorNotFound, code 43`, or the driver's class if no server has answered."""
    code = error_code(error)
    if code is None:
        return type(error).__name__
    # Ours first: a server may call one that it no longer uses by another name.
    return f"{_NAMES.get(code) or _error_details(error).get('codeName', 'of no name')}, code {code}"


def _error_details(error: BaseException) -> Mapping[str, Any]:
    details = getattr(error, "details", None)
    return details if isinstance(details, Mapping) else {}


def server_words(error: BaseException) -> str:
    """Return the server's words, of bounded length and without credentials."""
    text = short(error)
    return text if len(text) <= _MESSAGE_CHARS else text[:_MESSAGE_CHARS] + "..."


def quote(error: BaseException) -> str:
    """Return the sentence that ends a message of ours: name, code and words of the server."""
    return f"The server said ({error_name(error)}): {server_words(error)}"


def brief(error: BaseException) -> str:
    """An error of the server or the driver as logs have it: name and code, then one sentence without its documents."""
    if isinstance(error, BulkWriteError):
        failures = [*_error_details(error).get("writeErrors", ()), *_error_details(error).get("writeConcernErrors", ())]
        if failures and "errmsg" in failures[0]:  # the whole has a code of its own, which says nothing
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            error = OperationFailure(failures[0]["errmsg"], failures[0].get("code"))
            return brief(error) + more
    right = missing_right(error) if judge_error(error) is Verdict.ACCESS else None
    return f"{error_name(error)}: {f'the MongoDB user lacks {right}' if right else server_words(error)}"


def _names_a_set(error: BaseException) -> bool:
    """IllegalOperation has many meanings; those of a standalone server name what they miss."""
    return "replica set" in str(error)


def refuse_standalone(error: BaseException) -> None:
    """Raise TopologyError if the error is a standalone server's refusal of a transaction; else do nothing."""
    if getattr(error, "code", None) == Code.IllegalOperation and "replica set member or mongos" in str(error):
        raise TopologyError(
            "Transactions need a replica set or a sharded cluster. Start mongod with `--replSet` and run "
            "`rs.initiate()`; a set of one member is enough.",
        ) from error


@contextmanager
def standalone_refused() -> Iterator[None]:
    """Raise TopologyError where a standalone server refuses the first operation of a transaction."""
    try:
        yield
    except OperationFailure as error:
        refuse_standalone(error)
        raise


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
