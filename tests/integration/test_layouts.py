"""
A new layout of a subscription: kills between any two steps, listeners that wake too late, and what stands.

P1 to P13 are the design's invariants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery.bridge.listener.starts import find_starts
from mongo_celery.bridge.partitioning import document_hash, partition_hash
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.spill import Spill, StoredChange
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.errors import LayoutError, LeaseLostError
from tests.fixtures.samples import token_data
from tests.integration.layout_rig import NAME, LayoutTerm, Shop, number_of, region
from tests.integration.term_rig import BRIDGE, KilledError, around, begin_term

Document = dict[str, Any]

OLD, NEW = 4, 3
WRITTEN = range(1, 41)


@pytest.fixture
def shop(mongo_client: MongoClient[Document], state_database: str) -> Shop:
    """Give a bridge with forty events of ten keys."""
    shop = Shop(mongo_client, state_database)
    shop.write(*WRITTEN)
    return shop


class Standing:
    """
    Four partitions that are not done: one has halted, one is parked, one is paused, one flows.

    Attributes:
        left: the numbers of the events that are yet to run.
        halted: the number of the event at which one has halted.
        parked: that of the one that waits for its retry.
    """

    def __init__(self, shop: Shop) -> None:
        term = shop.begin(OLD)
        done = shop.run(term, 0, 3)
        done |= shop.run(term, 1, 2)
        self.halted = shop.halt(term, 1, 3)
        done |= shop.run(term, 2, 1)
        self.parked = shop.park(term, 2, 2)
        shop.pause(term, 3)
        self.paused = number_of(shop.changes_of(term, 3)[0].mark.data)
        self.left = sorted(set(WRITTEN) - done)
        self.images = shop.images(term)


@pytest.fixture
def standing(shop: Shop) -> Standing:
    """Give what stands under the old layout, with the listener gone."""
    return Standing(shop)


def heads(shop: Shop, term: LayoutTerm) -> dict[int, Document]:
    """The stored changes that stand, by their numbers: what their partitions were."""
    indexes = shop.images(term)
    stored = [each for index in indexes for each in shop.stored(term, index)]
    return {number_of(each.data): dict(each.standing) for each in stored if each.standing is not None}


# -- what moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, NEW, 7])
def test_everything_that_is_not_done_is_in_the_new_layout_once(shop: Shop, standing: Standing, partitions: int) -> None:
    """P1, P2, P13: stored, in the order of each key, or read from the watermark on; whatever stands."""
    term = shop.begin(partitions)
    term.finish()
    layout, _ = shop.in_force(term)
    assert (layout.generation, layout.partitions) == (term.rig.version, partitions)
    assert shop.remaining(term) == standing.left
    assert {image.epoch for image in shop.images(term).values()} == {term.rig.version}
    assert term.led[NAME].window.watermark is not None


def test_what_stands_moves_with_its_change(shop: Shop, standing: Standing) -> None:
    """P9, P13, P14: halted with its head, parked with its counts and its time, paused."""
    term = shop.begin(NEW)
    term.finish()
    found = heads(shop, term)
    assert set(found) == {standing.halted, standing.parked, standing.paused}
    old = standing.images
    assert found[standing.halted] == {"state": "halted", "head": old[1].head, "retry": old[1].retry}
    assert found[standing.parked] == {"state": "flowing", "head": None, "retry": old[2].retry}
    assert (old[2].retry or {})["count"] == 1
    assert found[standing.paused] == {"state": "paused", "head": None, "retry": None}
    assert {image.state for image in shop.images(term).values()} == {"flowing"}


def test_two_heads_that_meet_in_one_partition_stand_one_after_the_other(shop: Shop) -> None:
    """P9: each is put in force when it is first, and once."""
    term = shop.begin(OLD)
    halted = sorted(shop.halt(term, index, 1) for index in (0, 1))
    term = shop.begin(1)
    term.finish()
    generation, partitions = term.rig.generation(NAME), term.rig.store.partitions
    for number in halted:
        while number_of(shop.stored(term, 0)[0].data) < number:
            _commit_first(shop, term)
        (first, image) = shop.stored(term, 0)[0], shop.images(term)[0]
        assert first.standing is not None
        assert partitions.stand(image, term.rig.partition_id(NAME, 0), first.data, first.standing)
        image = shop.images(term)[0]
        assert (image.state, image.stood) == ("halted", first.data)
        assert not partitions.stand(image, term.rig.partition_id(NAME, 0), first.data, first.standing)
        assert partitions.discard(image, generation)
    assert heads(shop, term) == {}


def _commit_first(shop: Shop, term: LayoutTerm) -> None:
    first, image = shop.stored(term, 0)[0], shop.images(term)[0]
    number = image.committed + 1
    where = term.rig.partition_id(NAME, 0)
    claims = term.rig.store.claims
    claim = claims.take(where, owner="a", version=term.rig.version, first=number, last=number, token=first.data)
    assert claim is not None
    assert claims.handle(claim, number, {"_data": first.data})
    assert claims.commit(where, number)


def test_a_head_that_was_retried_does_not_stand_again_in_the_next_layout(shop: Shop) -> None:
    """P9: what was put in force once is what its partition says, not what it was when it was copied."""
    term = shop.begin(OLD)
    halted = shop.halt(term, 0, 1)
    term = shop.begin(1)
    term.finish()
    where, partitions = term.rig.partition_id(NAME, 0), term.rig.store.partitions
    while number_of(shop.stored(term, 0)[0].data) < halted:
        _commit_first(shop, term)
    first = shop.stored(term, 0)[0]
    assert partitions.stand(shop.images(term)[0], where, first.data, first.standing or {})
    assert partitions.retry(shop.images(term)[0], term.rig.generation(NAME))
    term = shop.begin(NEW)
    term.finish()
    assert heads(shop, term) == {halted: {"state": "flowing", "head": None, "retry": None}}


def test_what_a_head_stands_for_moves_on_with_it_though_nothing_is_counted(shop: Shop) -> None:
    """P9: nothing vanishes in silence: it was passed over for this one, which an operator has let go on."""
    term = shop.begin(OLD)
    halted = shop.halt(term, 0, 1)
    named = {"count": 1, "tokens": [token_data(0)]}
    where = term.rig.partition_id(NAME, 0)
    term.rig.partitions.update_one({"_id": where}, {"$set": {"retry.passedOver": named}})
    assert term.rig.store.partitions.retry(shop.images(term)[0], term.rig.generation(NAME))
    term = shop.begin(NEW)
    term.finish()
    assert heads(shop, term) == {halted: {"state": "flowing", "head": None, "retry": {"passedOver": named}}}


def test_a_head_that_has_stood_and_was_rewound_does_not_stand_again(shop: Shop) -> None:
    """P9: it was decided on; before it lies what is run once more."""
    term = shop.begin(1)
    shop.run(term, 0, 3)
    halted = shop.halt(term, 0, 4)
    term = shop.begin(2)
    term.finish()
    (index,) = [index for index in shop.images(term) if halted in _numbers(shop.stored(term, index))]
    where, partitions = term.rig.partition_id(NAME, index), term.rig.store.partitions
    (stood,) = [each for each in shop.stored(term, index) if each.standing is not None]
    term.rig.partitions.update_one({"_id": where}, {"$set": {"stood": stood.data}})
    ahead = StoredChange(token_data(1), shop.events[0].raw, index)
    term.rig.store.spill.insert(where, [ahead], term.rig.version)
    assert partitions.look([where])[0].stood == stood.data
    term = shop.begin(NEW)
    term.finish()
    assert heads(shop, term) == {halted: {"state": "flowing", "head": None, "retry": None}}


def _numbers(changes: list[StoredChange]) -> list[int]:
    return [number_of(each.data) for each in changes]


def test_heads_that_are_yet_to_stand_move_on_through_another_layout(shop: Shop, standing: Standing) -> None:
    """P9, P13: two layouts, one after the other, with nothing run in between."""
    term = shop.begin(1)
    term.finish()
    before = heads(shop, term)
    term = shop.begin(7)
    term.finish()
    assert heads(shop, term) == before
    assert shop.remaining(term) == standing.left


@pytest.mark.parametrize("halted", [False, True])
def test_a_subscription_that_is_paused_as_a_whole_stays_so(shop: Shop, halted: bool) -> None:
    """P9: nothing flows because of a new layout, also where there is nothing to be paused in front of."""
    term = shop.begin(OLD)
    if halted:
        shop.halt(term, 0, 1)
    shop.pause(term, *range(int(halted), OLD))
    term = shop.begin(7)
    term.finish()
    assert {image.state for image in shop.images(term).values()} == {"paused"}
    assert [each["state"] for each in heads(shop, term).values()] == (["halted"] if halted else [])


def test_a_crash_is_charged_and_what_may_have_crashed_runs_change_by_change(shop: Shop) -> None:
    """P6, P14: a claim that has lapsed is ended by the move; its run may be anywhere in the new partitions."""
    term = shop.begin(OLD)
    claim = shop.claim(term, 0, 1, 3)
    guilty = [number_of(each.mark.data) for each in shop.changes_of(term, 0)[:3]]
    term.rig.partitions.update_one({"_id": claim.partition_id}, [{"$set": {"claim.until": _PAST}}])
    term = shop.begin(NEW)
    term.finish()
    assert shop.remaining(term) == list(WRITTEN)
    assert heads(shop, term)[guilty[0]]["retry"]["crashes"] == 1
    for index, image in shop.images(term).items():
        lone = [number_of(each.data) for each in shop.stored(term, index)][: image.single]
        assert set(guilty) & {number_of(each.data) for each in shop.stored(term, index)} <= set(lone)
    assert sum(image.single for image in shop.images(term).values()) < len(WRITTEN), "not all of them"


_PAST: Document = {"$subtract": ["$$NOW", 1]}


def test_nothing_read_before_is_run_again_and_nothing_is_stored_without_need(shop: Shop) -> None:
    """P1, P5: all is done: the new partitions begin at the watermark, with an empty collection."""
    term = shop.begin(OLD)
    for index in range(OLD):
        shop.run(term, index, len(shop.changes_of(term, index)))
    term = shop.begin(NEW)
    term.finish()
    assert shop.remaining(term) == []
    assert {image.data for image in shop.images(term).values()} == {token_data(40)}
    assert term.rig.store.spill.next_partition() is None


def test_what_was_stored_before_is_copied_whatever_the_stream_still_has(shop: Shop) -> None:
    """P13: the oplog has rolled past it; only the collection has it."""
    term = shop.begin(OLD)
    halted = shop.halt(term, 1, 1)
    _store_all(term)
    shop.events = shop.events[30:]
    term = shop.begin(NEW)
    term.finish()
    assert shop.remaining(term) == list(WRITTEN)
    assert set(heads(shop, term)) == {halted}


def _store_all(term: LayoutTerm) -> None:
    """As for partitions that cannot run what they have."""
    term.stream.read(term.led.values())
    led = term.led[NAME]
    for index in list(led.window.waiting()):
        assert term.spilling.store(led, index, "halted")
    term.watermarks.store([led], 0.0)


def test_a_halted_change_that_its_handler_no_longer_gets_moves_if_it_is_stored(shop: Shop, standing: Standing) -> None:
    """P9, P13: what was read is kept, with or without a mark; else nothing stands in its place."""
    (one,) = [each for each in shop.events if number_of(each.mark.data) == standing.halted]
    shop.events.remove(one)
    term = shop.begin(OLD)
    where = term.rig.partition_id(NAME, 1)
    later = [each for each in shop.changes_of(term, 1) if each.mark.data > one.mark.data]
    for each in later:
        shop.events.remove(each)
    term.rig.store.spill.insert(
        where, [StoredChange(one.mark.data, one.raw, document_hash(one.document))], term.rig.version
    )
    term = shop.begin(NEW)
    term.finish()
    assert standing.halted in shop.remaining(term)
    assert heads(shop, term)[standing.halted]["state"] == "halted"


def test_a_halted_change_that_is_nowhere_is_named(
    shop: Shop, standing: Standing, caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P16: the handler no longer gets it; its counts are charged to nobody, and the log says what has gone."""
    shop.events = [each for each in shop.events if number_of(each.mark.data) != standing.halted]
    term = shop.begin(NEW)
    term.finish()
    assert set(heads(shop, term)) == {standing.parked, standing.paused}
    assert shop.remaining(term) == [number for number in standing.left if number != standing.halted]
    (said,) = [each.getMessage() for each in caplog.records if "nothing stands in its place" in each.getMessage()]
    assert "was halted" in said


