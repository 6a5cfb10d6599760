"""What is written down of errors: name, code and sentence, and neither documents nor credentials."""

from __future__ import annotations

import ast
import logging

import pytest
from celery import Celery
from pymongo.errors import BulkWriteError, OperationFailure, ServerSelectionTimeoutError

from mongo_celery import Bridge, tracing
from mongo_celery.mongo.redaction import format_traceback, short, terse, without_credentials
from mongo_celery.mongo.verdicts import brief, error_text, traceback_text
from tests.unit.test_log_events import LEVELS, ROOT, event_of, log_calls

_DOCUMENT = {"card": "4111"}
_OURS = {"horizon_unseen", "decision_refused", "configuration_refused", "listener_failed", "other_broker"}
"""Events whose record has an error as it is: one of our own, or of the operating system."""

REFUSED = OperationFailure(
    'not authorized on shop to execute command { update: "orders", updates: [ { q: { card: "4111" } } ] }',
    13,
    {"ok": 0.0, "code": 13, "codeName": "Unauthorized", "keyValue": _DOCUMENT},
)
DUPLICATE = OperationFailure("E11000 duplicate key", 11000, {"code": 11000, "keyValue": _DOCUMENT})
AWAY = ServerSelectionTimeoutError("db1:27017: timed out (configured timeouts: 1), Timeout: 30s, Topology: <4111>")


@pytest.mark.parametrize("write", [brief, error_text, traceback_text])
@pytest.mark.parametrize("error", [REFUSED, DUPLICATE, AWAY, BulkWriteError({"writeErrors": [{"op": _DOCUMENT}]})])
def test_what_drivers_append_is_cut(write: object, error: Exception) -> None:
    """Neither the whole answer of the server nor the command that it repeats."""
    assert callable(write)
    text = write(error)
    assert "full error" not in text
    assert "4111" not in text
    assert type(error).__name__ in text or "code" in text


def test_a_servers_error_is_its_name_code_and_sentence() -> None:
    assert brief(DUPLICATE) == "DuplicateKey, code 11000: E11000 duplicate key"
    assert "update on shop.orders" in brief(REFUSED)
    assert "4111" not in short(REFUSED)
    assert without_credentials("of redis://u:hush@h:6379") == "of redis://***@h:6379"
    bulk = BulkWriteError({"writeErrors": [{"code": 11000, "errmsg": "E11000 duplicate key", "op": _DOCUMENT}] * 3})
    assert "11000" in brief(bulk)
    assert brief(AWAY) == "ServerSelectionTimeoutError: db1:27017: timed out"


def test_an_error_that_cannot_say_its_words_is_its_name() -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(UnspeakableError()).startswith("UnspeakableError (")


def test_a_server_outside_the_set_of_the_url_is_named_with_its_fix() -> None:
    """A standalone server, or a set that is not initiated, as on many machines of developers."""
    for end in ('available for replica set name "rs0"', 'match selector "Primary()"'):
        text = short(ServerSelectionTimeoutError(f"No replica set members {end}, Timeout: 30s, Topology: <4111>"))
        assert text.startswith(f"No replica set members {end}")
        assert ("rs.initiate()" in text, "4111" in text) == (True, False)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "redis://:hush'x@h/0",
            "redis://:(hush)x@h",
            "mongodb://u:hush@x@h",
            "redis://:hush/x@h",
            "redis://:1 hush@h",
        ),
        *("mongodb://u:so hush@h/db", "amqp://u:hush%40x@h//", "a=redis://:hush@h,mongodb://u:hush@h"),
        *("http://h/?password=hush&x=1", "host=h password=hush user=u", "password='so hush' user=u", "pwd: hush"),
        *('{"token": "hush"}', "{'api_key': 'so hush'}", "client_secret=hush", "aws_secret_access_key = hush"),
        *("mongodb://h/?authMechanismProperties=AWS_SESSION_TOKEN:hush,x:1", "?tlsCertificateKeyFilePassword=hush"),
        *("Authorization: Bearer hush", "{'Authorization': 'Basic hush'}", "bearer hush0123", "AccountKey=hush;x"),
    ],
)
def test_no_text_shows_a_secret(text: str) -> None:
    """In whatever quotes, brackets and blanks it stands; of errors, causes, tracebacks and spans alike."""
    error = ValueError(f"cannot use {text}")
    error.__cause__ = ConnectionError(text)
    shown = [terse(text), without_credentials(text), short(error), error_text(error), traceback_text(error)]
    assert not any("hush" in each for each in (*shown, *tracing._exception(error).values()))


@pytest.mark.parametrize(
    "text",
    [
        "redis://h:6379 refused, ask ops@example.org",
        "https://h/page and `(@app.task)` or @bridge.on_change",
        "Bearer authentication is required, passwords are 8 characters, if token == 1",
        "password=***, db=shop; resumeToken: {'_data': '82'}",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert terse(text) == text


@pytest.mark.parametrize("text", ["x", "a://", "mongodb://u:hush@h ", "mongodb://u:hush@h\n", "password=hush ", "\n"])
def test_a_long_text_is_cut_before_it_is_redacted(text: str) -> None:
    """Of a long one a worker looks at some kilobytes; where it is cut shows no half of a URL."""
    for shift in range(20):
        error = ValueError("y" * shift + text * (100_000 // len(text)) + "z" * shift)
        for shown in (short(error), error_text(error), format_traceback(error), *tracing._exception(error).values()):
            assert len(shown) <= 16_100
            assert "hush" not in shown
        assert str(format_traceback(error)).strip()


@pytest.mark.parametrize("which", ["client", "stream"])
@pytest.mark.parametrize(("driver", "commands", "after"), [(0, 0, logging.INFO), (10, 0, 0), (0, 10, 10)])
def test_commands_are_logged_for_who_asks_for_them(which: str, driver: int, commands: int, after: int) -> None:
    """At DEBUG they have whole documents, and the signing key. If the app sets up logging, Celery sends no signal."""
    given = {logging.getLogger("pymongo"): driver, logging.getLogger("pymongo.command"): commands}
    levels = {logger: logger.level for logger in given}
    try:
        for logger, level in given.items():
            logger.setLevel(level)
        bridge = Bridge(
            Celery("quiet", broker="memory://", set_as_current=False), "mongodb://127.0.0.1:1", autodiscover=False
        )
        (bridge.client if which == "client" else bridge.wiring.stream_client(1.0)).close()
        assert logging.getLogger("pymongo.command").level == after
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)  # only this forgets what other threads have cached


def test_no_record_has_an_error_as_the_driver_has_it() -> None:
    """Every exception goes through what cuts it; `exc_info` would go past it."""
    raw = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "mongo_celery").rglob("*.py"))
        for call in log_calls(ast.parse(path.read_text(encoding="utf-8")), {*LEVELS, "debug"})
        if _is_raw(call)
    ]
    assert raw == []


def _is_raw(call: ast.Call) -> bool:
    if any(keyword.arg == "exc_info" for keyword in call.keywords) or ast.unparse(call.func).endswith(".exception"):
        return True
    names = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
    return bool(names & {"error", "failure", "exc"}) and event_of(call) not in _OURS
