"""The error tree, and our verdict on every error of the layers below."""

from __future__ import annotations

import inspect
import pickle
import re
from operator import attrgetter

import pytest
from bson.errors import InvalidBSON
from pymongo import errors as driver

from mongo_celery import errors
from mongo_celery.bridge.stream.verdicts import final_error, judge_stream_error
from mongo_celery.errors import (
    AccessError,
    DocumentLockedError,
    HistoryLostError,
    LeaseLostError,
    MongoCeleryError,
    ServerUnavailableError,
    StreamRefusedError,
    TopologyError,
    TransactionTimeoutError,
    UnreadableEventError,
)
from mongo_celery.mongo.verdicts import ErrorContext, Verdict, explain_error, is_transient, judge_error

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

DRIVER: list[tuple[BaseException, Verdict]] = [
    (driver.ConnectionFailure("refused"), Verdict.TRANSIENT),
    (driver.AutoReconnect("reset"), Verdict.TRANSIENT),
    (driver.NetworkTimeout("timed out"), Verdict.TRANSIENT),
    (driver.NotPrimaryError("stepped down"), Verdict.TRANSIENT),
    (driver.ServerSelectionTimeoutError("no primary"), Verdict.TRANSIENT),
    (driver.WaitQueueTimeoutError("pool"), Verdict.TRANSIENT),
    (driver.CursorNotFound("gone", 43), Verdict.TRANSIENT),
    (driver.ExecutionTimeout("slow", 50), Verdict.TRANSIENT),
    (driver.ConfigurationError("a wrong option"), Verdict.REFUSED),
    (driver.InvalidURI("a wrong URL"), Verdict.REFUSED),
    (driver.InvalidOperation("Cannot use MongoClient after close"), Verdict.UNKNOWN),
    (driver.OperationFailure("no code"), Verdict.UNKNOWN),
    (driver.WriteError("not of a stream", 1), Verdict.UNKNOWN),
    (driver.DuplicateKeyError("not of a stream", 11000), Verdict.UNKNOWN),
    (driver.WriteConcernError("not of a stream", 100), Verdict.UNKNOWN),
    (driver.WTimeoutError("not of a stream", 64), Verdict.UNKNOWN),
    (driver.BulkWriteError({"writeErrors": [], "writeConcernErrors": []}), Verdict.UNKNOWN),
    (driver.ClientBulkWriteException({"error": None}, verbose=False), Verdict.UNKNOWN),
    (driver.ProtocolError("garbage"), Verdict.UNKNOWN),
    (driver.CollectionInvalid("not of a stream"), Verdict.UNKNOWN),
    (driver.InvalidName("not of a stream"), Verdict.UNKNOWN),
    (driver.EncryptionError(ValueError("no key")), Verdict.UNKNOWN),
    (driver.EncryptedCollectionError(ValueError("no key"), {}), Verdict.UNKNOWN),
    (driver.PyMongoError("new"), Verdict.UNKNOWN),
    (InvalidBSON("damaged"), Verdict.UNKNOWN),
    (RuntimeError("ours"), Verdict.UNKNOWN),
]


def refused(code: int | None, message: str = "no", *labels: str) -> driver.OperationFailure:
    return driver.OperationFailure(message, code, {"errmsg": message, "errorLabels": list(labels)})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_docstring_is_the_default_message(kind: type[MongoCeleryError]) -> None:
    """P9: an error raised without words still says what happened and what to do."""
    text = str(kind())
    assert kind.__doc__
    assert text == " ".join(kind.__doc__.split())
    assert text.endswith(".")
    assert str(kind("other words")) == "other words"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_facts_are_attributes_and_survive_pickling(kind: type[MongoCeleryError]) -> None:
    """Celery's prefork pool pickles errors from the child to its parent."""
    error = pickle.loads(pickle.dumps(kind("words", code=7, partition="shop/f/0/3")))
    assert type(error) is kind
    assert str(error) == "words"
    assert attrgetter("code", "partition")(error) == (7, "shop/f/0/3")
    assert str(pickle.loads(pickle.dumps(kind()))) == str(kind())


def drawn_tree() -> dict[str, str]:
    """The drawing in the module's docstring as `{class: parent}`."""
    parents: dict[str, str] = {}
    path: list[tuple[int, str]] = [(-1, "Exception")]
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([ |]*)(\+-- )?(\w+Error)( {2,}.*)?", line)
        if match:
            depth = len(match[1]) if match[2] else -1
            while path[-1][0] >= depth and len(path) > 1:
                path.pop()
            parents[match[3]] = path[-1][1]
            path.append((depth, match[3]))
    return parents


def test_the_drawing_of_the_tree_matches_the_classes() -> None:
    """The module's docstring is where users look for what to catch."""
    assert drawn_tree() == {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES}


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    """`retryable` promises that the same call may succeed without anybody's doing."""
    assert {kind for kind in CLASSES if kind.retryable} == {
        DocumentLockedError,
        LeaseLostError,
        ServerUnavailableError,
        TransactionTimeoutError,
    }