def test_a_changed_key_spreads_what_is_stored_anew(shop: Shop, standing: Standing) -> None:
    """P2: by the event's bytes; where the new rule fails, by the document's key, and refused."""
    shop.write(50, 51, has_region=False)
    _store_all(shop.begin(OLD))
    term = shop.begin(NEW, partition_by=region)
    term.finish()
    layout, _ = shop.in_force(term)
    assert layout.key.endswith(":region")
    stored = {index: shop.stored(term, index) for index in range(NEW)}
    found = {number_of(each.data): (index, each) for index, changes in stored.items() for each in changes}
    assert sorted(found) == [*standing.left, 50, 51]
    of_region: dict[int, set[int]] = {}
    for number in standing.left:
        of_region.setdefault(number % 3, set()).add(found[number][0])
    assert all(len(indexes) == 1 for indexes in of_region.values()), "one key, one partition"
    for number in (50, 51):
        refusal = found[number][1].refusal
        assert refusal is not None
        assert "partition_by of handler record failed" in refusal.reason
    assert set(heads(shop, term)) == {standing.halted, standing.parked, standing.paused}


@pytest.mark.slow
def test_a_hundred_thousand_stored_changes_move_and_others_go_on_meanwhile(
    shop: Shop, record_property: Callable[[str, object], None]
) -> None:
    """P12, P13: with a retry that waits for an hour; the longest turn is what other handlers wait for."""
    term = shop.begin(OLD)
    parked = shop.park(term, 0, 1)
    shop.write(*range(41, 100_001))
    _store_all(term)
    term = shop.begin(7)
    began, longest = time.monotonic(), 0.0
    while term.relayouts.report():
        turn = time.monotonic()
        term.turn()
        longest = max(longest, time.monotonic() - turn)
    record_property("seconds", round(time.monotonic() - began, 1))
    record_property("longest_turn_seconds", round(longest, 2))
    assert shop.remaining(term) == list(range(1, 100_001))
    assert set(heads(shop, term)) == {parked}


