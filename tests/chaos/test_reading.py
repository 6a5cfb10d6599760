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
_PARTITION = {"committed": 0, "term": 1, "fencingToken": 1, "state": "flowing", "resumeToken": None, "retry": None}


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


FACT: dict[str, Any] = {"handler": "quick", "key": "k", "n": 1, "partition": 2, "seq": 1, "fence": 5}


def test_writes_starts_and_effects() -> None:
    """A sink has the last effect of a partition: each one that differs is an effect."""
    events = Events()
    assert events.put((DATA, "quick"), "k", {"n": 1}) == [Wrote("k", 1, "8201", at(1), "quick")]
    start = {"fact": {**FACT, "retries": 0, "pid": 9}}
    assert events.put((FACTS, "start"), "x", start) == [Started(**FACT, retries=0, pid=9, at=at(2))]
    brought = Brought(("quick", 2), Due("quick", "k", 1), "8201~", at(3))
    assert events.put((FACTS, "brought"), "y", {"fact": FACT, "place": "8201~"}) == [brought]
    assert events.put((DATA, SINK), "quick-2", {"last": FACT}) == [Effect(**FACT, at=at(4))]
    assert events.update((DATA, SINK), "quick-2", {"_fence": {}}) == []
    assert events.update((DATA, SINK), "quick-2", {"last.fence": 6}) == [Effect(**{**FACT, "fence": 6}, at=at(6))]


def test_a_transaction_that_is_repeated_is_one_start() -> None:
    """The driver repeats its body within one execution."""
    events, fact = Events(), {**FACT, "handler": "together", "retries": 0, "pid": 9}
    facts = [events.put((FACTS, "start"), "x", {"fact": {**fact, "fence": fence}}) for fence in (5, 5, 6)]
    assert [len(each) for each in facts] == [1, 0, 1]


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


def test_a_dead_letter_sets_its_change_aside_once() -> None:
    """Whoever changes the letter later sets nothing aside."""
    events, letters = Events(), (STATE, "dead_letters")
    events.put((DATA, "letters"), "k", {"n": 1})
    letter = {"handler": "letters", "resumeToken": {"_data": "8201"}}
    assert events.put(letters, "chaos/letters/8201", letter) == [SetAside(Due("letters", "k", 1))]
    assert events.update(letters, "chaos/letters/8201", {"at": 1}) == []


def test_the_letters_of_a_parked_key() -> None:
    """They wait, until they go."""
    events = Events()
    events.put((DATA, "parking"), "k", {"n": 1})
    letter = {"handler": "parking", "resumeToken": {"_data": "8201"}, "parked": 5}
    assert events.put((STATE, "dead_letters"), "chaos/parking/8201", letter) == [Parked(Due("parking", "k", 1))]
    assert events.update((STATE, "dead_letters"), "chaos/parking/8201", {"replays": 1}) == []
    assert events.put((STATE, "dead_letters"), "chaos/parking/8201", None) == [Let(Due("parking", "k", 1))]


def test_a_term_is_taken_and_not_extended() -> None:
    """A free lease leads nobody, and a renewal is no new term."""
    events, lease = Events(), (STATE, "leases")
    assert events.put(lease, "chaos", {"listenerId": None, "term": 1, "expiresAt": None}) == []
    assert events.update(lease, "chaos", {"listenerId": "a", "term": 2}) == [Led("a", 2, at(2))]
    assert events.update(lease, "chaos", {"expiresAt": _START}) == []
