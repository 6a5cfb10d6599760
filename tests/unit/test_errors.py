"""The error tree, and our verdict on every error of the layers below."""

from __future__ import annotations

import inspect
import pickle
from operator import attrgetter

import pytest
from bson.errors import InvalidBSON
from pymongo import errors as driver

from mongo_celery import errors
from mongo_celery.bridge.stream.verdicts import final_error, judge_stream_error
from mongo_celery.errors import (
    AccessError,
    HistoryLostError,
    MongoCeleryError,
    StreamRefusedError,
    TopologyError,
    UnreadableEventError,
)
from mongo_celery.mongo.verdicts import ErrorContext, Verdict, explain_error, judge_error

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, MongoCeleryError)]

OURS: dict[Verdict, type[MongoCeleryError]] = {
    Verdict.HISTORY_LOST: HistoryLostError,
    Verdict.TOKEN_NOT_FOUND: HistoryLostError,
    Verdict.REFUSED: StreamRefusedError,
    Verdict.UNKNOWN: StreamRefusedError,
    Verdict.TOPOLOGY: TopologyError,
    Verdict.ACCESS: AccessError,
    Verdict.LOGIN: AccessError,
    Verdict.TOO_LARGE: UnreadableEventError,
    Verdict.IMAGE_MISSING: UnreadableEventError,
}

PASSING = [
    driver.ConnectionFailure("refused"),
    driver.AutoReconnect("reset"),
    driver.NetworkTimeout("timed out"),
    driver.NotPrimaryError("stepped down"),
    driver.ServerSelectionTimeoutError("no primary"),
    driver.WaitQueueTimeoutError("pool"),
    driver.CursorNotFound("gone", 43),
    driver.ExecutionTimeout("slow", 50),
]
WRONG = [driver.ConfigurationError("a wrong option"), driver.InvalidURI("a wrong URL")]
UNEXPECTED = [
    *(kind("not of a stream", 1) for kind in (driver.WriteError, driver.DuplicateKeyError, driver.WriteConcernError)),
    *(kind("new") for kind in (driver.InvalidOperation, driver.OperationFailure, driver.ProtocolError)),
    *(kind("new") for kind in (driver.CollectionInvalid, driver.InvalidName, driver.PyMongoError)),
    driver.WTimeoutError("not of a stream", 64),
    driver.BulkWriteError({"writeErrors": [], "writeConcernErrors": []}),
    driver.ClientBulkWriteException({"error": None}, verbose=False),
    driver.EncryptionError(ValueError("no key")),
    driver.EncryptedCollectionError(ValueError("no key"), {}),
    InvalidBSON("damaged"),
    RuntimeError("ours"),
]


def refused(code: int | None, message: str = "no", *labels: str) -> driver.OperationFailure:
    return driver.OperationFailure(message, code, {"errmsg": message, "errorLabels": list(labels)})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_has_a_message_and_facts_that_survive_pickling(kind: type[MongoCeleryError]) -> None:
    """P9: the docstring is the default message. Celery's prefork pool pickles errors from the child to its parent."""
    assert kind.__doc__
    assert str(pickle.loads(pickle.dumps(kind()))) == " ".join(kind.__doc__.split())
    error = pickle.loads(pickle.dumps(kind("words", code=7, partition="shop/f/0/3")))
    assert (type(error), str(error)) == (kind, "words")
    assert attrgetter("code", "partition")(error) == (7, "shop/f/0/3")


def test_each_class_of_the_driver_has_its_verdict() -> None:
    """P9: a new release of PyMongo with a new class fails here, not in production."""
    met: set[type] = set()
    for errors_of, verdict in ((PASSING, Verdict.TRANSIENT), (WRONG, Verdict.REFUSED), (UNEXPECTED, Verdict.UNKNOWN)):
        assert {judge_stream_error(error, opening=False) for error in errors_of} == {verdict}
        met |= set(map(type, errors_of))
    kinds = [value for value in vars(driver).values() if inspect.isclass(value)]
    assert met >= {
        kind for kind in kinds if issubclass(kind, driver.PyMongoError) and not kind.__name__.startswith("_")
    }


@pytest.mark.parametrize("verdict", list(OURS), ids=str)
def test_each_final_verdict_has_an_error_of_ours_with_the_servers_words(verdict: Verdict) -> None:
    """P9: bounded, without the documents that the server repeats. The code is an attribute."""
    words = "own words" + "x" * 5000 + ", full error: {secret}"
    error = final_error(verdict, refused(4711, words), "shop.orders")
    assert type(error) is OURS[verdict]
    assert "own words" in str(error)
    assert len(str(error)) < 1000
    assert "secret" not in str(error)
    assert attrgetter("code")(error) == 4711


CONCERN = ErrorContext("the orders of the shop", "find on shop.orders")


@pytest.mark.parametrize(
    ("error", "login"),
    [
        (refused(18, "Authentication failed."), True),
        (refused(8000, "bad auth : authentication failed"), True),
        (refused(8000, "user is not allowed to do action [find] on [shop.orders]"), False),
        (refused(13, 'not authorized on shop to execute command { find: "orders", filter: { secret: 1 } }'), False),
    ],
    ids=["a server of one's own", "Atlas", "a right in Atlas", "a right"],
)
def test_a_refused_login_is_told_from_a_missing_right(error: driver.OperationFailure, login: bool) -> None:
    """P9: granting rights cures no mistyped password."""
    stream = final_error(judge_error(error), error, "shop.orders")
    for found in (explain_error(error, CONCERN), stream):
        assert isinstance(found, AccessError)
        assert ("authSource" in str(found)) is login
        assert ("grant" in str(found).lower()) is not login
        assert "secret" not in str(found)
    assert attrgetter("code")(stream) == error.code


@pytest.mark.parametrize(
    ("words", "replica_set"),
    [("Transaction numbers are only allowed on a replica set member or mongos", True), ("cannot do this here", False)],
)
def test_a_refused_operation_is_a_missing_replica_set_only_where_the_server_says_so(
    words: str, replica_set: bool
) -> None:
    """P9: IllegalOperation has many meanings, and most are not cured by `--replSet`."""
    error = explain_error(refused(20, words), CONCERN)
    assert isinstance(error, TopologyError)
    assert ("--replSet" in str(error)) is replica_set


@pytest.mark.parametrize("error", [refused(112), driver.AutoReconnect("reset"), refused(4242)], ids=str)
def test_what_may_pass_or_nobody_has_met_keeps_its_own_words(error: driver.PyMongoError) -> None:
    """P9: no cure is invented."""
    assert explain_error(error, CONCERN) is None