# -- waiting -----------------------------------------------------------------------------------------


def test_a_key_whose_old_rule_is_not_registered_is_refused_while_changes_are_under_way(shop: Shop) -> None:
    """P2: only by that rule it is known whose changes have been done; once all is done or stored it may change."""
    before = shop.begin(OLD, partition_by=region)
    one = shop.events[0]
    index = partition_hash(region(one.document)) % OLD
    where = before.rig.partition_id(NAME, index)
    claim = before.rig.store.claims.take(
        where, owner="a", version=before.rig.version, first=1, last=1, token=one.mark.data
    )
    assert claim is not None
    assert before.rig.store.claims.handle(claim, 1, one.mark.token)
    assert before.rig.store.claims.commit(where, 1)
    with pytest.raises(LayoutError, match=r"cannot change from tests.integration.layout_rig:region now.*old rule"):
        shop.begin(OLD)
    _store_all(shop.begin(OLD, partition_by=region))
    term = shop.begin(OLD)
    term.finish()
    layout, _ = shop.in_force(term)
    assert layout.key.endswith(":_id")
    assert shop.remaining(term) == list(WRITTEN)[1:]


def test_a_live_claim_is_waited_for_and_named_and_what_it_commits_counts(shop: Shop) -> None:
    """P6, P16: nobody is cut off, and its change is not run again."""
    before = shop.begin(OLD)
    claim = shop.claim(before, 2, 1)
    term = shop.begin(NEW)
    for _ in range(3):
        term.turn()
    (waits,) = term.waits
    assert waits.startswith("waits for the claim of partition 2 (owner record-2-1), live for ")
    assert shop.in_force(term)[0].partitions == OLD
    done = shop.done(before, claim, 2)
    term.finish()
    assert shop.remaining(term) == sorted(set(WRITTEN) - done)


