"""What a reader has read goes to the listener some at a time: in order, and whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bson
from bson import ObjectId, Timestamp
from bson.raw_bson import RawBSONDocument
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Item
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

    def __init__(self) -> None:
        self.together: list[Sequence[Item]] = []
        self.reader = StreamReader(
            _no_client, Scope("shop", None, (), {}), Position(None, None), deliver=self.together.append
        )

    @property
    def events(self) -> list[ChangeEvent]:
        return [item for items in self.together for item in items if isinstance(item, ChangeEvent)]

    @property
    def numbers(self) -> list[int]:
        """Increments of the cluster times of all that was taken, in order."""
        return [each.mark.cluster_time.inc for each in self.events if each.mark.cluster_time is not None]

    @property
    def weights(self) -> list[int]:
        """That of each batch, without its last event."""
        return [
            sum(1 + len(each.raw) // 32_768 for each in items[:-1] if isinstance(each, ChangeEvent))
            for items in self.together
        ]


def _no_client(_timeout: float) -> Any:
    raise AssertionError("no event of these tests is read again")


@given(st.lists(st.sampled_from([0, 0, 0, 40_000, 200_000]), min_size=1, max_size=150))
def test_all_of_a_batch_arrives_in_order_in_parts(sizes: list[int]) -> None:
    """P1: whatever its events weigh."""
    taker = Taker()
    taker.reader._hand_over([document(number, size) for number, size in enumerate(sizes, start=1)])
    assert taker.numbers == list(range(1, len(sizes) + 1))
    assert all(0 < len(items) <= MOST for items in taker.together)
    assert max(taker.weights) < MOST
    assert taker.reader._attempt.has_progress
    assert taker.reader._position == Position({"_data": token_data(len(sizes))}, Timestamp(1000, len(sizes)))


def test_a_reader_that_was_stopped_hands_over_nothing_more() -> None:
    """What is not handed over is not remembered either: the next one reads it."""
    taker = Taker()
    taker.reader._hand_over([document(1)])
    taker.reader.stop()
    taker.reader._hand_over([document(number) for number in range(2, 200)])
    assert taker.numbers == [1]
    assert taker.reader._position.token == {"_data": token_data(1)}
