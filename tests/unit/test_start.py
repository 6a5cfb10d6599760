"""Where a stream starts: the times in options and in resume tokens."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from bson import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from pymongo import MongoClient

from mongo_celery.bridge.listener.starts import start_time
from mongo_celery.mongo.oplog import time_of_token

FALLBACK = Timestamp(1, 1)
WORD = st.integers(0, 2**32 - 1)


def test_a_token_of_a_server_holds_its_cluster_time() -> None:
    """Taken from MongoDB 6.0: a post-batch token, which has its time nowhere else."""
    token = {"_data": "8265E0B5C5000000022B0229296E04"}
    assert time_of_token(token, None) == Timestamp(0x65E0B5C5, 2)


@pytest.mark.parametrize(
    "data", ["", "82", "8265E0B5C500000", "8365E0B5C500000002", "not a token at all", "82zzzzzzzzzzzzzzzz", "é" * 20]
)
def test_a_token_of_another_format_gives_the_earlier_time(data: str) -> None:
    """P1: reopening at an earlier time repeats changes, and loses none."""
    assert time_of_token({"_data": data}, FALLBACK) == FALLBACK
    assert time_of_token({"_data": data}, None) is None


@given(st.tuples(WORD, WORD), st.tuples(WORD, WORD))
def test_times_and_tokens_are_in_the_same_order(first: tuple[int, int], second: tuple[int, int]) -> None:
    """P4: positions are compared by tokens, streams are opened by times."""
    one, two = (f"82{seconds:08X}{increment:08X}" for seconds, increment in (first, second))
    times = [time_of_token({"_data": data}, None) for data in (one, two)]
    assert (one < two) == (first < second)
    assert times == [Timestamp(*first), Timestamp(*second)]


def test_a_start_that_is_a_time_asks_no_server() -> None:
    """A datetime counts in UTC, from the beginning of its second."""
    with MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False) as client:
        assert start_time(client, Timestamp(5, 6)) == Timestamp(5, 6)
        here = datetime(2024, 1, 1, 5, tzinfo=timezone(timedelta(hours=5)))
        assert start_time(client, here) == Timestamp(datetime(2024, 1, 1, tzinfo=UTC), 0)
        late_in_its_second = datetime(2024, 1, 1, 0, 0, 0, 999_999, tzinfo=UTC)
        assert start_time(client, late_in_its_second) == Timestamp(datetime(2024, 1, 1, tzinfo=UTC), 0)