def test_what_commits_behind_the_place_that_was_read_is_read_up_to(shop: Shop) -> None:
    """P1, P5: the stream was left at an earlier place; it is read again from there."""
    before = shop.begin(OLD)
    claim = shop.claim(before, 2, 1, len(shop.changes_of(before, 2)))
    term = shop.begin(NEW)
    term.turn()
    term.turn()
    assert term.led[NAME].window.count == 0, "nothing is committed yet, so nothing has to be read"
    done = shop.done(before, claim, 2)
    term.finish()
    assert shop.remaining(term) == sorted(set(WRITTEN) - done)


def test_a_claim_of_one_handler_makes_no_other_wait(shop: Shop) -> None:
    """P12: each subscription for itself."""
    before = shop.begin(OLD, NAME, "audit")
    claim = shop.claim(before, 2, 1)
    term = shop.begin(NEW, NAME, "audit")
    for _ in range(10):
        term.turn()
    assert [each["subscription"] for each in term.relayouts.report()] == [NAME]
    assert shop.in_force(term, "audit")[0].partitions == NEW
    assert shop.remaining(term, "audit") == list(WRITTEN)
    shop.done(before, claim, 2)
    term.finish()
    assert shop.in_force(term)[0].partitions == NEW


def test_a_handler_that_is_not_there_keeps_its_layout_and_hinders_nobody(shop: Shop) -> None:
    """P12: whatever it has left; when it is back, it moves like others."""
    before = shop.begin(OLD, NAME, "audit")
    done = shop.run(before, 0, 2, "audit")
    shop.pause(before, 1)
    term = shop.begin(NEW)
    term.finish()
    term.clean()
    assert shop.in_force(term, "audit")[0].partitions == OLD
    assert len(shop.images(term, "audit")) == OLD
    term = shop.begin(NEW, NAME, "audit")
    term.finish()
    assert shop.remaining(term, "audit") == sorted(set(WRITTEN) - done)


