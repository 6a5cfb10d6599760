"""What a subscription owes of an event, and why it is refused; whatever happens, nothing is raised (P12)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import bson
import pytest

from mongo_celery.bridge.change import FLAGS, event_of
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.listener import admission as admissions
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import Partitioner, document_hash, partition_hash, partitioner
from mongo_celery.bridge.refusal import Refusal
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.items import ChangeEvent, Flaw
from mongo_celery.bridge.stream.source import Filter, Selector, Source
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


def unhashable(_change: Mapping[str, Any]) -> Any:
    return {object()}


def bottomless(_change: Mapping[str, Any]) -> Any:
    found: list[Any] = []
    found.append(found)
    return found


def half_text(_change: Mapping[str, Any]) -> Any:
    return "\ud800"


def admission(rule: Any = None, noted: Mapping[str, Any] | None = None, **filters: Any) -> Admission:
    selector = Selector("summarise", (Source("shop", "orders"),), Filter(**filters))
    made = rule if isinstance(rule, Partitioner) else partitioner(rule, None, None)
    return Admission(selector, made, LAYOUT, noted)


def read(number: int = 1, flaw: Flaw | None = None, /, without: str = "", **fields: Any) -> ChangeEvent:
    document = event(fields.pop("operation", "insert"), **fields)
    document.pop(without, None)
    raw = bson.encode(document)
    return ChangeEvent(mark(number), event_of(raw), raw, flaw)


def refusal(one: Admission, event: ChangeEvent) -> Refusal:
    change = one.admit(event)
    assert change is not None
    assert change.refusal is not None
    return change.refusal


@pytest.mark.parametrize("rule", [region, unspeakable, unhashable, bottomless, half_text])
def test_a_rule_that_fails_refuses_one_change_in_the_partition_of_its_document(rule: Any) -> None:
    """I4: whatever a function raises or returns."""
    one = admission(rule)
    change = one.admit(read())
    assert change is not None
    assert change.index == document_hash(read().document) % PARTITIONS
    assert change.refusal is not None
    assert change.refusal.reason.startswith("partition_by of handler summarise failed: ")
    assert not change.refusal.halts
    assert admission(region).admit(read(documentKey={"_id": 1, "region": "eu"})).refusal is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("without", "filters", "named"),
    [
        ("ns", {}, "ns"),
        ("operationType", {}, "operationType"),
        ("documentKey", {}, "documentKey"),
        (FLAGS, {"match": MATCH}, FLAGS),
        ("updateDescription", {"fields": frozenset({"n"})}, "updateDescription"),
    ],
)
def test_what_a_pipeline_has_removed_halts_whatever_the_policy(
    without: str, filters: dict[str, Any], named: str
) -> None:
    """P12, P16: a slip of the configuration must not skip every change, and is no error of the whole bridge."""
    found = refusal(admission(**filters), read(operation="update", without=without))
    assert found.halts
    assert found.reason.startswith(f"the bridge's pipeline removes {named} from events")


@pytest.mark.parametrize(
    "fields", [{"ns": {"coll": "orders"}}, {"ns": "shop.orders"}, {"operationType": {"a": 1}}, {"ns": 7}]
)
def test_what_a_pipeline_has_made_unjudgeable_halts_too(fields: dict[str, Any]) -> None:
    """Whatever is in the place of what the server sends."""
    assert refusal(admission(), read(**fields)).halts


@pytest.mark.parametrize(
    "event",
    [
        read(ns={"db": "shop", "coll": "other"}, without="documentKey"),
        read(ns={"db": "other"}, without="documentKey"),
        read(operation="drop"),
        read(operation="drop", without="ns"),
    ],
)
def test_an_event_that_is_ruled_out_concerns_nobody_whatever_it_lacks(event: ChangeEvent) -> None:
    """P12: a poisoned event of one collection is no matter of another's handler."""
    assert admission(match=MATCH).admit(event) is None


def test_a_flawed_event_is_refused_for_those_whom_it_may_concern() -> None:
    """The reader has read it with less; in the worst case nothing of it is known but its place."""
    flaw = Flaw("it is larger than 16 MB")
    assert refusal(admission(match=MATCH), read(1, flaw)) == Refusal("it is larger than 16 MB")
    assert refusal(admission(), ChangeEvent(mark(1), {}, b"", flaw)).reason == "it is larger than 16 MB"
    assert admission().admit(read(1, flaw, ns={"db": "shop", "coll": "other"})) is None
    assert admission().admit(read(1, flaw, operation="drop")) is None
    assert admission(match=MATCH).admit(read(1, flaw, _mongoCelery={"summarise": False})) is None
    assert refusal(admission(match=MATCH), read(1, flaw, _mongoCelery={"summarise": True})).reason == flaw.sentence
    change = admission(region).admit(read(1, flaw, documentKey={"_id": 1, "region": "eu"}))
    assert change is not None
    assert change.index == document_hash(read().document) % PARTITIONS  # a rule might see too little


