"""What is concluded from what a server shows of its open transactions, and what is remembered of it."""

from __future__ import annotations

import gc
import logging
import threading
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.locking import holders
from mongo_celery.locking.holders import _Clients, _seen_by
from mongo_celery.locking.plans import carried_out
from mongo_celery.locking.watches import Watch, _watches, watch_of

Found = dict[str, Any]

HOLDER: Found = {"host": "a", "client": "10.0.0.1:5000", "connectionId": 7, "appName": "shop 1", "driver": "PyMongo"}


def connection(**changes: object) -> Found:
    return {**HOLDER, "type": "op", **changes}


@pytest.mark.parametrize(
    ("there", "transaction", "expected"),
    [
        ([connection()], {}, True),
        ([connection(connectionId=8)], {}, True),
        ([connection(connectionId=8, client="10.0.0.1:5001")], {}, True),
        ([], {}, False),
        ([connection(connectionId=8, client="10.0.0.2:5000")], {}, False),
        ([connection(connectionId=8, appName="shop 2")], {}, False),
        ([connection(host="b")], {}, False),
        ([connection(type="idleSession")], {}, False),
        ([], {"connectionId": 0}, None),
        ([], {"connectionId": None}, None),
        ([], {"driver": "MongoDB Internal Client"}, None),
        ([], {"router": "m:27017"}, None),
    ],
)
def test_a_client_is_there_while_a_connection_is_that_may_be_its(
    there: list[Found], transaction: Found, expected: bool | None
) -> None:
    """On the same server, from the same address, with the same appName; a server's own connections say nothing."""
    assert _Clients(there).have({**HOLDER, **transaction}) is expected


def test_silence_is_what_has_not_moved_between_two_looks() -> None:
    """From the end of the first to the begin of the second, since answers are of some moment between."""
    watch = Watch()
    assert watch.silences([("x", 5, False), ("y", 5, False)], 10, 11) == {"x": 0, "y": 0}
    assert watch.silences([("x", 5, False), ("y", 6, False)], 20, 21) == {"x": 9, "y": 0}
    assert watch.silences([("x", 5, True), ("y", 6, False)], 30, 31) == {"x": 0, "y": 9}
    assert watch.silences([("x", 5, False)], 40, 41) == {"x": 9}
    assert watch.silences([("y", 6, False)], 50, 51) == {"y": 0}, "what was away is new"


def test_clients_of_different_users_share_nothing_and_are_forgotten() -> None:
    """PyMongo's clients are equal where their servers are."""
    one: MongoClient[Found] = MongoClient("mongodb://u1:p@localhost:1", connect=False)
    other: MongoClient[Found] = MongoClient("mongodb://u2:q@localhost:1", connect=False)
    assert one == other
    assert watch_of(one) is watch_of(one)
    assert watch_of(one) is not watch_of(other)
    known = id(other)
    other.close()
    del other
    gc.collect()
    assert known not in _watches


def test_a_server_that_does_not_answer_is_not_asked_at_each_refusal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a process says so once for everybody to see."""
    monkeypatch.setattr(holders, "_reported", threading.Event())
    monkeypatch.setattr(holders, "ANSWER_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "mongo_celery.locking"):
        for _ in range(2):
            with MongoClient[Found]("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=1) as away:
                assert carried_out(_seen_by(away)) == []
                until, _ = watch_of(away).told
                assert carried_out(_seen_by(away)) == []
                assert watch_of(away).told[0] == until
    assert [each.__dict__["event"] for each in caplog.records] == ["holders_unknown"]