def test_nothing_is_dispatched_while_a_layout_changes(shop: Shop) -> None:
    """P2: nothing new may begin in partitions that are being closed."""
    before = shop.begin(OLD)
    shop.claim(before, 2, 1)
    term = shop.begin(NEW)
    led = term.led[NAME]
    term.turn()
    assert list(led.due(time.monotonic())) == []
    assert led.next_due() == float("inf")


def test_a_term_with_the_same_layout_moves_nothing(shop: Shop, standing: Standing) -> None:
    """P3: a deploy is no new layout."""
    term = shop.begin(OLD)
    assert term.takeover.moving == []
    assert {index: image.state for index, image in shop.images(term).items()} == {
        index: image.state for index, image in standing.images.items()
    }


# -- kills -------------------------------------------------------------------------------------------

STEPS: list[tuple[type, str]] = [
    (Partitions, "close"),
    (Spill, "insert"),
    (Partitions, "mark_spilled"),
    (Subscriptions, "advance_all"),
    (Spill, "copy"),
    (Spill, "stand"),
    (Spill, "last"),
    (Partitions, "prepare"),
    (Subscriptions, "put_in_force"),
]
_NAMES = [name for _, name in STEPS]


def _kill() -> None:
    raise KilledError


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_is_killed_at_any_step_has_lost_and_doubled_nothing(
    shop: Shop, standing: Standing, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], behind: bool
) -> None:
    """P1, P2, P13: the next one, with the same options, ends what it began."""
    killed = shop.begin(NEW)
    with monkeypatch.context() as patch:
        around(patch, step, _kill, behind=behind)
        with pytest.raises(KilledError):
            killed.finish()
    term = shop.begin(NEW)
    assert "moving" not in {image.state for image in shop.images(term).values()}
    term.finish()
    assert shop.remaining(term) == standing.left
    assert set(heads(shop, term)) == {standing.halted, standing.parked, standing.paused}
    term.clean()
    assert shop.generations() == {term.rig.generation(NAME)}
    assert shop.remaining(term) == standing.left


