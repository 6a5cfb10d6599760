"""What a subscription owes of an event, and why it is refused; whatever happens, nothing is raised (P12)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
import pytest

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import document_hash, partition_hash, partitioner
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


def region(change: Mapping[str, Any]) -> Any:
    return change["documentKey"]["region"]


def admission(rule: Any = None, **filters: Any) -> Admission:
    selector = Selector("summarise", (Source("shop", "orders"),), Filter(**filters))
    return Admission(selector, partitioner(rule, None, None), LAYOUT, {})


def read(number: int = 1, error: ReadError | None = None, /, **fields: Any) -> ChangeEvent:
    raw = bson.encode(event(fields.pop("operation", "insert"), **fields))
    return ChangeEvent(mark(number), wrap_event(raw), raw, error)


def refusal(one: Admission, event: ChangeEvent) -> Refusal:
    change = one.admit(event)
    assert change is not None
    assert change.refusal is not None
    return change.refusal


def test_an_event_with_a_read_error_is_refused_for_those_whom_it_may_concern() -> None:
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


@pytest.mark.parametrize("before", [Refusal("read with less", lasts=True), Refusal("damaged", halts=True)])
def test_a_change_without_all_of_its_bytes_stays_undeliverable(before: Refusal) -> None:
    """P16: also when the present code would take it."""
    stored = StoredChange(mark(1).data, b"" if before.halts else read(1).raw, 7, before)
    assert admission().judge_again(stored) is stored


@pytest.mark.parametrize(
    ("flags", "is_delivered"),
    [({}, True), ({"_mongoCelery": {"other": False}}, True), ({"_mongoCelery": {"summarise": False}}, False)],
    ids=["none", "of another handler", "its own"],
)
def test_an_undeliverable_change_from_before_a_match_is_owed_as_when_it_was_read(
    flags: Mapping[str, Any], is_delivered: bool
) -> None:
    """P14: the server judges a `match` while it reads, so nobody can say that a later one does not take the change."""
    before = Refusal("the rule failed")
    stored = StoredChange(mark(1).data, bson.encode(event("insert", **flags)), 0, before)
    assert admission(match=MATCH).judge_again(stored).refusal == (None if is_delivered else before)
    other = StoredChange(mark(1).data, bson.encode(event("insert", "shop.other", **flags)), 0, before)
    assert admission(match=MATCH).judge_again(other).refusal == before


def test_a_filter_that_fails_on_a_stored_change_is_not_the_partition_rules_fault() -> None:
    """P14: what cannot be judged halts its partition, as when it is read."""
    broken = bson.encode({**event("insert"), "operationType": ["insert"]})
    found = admission().judge_again(StoredChange(mark(1).data, broken, 0, Refusal("the rule failed"))).refusal
    assert found is not None
    assert found.halts