@pytest.mark.parametrize(("error", "verdict"), DRIVER, ids=lambda value: type(value).__name__)
def test_each_class_of_the_driver_has_its_verdict(error: BaseException, verdict: Verdict) -> None:
    """P9: nothing that PyMongo raises is left without a decision."""
    assert judge_stream_error(error, opening=False) is verdict


def test_no_class_of_the_driver_is_missing_from_the_table() -> None:
    """P9: a new release of PyMongo with a new class fails here, not in production."""
    known = {type(error) for error, _ in DRIVER}
    public = {
        value
        for name, value in vars(driver).items()
        if inspect.isclass(value) and issubclass(value, driver.PyMongoError) and not name.startswith("_")
    }
    assert public <= known


@pytest.mark.parametrize(
    ("code", "label", "verdict"),
    [
        (9999, "ResumableChangeStreamError", Verdict.TRANSIENT),
        (9999, "RetryableError", Verdict.TRANSIENT),
        (9999, "NonResumableChangeStreamError", Verdict.HISTORY_LOST),
        (286, "ResumableChangeStreamError", Verdict.HISTORY_LOST),
    ],
)
def test_labels_decide_where_the_code_does_not(code: int, label: str, verdict: Verdict) -> None:
    """A newer server names with a label what our table cannot know; a known code counts more."""
    assert judge_stream_error(refused(code, "no", label), opening=False) is verdict


@pytest.mark.parametrize("verdict", list(OURS), ids=str)
def test_each_final_verdict_has_an_error_of_ours_with_the_servers_words(verdict: Verdict) -> None:
    """P9: our sentence first, then the server's; the code is an attribute."""
    error = final_error(verdict, refused(4711, "the server's own words"), "shop.orders")
    assert type(error) is OURS[verdict]
    assert "the server's own words" in str(error)
    assert attrgetter("code")(error) == 4711


def test_a_final_error_is_of_bounded_length_and_names_the_scope_where_a_right_is_missing() -> None:
    """P9: `full error` repeats whole documents, which no log should hold."""
    text = str(final_error(Verdict.ACCESS, refused(13, "x" * 5000 + ", full error: {secret}"), "shop.orders"))
    assert "shop.orders" in text
    assert "changeStream" in text
    assert len(text) < 1000
    assert "secret" not in text


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (driver.AutoReconnect("reset"), True),
        (driver.ServerSelectionTimeoutError("no primary"), True),
        (driver.ExecutionTimeout("pymongo.timeout", 50), True),
        (driver.WTimeoutError("majority", 64), True),
        (refused(10107), True),
        (refused(112, "conflict", "TransientTransactionError"), True),
        (refused(9999, "retry", "RetryableWriteError"), True),
        (refused(9999, "too many requests", "SystemOverloadedError", "RetryableError"), True),
        (refused(13), False),
        (driver.DuplicateKeyError("twice", 11000), False),
        (driver.InvalidOperation("closed"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_call_on_the_state_is_repeated_only_for_errors_that_may_pass(
    error: driver.PyMongoError, transient: bool
) -> None:
    """P9: no hot loop over what nobody repairs."""
    assert is_transient(error) is transient


CONCERN = ErrorContext("the orders of the shop", "find on shop.orders")


def test_a_missing_right_names_whom_it_concerns_and_what_to_grant() -> None:
    """P9: what waiting cannot cure names its cure; the server's words end before the command's contents."""
    words = 'not authorized on shop to execute command { find: "orders", filter: { secret: 1 }, $db: "shop" }'
    error = explain_error(refused(13, words), CONCERN)
    assert isinstance(error, AccessError)
    assert "may not use the orders of the shop. Grant find on shop.orders." in str(error)
    assert 'find: "orders"' in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("error", "login"),
    [
        (refused(18, "Authentication failed."), True),
        (refused(8000, "bad auth : authentication failed"), True),
        (refused(8000, "user is not allowed to do action [find] on [shop.orders]"), False),
    ],
    ids=["a server of one's own", "Atlas", "a right in Atlas"],
)
def test_a_refused_login_is_told_from_a_missing_right(error: driver.OperationFailure, login: bool) -> None:
    """P9: granting rights cures no mistyped password."""
    stream = final_error(judge_error(error), error, "shop.orders")
    for found in (explain_error(error, CONCERN), stream):
        assert isinstance(found, AccessError)
        assert ("refused the login. Check user, password and authSource" in str(found)) is login
        assert ("grant" in str(found).lower()) is not login
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
    assert "the orders of the shop" in str(error)
    assert words in str(error)
    assert ("--replSet" in str(error)) is replica_set


@pytest.mark.parametrize("error", [refused(112), driver.AutoReconnect("reset"), refused(4242)], ids=str)
def test_what_may_pass_or_nobody_has_met_keeps_its_own_words(error: driver.PyMongoError) -> None:
    """P9: no cure is invented."""
    assert explain_error(error, CONCERN) is None


def test_a_source_without_changes_is_named_with_the_one_that_has_them() -> None:
    """P9: the stream of a view, or of a time series, cannot be opened."""
    error = driver.OperationFailure("Namespace shop.view is a view, not a collection", 166)
    assert "shop.view is a view" in str(final_error(Verdict.REFUSED, error, "shop.view")).partition("said")[0]
