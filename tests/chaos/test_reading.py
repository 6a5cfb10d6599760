"""From events to facts, with events made by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from tests.chaos.facts import Changed, Charged, Waited
from tests.chaos.reading import Reading
from tests.chaos.setting import DATA, STATE
from tests.rig.history import Due, SetAside

_START = datetime(2025, 1, 1, tzinfo=UTC)
_PARTITION = {"committed": 0, "term": 1, "fencingToken": 1, "state": "flowing", "resumeToken": None, "retry": None}


class Events:
    """Feeds a reading; the second of each event is its number."""

    def __init__(self) -> None:
        self.reading = Reading()
        self._numbers = count(1)

    def put(self, where: tuple[str, str], key: str, document: dict[str, Any]) -> list[Any]:
        return self._take(where, key, {"operationType": "insert", "fullDocument": {"_id": key, **document}})

    def update(self, where: tuple[str, str], key: str, fields: dict[str, Any]) -> list[Any]:
        described = {"updatedFields": fields, "removedFields": []}
        return self._take(where, key, {"operationType": "update", "updateDescription": described})

    def _take(self, where: tuple[str, str], key: str, event: dict[str, Any]) -> list[Any]:
        number = next(self._numbers)
        common = {
            "_id": {"_data": f"82{number:02}"},
            "ns": {"db": where[0], "coll": where[1]},
            "documentKey": {"_id": key},
            "wallTime": _START + timedelta(seconds=number),
        }
        return self.reading.take({**common, **event})


def at(number: int) -> float:
    return _START.timestamp() + number


def test_a_partition_from_event_to_event() -> None:
    """Counts and state; and what a person has skipped."""
    events, where = Events(), "chaos/quick/0/3"
    events.put((DATA, "quick"), "k", {"n": 1})
    assert events.put((STATE, "partitions"), where, _PARTITION) == []
    assert events.update((STATE, "partitions"), where, {"claim": {"owner": "o"}}) == []
    retried, crashed = {"retry": {"count": 1, "crashes": 0}}, {"retry.crashes": 2}
    assert events.update((STATE, "partitions"), where, retried) == [Charged(("quick", 3), "", 1, 0, at(4))]
    assert events.update((STATE, "partitions"), where, crashed) == [Charged(("quick", 3), "", 1, 2, at(5))]
    halted = {"state": "halted", "halted": {"resumeToken": {"_data": "8201"}}}
    assert events.update((STATE, "partitions"), where, halted) == [Changed(("quick", 3), "halted", "8201", at(6))]
    skipped = {"state": "flowing", "halted": None, "committed": 1, "resumeToken": {"_data": "8201"}}
    assert events.update((STATE, "partitions"), where, skipped) == [
        SetAside(Due("quick", "k", 1)),
        Changed(("quick", 3), "flowing", "", at(7)),
    ]
    for number, waits, is_new in ((8, 1, True), (9, 2, True), (10, 2, False)):
        waiting = {"retry.waiting": {"count": waits, "cause": str(number)}}
        assert events.update((STATE, "partitions"), where, waiting) == [Waited(("quick", 3), at(number))] * is_new