@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_is_killed_and_whose_successor_keeps_the_old_layout_has_changed_nothing(
    shop: Shop, standing: Standing, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    """P1, P2, P9: the deploy was taken back; partitions stand as they stood, and its half-made copy goes."""
    killed = shop.begin(NEW)
    with monkeypatch.context() as patch:
        around(patch, step, _kill)
        with pytest.raises(KilledError):
            killed.finish()
    term = shop.begin(OLD)
    states = {index: image.state for index, image in shop.images(term).items()}
    assert states == {index: image.state for index, image in standing.images.items()}
    assert shop.remaining(term) == standing.left
    term.clean()
    assert shop.generations() == {term.rig.generation(NAME)}
    assert shop.remaining(term) == standing.left


@pytest.mark.parametrize("wanted", [OLD, NEW, NEW + 2])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_wakes_at_any_step_of_a_move_harms_nothing(
    shop: Shop, standing: Standing, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], wanted: int
) -> None:
    """P1, P3: its successor has put another layout in force, or kept the old one, and cleaned up; it is refused."""
    frozen = shop.begin(NEW)
    successors: list[LayoutTerm] = []

    def succeed() -> None:
        successor = shop.begin(wanted)
        successor.finish()
        successor.clean()
        successors.append(successor)

    with monkeypatch.context() as patch:
        around(patch, step, succeed)
        with pytest.raises(LeaseLostError):
            frozen.finish()
    (successor,) = successors
    layout, document = shop.in_force(successor)
    assert layout.partitions == wanted
    assert document["epoch"] == successor.rig.version
    assert {image.epoch for image in shop.images(successor).values()} == {successor.rig.version}
    assert shop.remaining(successor) == standing.left
    frozen.clean()
    assert shop.remaining(successor) == standing.left, "what it cleans up late is not mine"
    last = shop.begin(wanted)
    last.clean()
    assert shop.generations() == {last.rig.generation(NAME)}
    assert shop.remaining(last) == standing.left


