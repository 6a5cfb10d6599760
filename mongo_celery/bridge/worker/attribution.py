"""
Attribution of failures: to the handler, or to the infrastructure that handler and bridge share.

Infrastructure is MongoDB and the broker. A change whose handler failed because of them waits, and nothing is counted.
All other errors of a handler are its own, and count. In doubt the change waits too, but only so often in a row.

| left the handler | whose |
|---|---|
| an error of PyMongo that says that servers or network failed (`mongo.verdicts.is_outage`) | infrastructure |
| `kombu.exceptions.OperationalError`: the broker took no message | infrastructure |
| an error of Redis, or an `OSError`, that came up inside of kombu, or of Celery's result backends | infrastructure |
| `SoftTimeLimitExceeded` that struck while PyMongo was looking for a server | infrastructure |
| an exception that was raised *from* one of these (`raise ... from error`) | infrastructure |
| an exception that was raised while one of these was handled, without `from` | the handler |
| a delete that is refused since entries of an outbox are pending (`OutboxRefusedError`, `retryable`) | in doubt |
| a conflict in a transaction (`mongo.verdicts.is_conflict`), or its limit, reached while MongoDB answers | in doubt |
| a right that the MongoDB user lacks, a login that is refused | in doubt |
| another error of PyMongo: a duplicate key, a query that is wrong, a time limit of the handler's own | the handler |
| `ConnectionError`, `TimeoutError` ... of whatever else it calls | the handler |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import OperationalError
from pymongo.errors import EncryptionError, NetworkTimeout, PyMongoError, ServerSelectionTimeoutError

from mongo_celery.errors import OutboxRefusedError, TransactionTimeoutError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import brief, is_conflict, is_outage, is_refused_user

_CAUSE_CHARS = 300
_CHAIN_MAX = 16  # a chain of causes may be made to be a circle
_CLIENTS_OF_THE_BROKER = ("kombu", "celery.backends")
_AUTORETRY = "celery.app.autoretry"
_NO_ERROR = Exception()
_SERVER_SELECTION = "pymongo.synchronous.topology"


@dataclass(frozen=True, slots=True)
class WaitReason:
    """
    The reason for which a change waits.

    Attributes:
        cause: in words that can be shown.
        doubts_max: how often in a row, since its handler may have caused it. None for as long as it lasts.
    """

    cause: str
    doubts_max: int | None = None


@dataclass(slots=True)
class Attempt:
    """
    One call of the handler, as far as it says what a failure is attributed to.

    Attributes:
        offset: of the change that is given, or of the first one of a list.
        failed: index, in the list that a bulk handler was given, of the change that has failed, as it says.
        outage, conflict: cause of an error in the body of its transaction, long before the transaction's limit.
        timeout: the error by which the transaction has reached its limit.
        exhausted: the exception with which Celery's own retries have ended: it counts, whatever it is.
        is_committed: whether its transaction has committed, and with it the outcome.
        error: with which it has failed.
        judged: an error, and what the change has to wait for by it.
    """

    offset: int = 0
    failed: int | None = None
    outage: str | None = None
    conflict: str | None = None
    timeout: BaseException | None = None
    exhausted: BaseException | None = None
    is_committed: bool = False
    error: Exception = _NO_ERROR
    judged: tuple[BaseException, WaitReason | None] | None = None

    def note_body_error(self, error: BaseException) -> None:
        """Note an error of the transaction's body: its limit may hide it later."""
        self.outage = infrastructure_cause(error) or self.outage
        self.conflict = conflict_cause(error) or self.conflict


def infrastructure_cause(error: BaseException) -> str | None:
    """Return what of the infrastructure was away, for people. None when the failure is the handler's own."""
    for each in _causes(error):
        if _is_infrastructure(each):
            return cause_text(each)
        if _is_answer(each):
            return None
    return None


def conflict_cause(error: BaseException) -> str | None:
    """Return what is in doubt, in words that can be shown. None when nothing is."""
    for each in _causes(error):
        if is_conflict(each) or is_refused_user(each) or (isinstance(each, OutboxRefusedError) and each.retryable):
            return cause_text(each)
        if _is_answer(each):
            return None
    return None


def has_reached_limit(error: BaseException, limit: BaseException | None) -> bool:
    """
    Return True if it says no more than that a transaction has reached its limit, whoever was slow.

    Args:
        error: what has left the handler.
        limit: the error by which its own transaction, if it is transactional, has reached its limit. Else it is that
            of a `transactional` that the handler has called, and was aborted.
    """
    chain = list(_causes(error))
    reached = any(
        each is limit or (isinstance(each, TransactionTimeoutError) and getattr(each, "outcome", None) == "aborted")
        for each in chain
    )
    driver = next((each for each in chain if isinstance(each, PyMongoError)), None)
    # That there was no server is the handler's doing in no case.
    return reached and driver is not None and driver.timeout and not isinstance(driver, ServerSelectionTimeoutError)


def cause_text(error: BaseException) -> str:
    """Return the driver's own words, of bounded length and without credentials."""
    said = brief(error) if isinstance(error, PyMongoError) else f"{type(error).__name__}: {short(error)}"
    return said[:_CAUSE_CHARS]


def names(classes: Iterable[object], error: BaseException) -> bool:
    """Return True if an `autoretry_for` names this error in particular: Python's own classes take every error."""
    return any(isinstance(each, type) and each.__module__ != "builtins" and isinstance(error, each) for each in classes)


def is_autoretried(error: BaseException) -> bool:
    """Return True if an exception has left the handler, and Celery's `autoretry_for` handles it now."""
    return next(_modules(error.__traceback__), "") == _AUTORETRY


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from, explicitly."""
    following: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if following is None:
            return
        yield following
        if isinstance(following, EncryptionError) and isinstance(following.cause, BaseException):
            following = following.cause
        else:
            following = following.__cause__


def _is_answer(error: BaseException) -> bool:
    """Return True if MongoDB has answered: errors before that do not count."""
    return isinstance(error, PyMongoError) and not isinstance(error, EncryptionError) and not error.timeout


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, NetworkTimeout) and error.__cause__ is not None and is_conflict(error.__cause__):
        return False  # the driver has made it, when it had repeated a transaction for long enough
    if isinstance(error, OperationalError) or is_outage(error):
        return True
    if isinstance(error, SoftTimeLimitExceeded):
        return any(module == _SERVER_SELECTION for module in _modules(error.__traceback__))
    if isinstance(error, OSError) or type(error).__module__.startswith("redis."):
        return any(_is_from(module, _CLIENTS_OF_THE_BROKER) for module in _modules(error.__traceback__))
    return False


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """Names of the modules through which an exception has passed."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next


def _is_from(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
