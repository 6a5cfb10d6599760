"""A small message at the broker that many read, and anybody may spoil."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from mongo_celery.broker.notice import NoticeBoard

NAME = "shop.leader"


@pytest.fixture(params=["", "prefix:"], ids=["plain", "with a global_keyprefix"])
def prefix(request: pytest.FixtureRequest) -> str:
    """Give the prefix of all keys."""
    return str(request.param)


def board(url: str, prefix: str = "") -> NoticeBoard:
    app = Celery("board", broker=url, broker_transport_options={"global_keyprefix": prefix} if prefix else {})
    return NoticeBoard(app, NAME, 5)


def test_a_notice_is_taken_once_and_nothing_else_is_left(redis_url: str, redis_client: Any, prefix: str) -> None:
    """Neither bindings nor unacknowledged messages; by itself it does not stay for ever."""
    one, two = board(redis_url, prefix), board(redis_url, prefix)
    assert one.is_possible
    assert one.take() == []
    one.put({"n": 1})
    two.put({"n": 2})
    assert redis_client.keys() == [f"{prefix}{NAME}".encode()]
    assert 0 < redis_client.ttl(f"{prefix}{NAME}") <= 60
    assert two.take() == [{"n": 1}, {"n": 2}]
    assert one.take() == []
    assert redis_client.keys() == []
    one.close()
    two.close()


def test_what_is_no_notice_is_thrown_away(redis_url: str, redis_client: Any) -> None:
    """And what cannot even be read harms one call."""
    reader, app = board(redis_url), Celery("other", broker=redis_url)
    with app.connection_for_write() as connection:
        producer = connection.Producer()
        for body, kind in (
            ("[1]", "application/json"),
            ("{", "application/json"),
            ("[" * 4000, "application/json"),
            (json.dumps({"long": "x" * 5000}), "application/json"),
            ("{}", "application/x-python-serialize"),
            (json.dumps({"good": 1}), "application/json"),
        ):
            producer.publish(body, routing_key=NAME, content_type=kind, content_encoding="utf-8")
    assert reader.take() == [{"good": 1}]
    redis_client.lpush(NAME, "no message")
    with pytest.raises(ValueError, match="Expecting value"):
        reader.take()
    reader.close()
    assert reader.take() == []
    for number in range(20):
        reader.put({"n": number})
    assert len(reader.take()) == 8
    assert redis_client.keys() == []
    reader.close()
