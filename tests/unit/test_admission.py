"""What a subscription owes of an event, and why it is refused; whatever happens, nothing is raised (P12)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import bson
import pytest

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.existing import token_place
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import Partitioner, document_hash, partition_hash, partitioner
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.bridge.stream.items import ChangeEvent, ReadError
from mongo_celery.bridge.stream.source import Selector, Source
from mongo_celery.bridge.window import Refusal
from tests.fixtures.samples import event, mark

PARTITIONS = 8
LAYOUT = Layout(3, PARTITIONS, "blake2b-64:_id")
MATCH = {"$eq": ["$fullDocument.n", 1]}


class UnspeakableError(Exception):
    """Cannot say its words."""

    def __str__(self) -> str:
        raise RuntimeError


def region(change: Mapping[str, Any]) -> Any:
    return change["documentKey"]["region"]


def unspeakable(_change: Mapping[str, Any]) -> Any:
    raise UnspeakableError


def bottomless(_change: Mapping[str, Any]) -> Any:
    found: list[Any] = []
    found.append(found)
    return found


def admission(rule: Any = None, undeliverable: Mapping[str, int] | None = None, **filters: Any) -> Admission:
    selector = Selector("summarise", (Source("shop", "orders"),), Filter(**filters))
    made = rule if isinstance(rule, Partitioner) else partitioner(rule, None, None)
    return Admission(selector, made, LAYOUT, undeliverable or {})


def read(number: int = 1, error: ReadError | None = None, /, without: str = "", **fields: Any) -> ChangeEvent:
    document = event(fields.pop("operation", "insert"), **fields)
    document.pop(without, None)
    raw = bson.encode(document)
    return ChangeEvent(mark(number), wrap_event(raw), raw, error)


def refusal(one: Admission, event: ChangeEvent) -> Refusal:
    change = one.admit(event)
    assert change is not None
    assert change.refusal is not None
    return change.refusal


@pytest.mark.parametrize("rule", [region, unspeakable, bottomless])
def test_a_rule_that_fails_refuses_one_change_in_the_partition_of_its_document(rule: Any) -> None:
    """P12: whatever a function raises or returns."""
    change = admission(rule).admit(read())
    assert change is not None
    assert change.index == document_hash(read().document) % PARTITIONS
    assert change.refusal is not None
    assert not change.refusal.halts
    assert refusal(admission(), read(operationType=["insert"])).halts


def test_an_event_with_a_read_error_is_refused_for_those_whom_it_may_concern() -> None:
    """The reader has read it with less."""
    error = ReadError("it is larger than 16 MB")
    assert refusal(admission(match=MATCH), read(1, error)) == Refusal("it is larger than 16 MB", lasts=True)
    assert admission().admit(read(1, error, ns={"db": "shop", "coll": "other"})) is None
    assert admission().admit(read(1, error, operation="drop")) is None
    assert admission(match=MATCH).admit(read(1, error, _mongoCelery={"summarise": False})) is None
    assert refusal(admission(match=MATCH), read(1, error, _mongoCelery={"summarise": True})).reason == error.sentence
    change = admission(region).admit(read(1, error, documentKey={"_id": 1, "region": "eu"}))
    assert change is not None
    assert change.index == document_hash(read().document) % PARTITIONS  # a rule might see too little


def test_a_match_that_fails_concerns_its_handler_alone() -> None:
    """The event is whole, so it stands where its key says; it has the flags of the `match`es that did not fail."""
    error = ReadError("match fails on it", only_match=True)
    change = admission(region, match=MATCH).admit(read(1, error, documentKey={"_id": 1, "region": "eu"}))
    assert change is not None
    assert (change.refusal, change.index) == (
        Refusal("match fails on it", lasts=True),
        partition_hash("eu") % PARTITIONS,
    )
    for innocent in (admission(), admission(match=MATCH)):
        change = innocent.admit(read(1, error, _mongoCelery={"summarise": True}))
        assert change is not None
        assert change.refusal is None
    assert admission(match=MATCH).admit(read(1, error, _mongoCelery={"summarise": False})) is None
    assert refusal(admission(match=MATCH), read(1, error, _mongoCelery={"other": True})).reason == "match fails on it"
    assert admission(match=MATCH).admit(read(1, error, ns={"db": "shop", "coll": "other"})) is None


def test_an_undeliverable_change_that_is_read_again_goes_where_it_is_stored() -> None:
    """P1: by the corrected key it would count as done, where later changes have been committed."""
    change = admission(region).admit(read(1))
    assert change is not None
    corrected = Partitioner("r", lambda _event: "one")
    again = admission(corrected, {token_place(change.data): change.index}).admit(read(1))
    assert again is not None
    assert (again.index, again.refusal) == (change.index, None)
    other = admission(corrected, {token_place(change.data): change.index}).admit(read(2))
    assert other is not None
    assert other.index == partition_hash("one") % PARTITIONS


@pytest.mark.parametrize(
    ("rule", "before", "is_refused"),
    [
        (None, Refusal("no key"), False),
        (region, Refusal("another rule failed"), True),
        (None, Refusal("read with less", lasts=True), True),
        (None, Refusal("damaged", halts=True), True),
    ],
    ids=["fixed", "not fixed", "read with less", "without its bytes"],
)
def test_a_stored_change_is_judged_again_by_its_bytes(rule: Any, before: Refusal, is_refused: bool) -> None:
    """P16: by the present code. A change that was read with less stays undeliverable."""
    raw = b"" if before.halts else read(1).raw
    stored = StoredChange(mark(1).data, raw, 7, before, {"_data": mark(1).data})
    found = admission(rule).judge_again(stored)
    assert (found.data, found.hash, found.raw) == (stored.data, 7, raw)
    assert (found.refusal is not None) is is_refused


def test_refusals_are_loud_without_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    one = admission(region)
    for number in range(1, 100):
        change = one.admit(read(number))
        assert change is not None
        one.report(change)
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