def test_what_a_listener_makes_anew_that_wakes_in_its_take_over_is_led_by_nobody(
    shop: Shop, mongo_client: MongoClient[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P3: the partitions of the layout that it has read are gone; it makes them, and must not dispatch there."""
    shop.begin(OLD)
    frozen = begin_term(mongo_client, shop.database, OLD)

    def succeed() -> None:
        successor = shop.begin(NEW)
        successor.finish()
        successor.clean()

    def begin() -> None:
        takeover = frozen.take_over()
        find_starts(frozen.store, mongo_client, frozen.renewal, frozen.options, frozen.handlers, takeover)

    with monkeypatch.context() as patch:
        around(patch, (Partitions, "prepare"), succeed)
        with pytest.raises(LeaseLostError):
            begin()


def test_a_server_that_does_not_answer_is_asked_again(
    shop: Shop, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: each step can be repeated, under the same term."""

    def fail() -> None:
        raise AutoReconnect("gone")

    term = shop.begin(NEW)
    for step in STEPS:
        around(monkeypatch, step, fail)
        around(monkeypatch, step, fail, behind=True)
    monkeypatch.setattr("mongo_celery.bridge.listener.relayout._PAUSE_SECONDS", 0.0)
    term.finish()
    assert shop.remaining(term) == standing.left
    assert set(heads(shop, term)) == {standing.halted, standing.parked, standing.paused}


def test_leftovers_of_a_later_term_are_not_removed(shop: Shop) -> None:
    """P1: a larger generation is its layout, in force or not; what it has stored in an older one is its own."""
    old = shop.begin(OLD)
    later = shop.begin(NEW)
    later.finish()
    generation = later.rig.generation(NAME)
    ahead = StoredChange(token_data(99), b"")
    later.rig.store.spill.insert(f"{BRIDGE}/{NAME}/{generation}/0", [ahead], later.rig.version)
    later.rig.store.spill.insert(f"{BRIDGE}/{NAME}/1/0", [ahead], later.rig.version)
    old.clean()
    assert shop.generations() >= {generation, 1}
    later.clean()
    assert shop.generations() == {generation}


def test_a_foreign_document_among_stored_changes_is_left_alone(shop: Shop) -> None:
    """P12: what a person has put there ends no listener, and keeps nothing from being removed."""
    shop.run(shop.begin(OLD), 0, 3)
    term = shop.begin(NEW)
    term.finish()
    spill = term.rig.database["spill"]
    foreign = [f"{BRIDGE}/0", f"{BRIDGE}/{NAME}/one/0/82", f"{BRIDGE}/{NAME}"]
    spill.insert_many([{"_id": name} for name in foreign])
    term.rig.store.spill.insert(f"{BRIDGE}/{NAME}/1/0", [StoredChange(token_data(99), b"")], term.rig.version)
    term.clean()
    assert sorted(spill.distinct("_id", {"_id": {"$in": foreign}})) == sorted(foreign)
    assert spill.count_documents({"_id": {"$regex": f"^{BRIDGE}/{NAME}/1/"}}) == 0


# -- lost history ------------------------------------------------------------------------------------


def test_a_subscription_that_has_lost_its_history_waits_for_a_decision_under_its_old_layout(shop: Shop) -> None:
    """P9, P12: it cannot be read; what it has in memory runs on, and others move."""
    shop.run(shop.begin(OLD), 0, 3)
    term = shop.begin(NEW)
    term.lose_history()
    for _ in range(5):
        term.turn()
    assert term.waits == ["waits for a decision on its lost history"]
    assert {image.state for image in shop.images(term).values()} == {"flowing"}
    term.led[NAME].lost, term.stream.at = False, ""
    term.finish()
    assert shop.in_force(term)[0].partitions == NEW


def test_a_history_that_is_lost_on_the_way_opens_the_partitions_again(shop: Shop, standing: Standing) -> None:
    """P9, P12: so that an operator can act on them; afterwards it moves."""
    term = shop.begin(NEW)
    events, term.stream.events = term.stream.events, []
    for _ in range(3):
        term.turn()
    assert {image.state for image in shop.images(term).values()} == {"moving"}
    term.led[NAME].lost = True
    term.turn()
    states = {index: image.state for index, image in shop.images(term).items()}
    assert states == {index: image.state for index, image in standing.images.items()}
    assert not term.led[NAME].is_moving
    closed_late = term.led[NAME].trackers[0].partition_id
    assert term.rig.store.partitions.close([closed_late], term.rig.version)[0].state == "moving"
    term.turn()
    assert shop.images(term)[0].state == states[0], "a write that comes late closes nothing for good"
    term.led[NAME].lost = False
    term.stream.events = events
    term.finish()
    assert shop.remaining(term) == standing.left


# -- generations -------------------------------------------------------------------------------------


def test_generations_only_grow_also_where_the_state_was_dropped(
    shop: Shop, mongo_client: MongoClient[Document]
) -> None:
    """P4: targets that were stamped under the old ones refuse smaller ones."""
    generations = []
    for partitions in (OLD, NEW, OLD, NEW):
        term = shop.begin(partitions)
        term.finish()
        generations.append(term.rig.generation(NAME))
        if partitions == NEW:
            mongo_client.drop_database(shop.database)
    assert generations == sorted(set(generations))


def test_a_larger_epoch_anywhere_raises_the_version(shop: Shop) -> None:
    """P4: a lease from a backup; also what a later layout will find must lie below it."""
    before = shop.begin(OLD)
    ahead = before.rig.version + (1 << 50)
    before.rig.partitions.update_one({"_id": before.rig.partition_id(NAME, 0)}, {"$set": {"epoch": Int64(ahead)}})
    term = shop.begin(NEW)
    assert term.takeover.version == term.rig.version > ahead
    term.finish()
    assert shop.in_force(term)[0].generation > ahead