def test_a_match_that_fails_concerns_its_handler_alone() -> None:
    """The event is whole, so it stands where its key says; it has the flags of the `match`es that did not fail."""
    flaw = Flaw("match fails on it", only_match=True)
    change = admission(region, match=MATCH).admit(read(1, flaw, documentKey={"_id": 1, "region": "eu"}))
    assert change is not None
    assert (change.refusal, change.index) == (Refusal("match fails on it"), partition_hash("eu") % PARTITIONS)
    for innocent in (admission(), admission(match=MATCH)):
        change = innocent.admit(read(1, flaw, _mongoCelery={"summarise": True}))
        assert change is not None
        assert change.refusal is None
    assert admission(match=MATCH).admit(read(1, flaw, _mongoCelery={"summarise": False})) is None
    assert refusal(admission(match=MATCH), read(1, flaw, _mongoCelery={"other": True})).reason == "match fails on it"
    assert admission(match=MATCH).admit(read(1, flaw, ns={"db": "shop", "coll": "other"})) is None


def test_a_refused_change_keeps_its_partition_when_the_cause_is_cured() -> None:
    """P13: by the corrected key it would count as done, where later changes have been committed."""
    before = admission(region)
    events = [read(number, documentKey={"_id": number}) for number in range(1, 6)]
    changes = [before.admit(each) for each in events]
    for change in changes:
        assert change is not None
        before.note(change)
    is_noted = [before.is_noted]
    found = before.notes({})
    before.noted(found)
    notes = {"generation": found.generation, "changes": found.changes}
    assert [*is_noted, before.is_noted] == [False, True]

    cured = [admission(Partitioner("r", lambda _event: "one"), notes).admit(each) for each in events]
    assert [change and change.index for change in cured] == [change and change.index for change in changes]
    assert all(change is not None and change.refusal is None for change in cured)
    elsewhere = admission(Partitioner("r", lambda _event: "one"), {**notes, "generation": 4}).admit(events[0])
    assert elsewhere is not None
    assert elsewhere.index == partition_hash("one") % PARTITIONS  # another layout has drained the old one


def noting(one: Admission, numbers: range) -> None:
    for number in numbers:
        change = one.admit(read(number))
        assert change is not None
        one.note(change)


def test_notes_forget_what_is_done_and_have_a_bound_of_their_own() -> None:
    """I5: a token carries the document's `_id`, which may be long."""
    one = admission(region)
    noting(one, range(1, 10))
    positions = dict.fromkeys(range(PARTITIONS), mark(7).data)
    first = one.notes(positions)
    assert (first.is_all, len(first.changes)) == (True, 9)
    one.noted(first)
    again = admission(region, {"generation": 3, "changes": first.changes})
    noting(again, range(10, 11))
    left = again.notes(positions)
    assert (left.is_all, len(left.changes)) == (True, 4)
    assert all(len(each["token"]) == 50 for each in left.changes)


def test_only_new_notes_are_written_until_most_of_the_old_ones_are_done() -> None:
    """A partition that stands still beside a stream of poison must not write megabytes for each change."""
    one = admission(region)
    sizes = []
    for number in range(1, 2500):
        noting(one, range(number, number + 1))
        notes = one.notes(dict.fromkeys(range(PARTITIONS), mark(number - 1).data))
        sizes.append(len(notes.changes))
        one.noted(notes)
    assert max(sizes) <= 3


def test_what_is_stored_of_notes_fits_into_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: all that this term and those before it may have under way, with what is done and not forgotten yet."""
    entry = len(bson.encode({"149999": {"token": "8" * 50, "index": 4095}}))
    assert admissions._MOST_STORED * entry < 15_000_000
    assert 2 * admissions.MOST_REFUSED < admissions._MOST_STORED

    monkeypatch.setattr(admissions, "_MOST_STORED", 150)
    one = admission(region)
    noting(one, range(1, 101))
    stored = 0
    for number in range(101, 1000):
        notes = one.notes(dict.fromkeys(range(PARTITIONS), mark(number - 100).data))
        stored = len(notes.changes) if notes.is_all else stored + len(notes.changes)
        assert stored <= 150
        one.noted(notes)
        noting(one, range(number, number + 1))


def test_refusals_are_loud_without_a_flood(caplog: pytest.LogCaptureFixture) -> None:
    """The first is said at once."""
    one = admission(region)
    for number in range(1, 100):
        change = one.admit(read(number))
        assert change is not None
        with caplog.at_level(logging.ERROR):
            one.note(change)
    (record,) = caplog.records
    assert record.getMessage().startswith("shop.orders insert 1 is refused before handler summarise, in partition")


def test_an_error_without_words_is_named_by_its_type() -> None:
    """A user's `__str__` may raise."""
    assert error_text(UnspeakableError()).startswith("UnspeakableError (its text cannot be had: ")
    assert error_text(KeyError("a")) == "KeyError: 'a'"
    assert len(error_text(ValueError("x" * 10_000))) == 2000
    assert len(Refusal.because("x" * 10_000).reason) == 1000
    bson.encode({"reason": Refusal.because("\ud800").reason})
