"""What users can put into the state is bounded when it is written, and read whatever it is (I5)."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from mongo_celery.bridge.worker.outcome import retry_time
from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.expressions import LONGEST_SECONDS
from tests.rig.changes import token
from tests.rig.partition import PartitionRig, make_partition

Document = dict[str, Any]

# ruff: noqa: DTZ001 - users write times without a zone

WEST, EAST = timezone(timedelta(hours=-12)), timezone(timedelta(hours=14))


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> PartitionRig:
    """Give one partition that flows and that nobody has claimed."""
    return make_partition(mongo_client, state_database)


@pytest.mark.parametrize(
    "when",
    [
        1.7e12,
        math.inf,
        10**40,
        datetime(9999, 12, 31),
        datetime.max.replace(tzinfo=WEST),
        datetime(9999, 1, 1, tzinfo=EAST),
    ],
)
def test_a_retry_beyond_all_bounds_can_be_read_and_undone(rig: PartitionRig, when: Any) -> None:
    """Listener and commands go on; `retry` ends the wait."""
    claim = rig.claim()
    not_before, delay = retry_time(when)
    assert rig.claims.park(claim, not_before=not_before, delay=delay, error="as asked")
    (image,) = rig.partitions.look([rig.where])
    assert image.parked
    assert 0.9 * LONGEST_SECONDS < image.due_in <= LONGEST_SECONDS
    assert rig.document["retry"]["notBefore"].year < 2300
    assert rig.partitions.retry(image)
    assert rig.try_claim(owner="again") is not None


@pytest.mark.parametrize(
    "when", [None, 0, -1e300, -math.inf, datetime(1, 1, 1), datetime.min.replace(tzinfo=EAST), datetime(1969, 1, 1)]
)
def test_a_retry_before_now_is_due(rig: PartitionRig, when: Any) -> None:
    """Also one before the epoch."""
    claim = rig.claim()
    not_before, delay = retry_time(when)
    assert rig.claims.park(claim, not_before=not_before, delay=delay, error="as asked")
    assert not rig.image.parked
    assert rig.try_claim(owner="again") is not None


@pytest.mark.parametrize("when", [math.nan, "tomorrow", timedelta(days=1), [1], {"a": 1}], ids=repr)
def test_what_is_no_time_is_an_error_of_the_handler(when: Any) -> None:
    """It goes to the failure policy; else the execution would end without an outcome, again and again."""
    with pytest.raises(HandlerUsageError, match="number of seconds or a datetime"):
        retry_time(when)


def test_text_that_is_no_utf8_in_the_state_ends_nobody(rig: PartitionRig) -> None:
    """Tokens carry the `_id` of documents, and old versions have stored what they were given."""
    raw = bson.encode({"$set": {"retry": {"error": "bad ????"}, "halted": {"resumeToken": token(1), "key": "????"}}})
    rig.documents.update_one({"_id": rig.where}, RawBSONDocument(raw.replace(b"????", b"\xff\xfe\x80\xff")))
    assert rig.image.error == "bad ����"
