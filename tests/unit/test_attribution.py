"""Whose failure an exception is that leaves a handler: that of the infrastructure, or the handler's own."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from bson.errors import InvalidDocument
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection
from kombu.exceptions import OperationalError
from pymongo import MongoClient
from pymongo import errors as driver

from mongo_celery.bridge.worker.attribution import (
    conflict_cause,
    has_reached_limit,
    infrastructure_cause,
    is_autoretried,
)
from mongo_celery.errors import DocumentLockedError, TransactionTimeoutError

NOWHERE = "redis://127.0.0.1:1/0"


class TranslatedError(Exception):
    """What a handler makes of an error."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError


def _server_error(code: int, *labels: str) -> driver.OperationFailure:
    return driver.OperationFailure("no", code, {"errorLabels": list(labels)})


def _from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _bulk_error(*codes: int) -> driver.BulkWriteError:
    return driver.BulkWriteError({"writeErrors": [{"code": code} for code in codes], "writeConcernErrors": []})


def _left(raising: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any
        raising()
    return caught.value


def _beside(error: BaseException, *, suppress: bool) -> BaseException:
    """An error that was raised while an outage was being dealt with."""
    error.__context__, error.__suppress_context__ = driver.AutoReconnect("away"), suppress
    return error


def _ask_kombu() -> None:
    with Connection(NOWHERE, transport_options={"max_retries": 0}) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def _ask_somebody() -> None:
    socket.create_connection(("127.0.0.1", 1), timeout=1)


@pytest.mark.parametrize(
    "error",
    [
        driver.AutoReconnect("away"),
        driver.NetworkTimeout("slow"),
        driver.ServerSelectionTimeoutError("no primary"),
        driver.WaitQueueTimeoutError("pool"),
        driver.WTimeoutError("majority", 64),
        _server_error(189),
        _server_error(11602),
        _server_error(189, "TransientTransactionError"),
        _server_error(50, "UnknownTransactionCommitResult"),
        _bulk_error(11602, 91),
        driver.EncryptionError(driver.AutoReconnect("the key vault")),
        OperationalError("Connection refused"),
        _from(TranslatedError("the database is away"), driver.AutoReconnect("away")),
        _left(_ask_kombu),
    ],
    ids=repr,
)
def test_servers_and_networks_are_infrastructure(error: BaseException) -> None:
    assert infrastructure_cause(error)


CONFLICTS = [
    _server_error(112, "TransientTransactionError"),
    _server_error(112),
    _server_error(12345, "TransientTransactionError"),
    _server_error(13),  # a right that was revoked by mistake comes back
    _from(DocumentLockedError("locked"), _server_error(112, "TransientTransactionError")),
    _from(TransactionTimeoutError("late", outcome="aborted"), _server_error(112, "TransientTransactionError")),
    _from(driver.NetworkTimeout("the driver's own words"), _server_error(112, "TransientTransactionError")),
    _from(driver.ExecutionTimeout("the same", 50, {}), _server_error(251, "TransientTransactionError")),
]


@pytest.mark.parametrize("error", CONFLICTS, ids=repr)
def test_what_ends_a_transaction_though_no_server_failed_is_in_doubt(error: BaseException) -> None:
    """It may be the handler's own doing, also as it is told by the driver, by our locks, and by the handler."""
    assert infrastructure_cause(error) is None
    assert conflict_cause(error)
    assert not has_reached_limit(error, None)


@pytest.mark.parametrize(
    ("error", "reached"),
    [
        (driver.NetworkTimeout("slow"), False),
        (_from(TransactionTimeoutError("late", outcome="aborted"), driver.NetworkTimeout("slow")), True),
        (_from(TransactionTimeoutError("late", outcome="aborted"), driver.AutoReconnect("away")), False),
        (_from(TransactionTimeoutError("late", outcome="unknown"), driver.NetworkTimeout("slow")), False),
    ],
    ids=repr,
)
def test_a_limit_that_is_reached_says_nothing_but_that(error: BaseException, reached: bool) -> None:
    """A commit without an answer, a lost connection and a missing server are no doing of a handler."""
    assert has_reached_limit(error, None) is reached
    limit, missing = driver.NetworkTimeout("slow"), driver.ServerSelectionTimeoutError("away")
    assert has_reached_limit(_from(TranslatedError("slow"), limit), limit)
    assert not has_reached_limit(missing, missing)


@pytest.mark.parametrize(
    "error",
    [
        driver.DuplicateKeyError("E11000", 11000),
        driver.DocumentTooLarge("too large"),
        driver.InvalidOperation("closed"),
        driver.ExecutionTimeout("a limit of its own", 50, {}),
        _server_error(2),
        _bulk_error(11000),
        _bulk_error(11602, 11000),
        _bulk_error(),
        InvalidDocument("no BSON"),
        ConnectionError("somebody else"),
        SoftTimeLimitExceeded(),
        MuteError(),
        _beside(KeyError("a mistake"), suppress=True),
        _beside(ValueError("a mistake"), suppress=False),
        _from(driver.DuplicateKeyError("E11000", 11000), driver.AutoReconnect("the first attempt")),
        _left(_ask_somebody),
    ],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_is_the_handlers_own(error: BaseException) -> None:
    assert infrastructure_cause(error) is None
    assert conflict_cause(error) is None


def test_a_soft_time_limit_in_the_search_for_a_server_is_infrastructure() -> None:
    """There was no server at that moment: the handler has not used up its time."""

    def interrupted(*_arguments: object) -> bool:
        raise SoftTimeLimitExceeded

    client: MongoClient[dict[str, object]] = MongoClient("mongodb://127.0.0.1:1/?replicaSet=none")
    with client:
        client._topology._condition.wait = interrupted  # type: ignore[assignment]
        error = _left(lambda: client.admin.command("ping"))
        del client._topology._condition.wait
    assert isinstance(error, SoftTimeLimitExceeded)
    assert infrastructure_cause(error)


def test_celerys_autoretry_is_recognized() -> None:
    """An exception that it holds has left the handler; one that the handler holds has not."""
    app = Celery(broker="memory://")
    seen: list[bool] = []

    class Watching(app.Task):  # type: ignore[name-defined,misc]
        def retry(self, exc: BaseException, **_options: object) -> None:
            seen.append(is_autoretried(exc))
            raise exc

    def fails(task: Watching, asks_itself: bool) -> None:
        try:
            raise ValueError
        except ValueError as error:
            if asks_itself:
                task.retry(exc=error)
            raise

    task = app.task(base=Watching, bind=True, name="fails", shared=False, autoretry_for=(ValueError,))(fails)
    for asks_itself in (False, True):
        with pytest.raises(ValueError):  # noqa: PT011 - its own
            task(asks_itself)
    assert seen == [True, False, True]
