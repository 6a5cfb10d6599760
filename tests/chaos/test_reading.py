"""From events to facts, with events made by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from tests.chaos.facts import Brought, Changed, Charged, Let, Parked, Waited
from tests.chaos.reading import Reading
from tests.chaos.setting import DATA, FACTS, SINK, STATE
from tests.rig.history import Due, Effect, Led, SetAside, Started, Wrote

_START = datetime(2025, 1, 1, tzinfo=UTC)
_PARTITION = {
    "committed": 0,
    "term": 1,
    "fencingToken": 1,
    "state": "flowing",
    "resumeToken": None,
    "retry": None,
}


class Events:
    """Feeds a reading; the second of each event is its number."""

    def __init__(self) -> None:
        self.reading = Reading()
        self._numbers = count(1)

    def put(self, where: tuple[str, str], key: str, document: dict[str, Any] | None, **more: Any) -> list[Any]:
        """An insert or, without a document, a delete."""
        event: dict[str, Any] = {"operationType": "insert" if document is not None else "delete"}
        if document is not None:
            event["fullDocument"] = {"_id": key, **document}
        return self.take(where, key, event, **more)

    def update(self, where: tuple[str, str], key: str, fields: dict[str, Any], **more: Any) -> list[Any]:
        """An update that sets fields."""
        described = {"updatedFields": fields, "removedFields": []}
        return self.take(where, key, {"operationType": "update", "updateDescription": described}, **more)

    def take(self, where: tuple[str, str], key: str, event: dict[str, Any], **more: Any) -> list[Any]:
        number = next(self._numbers)
        common = {
            "_id": {"_data": f"82{number:02}"},
            "ns": {"db": where[0], "coll": where[1]},
            "documentKey": {"_id": key},
            "wallTime": _START + timedelta(seconds=number),
        }
        return self.reading.take({**common, **event, **more})


def at(number: int) -> float:
    return _START.timestamp() + number


def test_writes_starts_and_effects() -> None:
    """A sink has the last effect of a partition: each one that differs is an effect."""
    events = Events()
    assert events.put((DATA, "quick"), "k", {"n": 1}) == [Wrote("k", 1, "8201", at(1), "quick")]
    fact: dict[str, Any] = {"handler": "quick", "key": "k", "n": 1, "partition": 2, "seq": 1, "fence": 5}
    assert events.put((FACTS, "start"), "x", {"fact": {**fact, "retries": 0, "pid": 9}}) == [
        Started(**fact, retries=0, pid=9, at=at(2))
    ]
    assert events.put((FACTS, "brought"), "y", {"fact": fact, "place": "8201~"}) == [
        Brought(("quick", 2), Due("quick", "k", 1), "8201~", at(3))
    ]
    assert events.put((DATA, SINK), "quick-2", {"last": fact}) == [Effect(**fact, at=at(4))]
    assert events.update((DATA, SINK), "quick-2", {"_fence": {}}) == []
    assert events.update((DATA, SINK), "quick-2", {"last.fence": 6}) == [Effect(**{**fact, "fence": 6}, at=at(6))]


def test_a_transaction_that_is_repeated_is_one_start() -> None:
    """The driver repeats its body within one execution."""
    events = Events()
    fact: dict[str, Any] = {
        "handler": "together",
        "key": "k",
        "n": 1,
        "partition": 2,
        "seq": 1,
        "fence": 5,
        "retries": 0,
        "pid": 9,
    }
    assert len(events.put((FACTS, "start"), "x", {"fact": fact})) == 1
    assert events.put((FACTS, "start"), "y", {"fact": fact}) == []
    assert len(events.put((FACTS, "start"), "z", {"fact": {**fact, "fence": 6}})) == 1


def test_a_partition_from_event_to_event() -> None:
    """Counts and state; and what a person has skipped."""
    events, where = Events(), "chaos/quick/0/3"
    events.put((DATA, "quick"), "k", {"n": 1})
    assert events.put((STATE, "partitions"), where, _PARTITION) == []
    assert events.update((STATE, "partitions"), where, {"claim": {"owner": "o"}}) == []
    charged = {"retry": {"count": 1, "crashes": 2}}
    assert events.update((STATE, "partitions"), where, charged) == [Charged(("quick", 3), "", 1, 2, at(4))]
    assert events.update((STATE, "partitions"), where, {"retry.crashes": 1}) == []
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


def test_a_dead_letter_stands_before_the_position_that_passes_it() -> None:
    """They are one transaction, in which the position is written first."""
    events, where = Events(), "chaos/letters/0/3"
    events.put((DATA, "letters"), "k", {"n": 1})
    events.put((STATE, "partitions"), where, _PARTITION)
    both = {"txnNumber": 7, "lsid": {"id": b"1"}}
    letter = {"handler": "letters", "resumeToken": {"_data": "8201"}}
    assert events.update((STATE, "partitions"), where, {"committed": 1, "resumeToken": {"_data": "8201"}}, **both) == []
    assert events.put((STATE, "dead_letters"), "chaos/letters/8201", letter, **both) == []
    assert events.update((STATE, "dead_letters"), "chaos/letters/8201", {"at": 1}, **both) == []
    facts = events.put((DATA, "letters"), "l", {"n": 1})
    assert [type(fact) for fact in facts] == [SetAside, Wrote]
    assert facts[0] == SetAside(Due("letters", "k", 1))


def test_the_letters_of_a_parked_key() -> None:
    """They wait, until they go."""
    events = Events()
    events.put((DATA, "parking"), "k", {"n": 1})
    letter = {"handler": "parking", "resumeToken": {"_data": "8201"}, "parked": 5}
    assert events.put((STATE, "dead_letters"), "chaos/parking/8201", letter) == [Parked(Due("parking", "k", 1))]
    assert events.update((STATE, "dead_letters"), "chaos/parking/8201", {"replays": 1}) == []
    assert events.put((STATE, "dead_letters"), "chaos/parking/8201", None) == [Let(Due("parking", "k", 1))]


def test_the_lease() -> None:
    """Who took it."""
    events = Events()
    free = {"listenerId": None, "term": 1, "expiresAt": None}
    assert events.put((STATE, "leases"), "chaos", free) == []
    taken = {"listenerId": "a", "term": 2, "expiresAt": _START + timedelta(seconds=9)}
    assert events.update((STATE, "leases"), "chaos", taken) == [Led("a", 2, at(2))]
    assert events.update((STATE, "leases"), "chaos", {"expiresAt": _START + timedelta(seconds=8)}) == []
    taken = {"listenerId": "b", "term": 3, "expiresAt": _START + timedelta(seconds=20)}
    assert events.update((STATE, "leases"), "chaos", taken) == [Led("b", 3, at(4))]
