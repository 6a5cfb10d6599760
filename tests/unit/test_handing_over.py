"""What a reader has read goes to the listener some at a time: in order, whole, and no more than there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bson
from bson import ObjectId, Timestamp
from bson.raw_bson import RawBSONDocument
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Item, credit_cost
from mongo_celery.bridge.stream.reader import StreamReader
from mongo_celery.bridge.stream.source import Scope
from tests.fixtures.samples import token_data

MOST = 64


def document(number: int, size: int = 0, **fields: Any) -> RawBSONDocument:
    """An event as the driver gives it."""
    whole = {
        "_id": {"_data": token_data(number)},
        "operationType": "insert",
        "clusterTime": Timestamp(1000, number),
        "fullDocument": {"_id": number, "text": "x" * size},
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": ObjectId(number.to_bytes(12, "big"))},
        **fields,
    }
    return RawBSONDocument(bson.encode({name: value for name, value in whole.items() if value is not None}))


class Taker:
    """Takes what a reader hands over, and lets it go on at once."""

    def __init__(self, room: int) -> None:
        self.together: list[Sequence[Item]] = []
        self.most = 0
        self.reader = StreamReader(
            _no_client, Scope("shop", None, (), {}), Position(None, None), deliver=self._take, room=room
        )

    def _take(self, items: Sequence[Item]) -> None:
        self.together.append(items)
        self.most = max(self.most, sum(map(credit_cost, items[:-1])))
        self.reader.grant_credit(items)

    @property
    def numbers(self) -> list[int]:
        """Increments of the cluster times of all that was taken, in order."""
        events = [item for items in self.together for item in items]
        assert all(isinstance(each, ChangeEvent) for each in events)
        return [each.mark.cluster_time.inc for each in events]  # type: ignore[union-attr]


def _no_client(_timeout: float) -> Any:
    raise NotImplementedError


@given(st.lists(st.sampled_from([0, 0, 0, 40_000, 200_000]), min_size=1, max_size=150), st.integers(1, 100))
def test_all_of_a_batch_arrives_in_order_as_there_is_room(sizes: list[int], room: int) -> None:
    """P1: whatever its events weigh; one more than there is room for, at most, as if they came one by one."""
    taker = Taker(room)
    taker.reader._hand_over([document(number, size) for number, size in enumerate(sizes, start=1)])
    assert taker.numbers == list(range(1, len(sizes) + 1))
    assert all(0 < len(items) <= MOST for items in taker.together)
    assert taker.most < room
    assert taker.reader._attempt.has_progress
    assert taker.reader._position == Position({"_data": token_data(len(sizes))}, Timestamp(1000, len(sizes)))


def test_small_events_do_not_come_one_by_one() -> None:
    """Which is what it is for."""
    taker = Taker(2000)
    taker.reader._hand_over([document(number) for number in range(1, 130)])
    assert [len(items) for items in taker.together] == [MOST, MOST, 1]


def test_a_reader_that_was_stopped_hands_over_nothing_more() -> None:
    """What is not handed over is not remembered either: the next one reads it."""
    taker = Taker(2000)
    taker.reader._hand_over([document(1)])
    taker.reader.stop()
    taker.reader._hand_over([document(number) for number in range(2, 200)])
    assert taker.numbers == [1]
    assert taker.reader._position.token == {"_data": token_data(1)}


def test_a_time_that_is_none_is_told_from_the_token() -> None:
    """P2: a user's pipeline may put anything there."""
    taker = Taker(2000)
    odd = [document(1), document(2, clusterTime="noon"), document(3, clusterTime=None)]
    taker.reader._hand_over(odd)
    assert taker.numbers == [1, 2, 3]
