"""What is written down of errors: name, code and sentence, and neither documents nor credentials."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pymongo.errors import BulkWriteError, OperationFailure, ServerSelectionTimeoutError

from mongo_celery.bridge.error_text import error_text, traceback_text
from mongo_celery.mongo.redaction import short, terse, without_credentials
from mongo_celery.mongo.verdicts import brief
from tests.unit.test_log_events import LEVELS, ROOT, _event_of, _log_calls

_URL = "mongodb://shop:pass-w0rd@db1/?replicaSet=rs0"
_DOCUMENT = {"card": "4111"}
_OURS = {"horizon_unseen", "decision_refused", "configuration_refused", "listener_failed"}
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
    """A missing right is named as such."""
    assert brief(DUPLICATE) == "DuplicateKey, code 11000: E11000 duplicate key"
    assert brief(REFUSED) == "Unauthorized, code 13: the MongoDB user lacks update on shop.orders"
    assert error_text(DUPLICATE) == "OperationFailure: DuplicateKey, code 11000: E11000 duplicate key"
    bulk = BulkWriteError({"writeErrors": [{"code": 11000, "errmsg": "E11000 duplicate key", "op": _DOCUMENT}] * 3})
    assert brief(bulk) == "DuplicateKey, code 11000: E11000 duplicate key (and 2 more)"
    assert brief(AWAY) == "ServerSelectionTimeoutError: db1:27017: timed out"


def test_errors_of_handlers_show_no_credentials_of_urls() -> None:
    """In the message, in the traceback and in what it was raised from; an address of a person stays."""
    cause = ConnectionError(f"cannot reach {_URL}")
    error = ValueError(f"no mail to ann@example.org: {_URL}")
    error.__cause__ = cause
    for text in (error_text(error), traceback_text(error), terse(str(error))):
        assert "pass-w0rd" not in text
        assert "ann@example.org" in text
    assert "mongodb://***@db1/" in error_text(error)
    assert "cannot reach" in traceback_text(error)


def test_no_record_has_an_error_as_the_driver_has_it() -> None:
    """Every exception goes through what cuts it; `exc_info` would go past it."""
    raw = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in _sources()
        for call in _log_calls(ast.parse(path.read_text(encoding="utf-8")), {*LEVELS, "debug"})
        if _is_raw(call)
    ]
    assert raw == []


def _sources() -> list[Path]:
    return sorted((ROOT / "mongo_celery").rglob("*.py"))


def _is_raw(call: ast.Call) -> bool:
    """Whether it is handed a name that exceptions have, or a traceback."""
    if any(keyword.arg == "exc_info" for keyword in call.keywords) or ast.unparse(call.func).endswith(".exception"):
        return True
    names = {argument.id for argument in call.args if isinstance(argument, ast.Name)}
    return bool(names & {"error", "failure", "exc"}) and _event_of(call) not in _OURS


def test_a_decorator_that_a_sentence_names_is_no_password() -> None:
    """Nothing stands before its `@`. Of a URL that was cut in pieces what does stand there goes."""
    sentence = "import the module with the @bridge.on_change functions, or `(@app.task)`"
    assert short(ValueError(sentence)) == sentence
    assert without_credentials("':p@ss-w0rd@db1' and mongodb://@db1") == "'***@db1' and mongodb://***@db1"
