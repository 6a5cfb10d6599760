"""
Attribution of failures, to the handler or to the infrastructure that handler and bridge share.

Infrastructure is MongoDB and the broker. If the handler failed because of them, its change waits, and no attempt is
counted. All other errors are the handler's, and count. In doubt the change also waits, but only a limited number of
times in a row.

| error of the handler | belongs to |
|---|---|
| an error of PyMongo for failed servers, name servers or networks (`mongo.verdicts.is_outage`) | infrastructure |
| `kombu.exceptions.OperationalError`: the broker accepted no message | infrastructure |
| an error of Redis, or an `OSError`, raised inside kombu or Celery's result backends | infrastructure |
| `SoftTimeLimitExceeded` while PyMongo was selecting a server | infrastructure |
| an exception raised *from* one of these (`raise ... from error`) | infrastructure |
| an exception raised while one of these was handled, without `from` | the handler |
| a delete that is refused because entries of an outbox are pending (`OutboxRefusedError`, `retryable`) | in doubt |
| a conflict in a transaction (`mongo.verdicts.is_conflict`), or its limit, reached while MongoDB answers | in doubt |
| a privilege that the MongoDB user lacks, or a refused login | in doubt |
| another error of PyMongo: a duplicate key, a wrong query, the handler's own time limit | the handler |
| `ConnectionError`, `TimeoutError` ... of any other service | the handler |
"""

from __future__ import annotations

from asyncio import CancelledError
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
_CHAIN_MAX = 16  # a chain of causes can be a circle
_CLIENTS_OF_THE_BROKER = ("kombu", "celery.backends")
_AUTORETRY = "celery.app.autoretry"
_NO_ERROR = Exception()
_SERVER_SELECTION = ("pymongo.synchronous.topology", "pymongo.asynchronous.topology")


@dataclass(frozen=True, slots=True)
class WaitReason:
    """
    The reason why a change waits.

    Attributes:
        cause: a text that can be shown.
        doubts_max: limit of consecutive waits that the handler may have caused. None for no limit.
    """

    cause: str
    doubts_max: int | None = None


@dataclass(slots=True)
class Attempt:
    """
    One call of the handler: the facts that attribute its failure.

    Attributes:
        offset: the offset of the change, or of the first change of a list.
        failed: index of the failed change in a bulk handler's list, as the handler reports it.
        outage, conflict: cause of an error in the transaction's body, long before the transaction's limit.
        timeout: the error with which the transaction reached its limit.
        exhausted: the exception that ended Celery's retries. It always counts.
        is_committed: True if its transaction, which includes the outcome, has committed.
        error: the error of the failed call.
        judged: an error, and the server that the change waits for.
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
        """Note an error of the transaction's body. The limit's error may hide it later."""
        self.outage = infrastructure_cause(error) or self.outage
        self.conflict = conflict_cause(error) or self.conflict


def infrastructure_cause(error: BaseException) -> str | None:
    """Return the unavailable part of the infrastructure, for people. None if the handler itself has failed."""
    for each in _causes(error):
        if _is_infrastructure(each):
            return cause_text(each)
        if _is_answer(each):
            return None
    return None


def conflict_cause(error: BaseException) -> str | None:
    """Return the doubt as a text that can be shown. None if there is none."""
    for each in _causes(error):
        if is_conflict(each) or is_refused_user(each) or (isinstance(each, OutboxRefusedError) and each.retryable):
            return cause_text(each)
        if _is_answer(each):
            return None
    return None


def has_reached_limit(error: BaseException, limit: BaseException | None) -> bool:
    """
    Return True if the error only shows that a transaction reached its limit, because either side was slow.

    Args:
        error: the exception of the handler.
        limit: the error with which the handler's own transaction reached its limit. For other handlers, that of a
            `transactional` that they called, which was aborted.
    """
    chain = list(_causes(error))
    reached = any(
        each is limit or (isinstance(each, TransactionTimeoutError) and getattr(each, "outcome", None) == "aborted")
        for each in chain
    )
    driver = next((each for each in chain if isinstance(each, PyMongoError)), None)
    # A missing server is never the handler's fault.
    return reached and driver is not None and driver.timeout and not isinstance(driver, ServerSelectionTimeoutError)


def cause_text(error: BaseException) -> str:
    """Return the driver's message, truncated and without credentials."""
    said = brief(error) if isinstance(error, PyMongoError) else f"{type(error).__name__}: {short(error)}"
    return said[:_CAUSE_CHARS]


def names(classes: Iterable[object], error: BaseException) -> bool:
    """Return True if `autoretry_for` lists this kind of error. Built-in classes such as `Exception` do not count."""
    return any(isinstance(each, type) and each.__module__ != "builtins" and isinstance(error, each) for each in classes)


def is_autoretried(error: BaseException) -> bool:
    """Return True if the handler raised an exception that Celery's `autoretry_for` now handles."""
    return next(_modules(error.__traceback__), "") == _AUTORETRY


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its explicit causes."""
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
    """Return True if MongoDB has answered. Earlier errors do not count."""
    return isinstance(error, PyMongoError) and not isinstance(error, EncryptionError) and not error.timeout


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, NetworkTimeout) and error.__cause__ is not None and is_conflict(error.__cause__):
        return False  # the driver made this error after repeating a transaction for long enough
    if isinstance(error, OperationalError) or is_outage(error):
        return True
    if isinstance(error, SoftTimeLimitExceeded | CancelledError):  # a coroutine is canceled by the limit
        return any(module in _SERVER_SELECTION for module in _modules(error.__traceback__))
    if isinstance(error, OSError) or type(error).__module__.startswith("redis."):
        return any(_belongs_to(module, _CLIENTS_OF_THE_BROKER) for module in _modules(error.__traceback__))
    return False


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """Return the names of the modules that an exception passed through."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next


def _belongs_to(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
