"""
Partitions and subscriptions as a take-over, the listener and an operator change them.

P1 to P10 are the design's invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64
from pymongo import MongoClient

from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image, Seen
from mongo_celery.bridge.state.subscriptions import parse_lost_history
from tests.fixtures.process import wait_for
from tests.integration.partition_rig import BRIDGE, NASTY, SUBSCRIPTION, TTL, VERSION, Rig, layouts, rig_of, token
from tests.integration.term_rig import advance

Document = dict[str, Any]

LATER = VERSION + 1


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> Rig:
    """Give one partition that flows and that nobody has claimed."""
    return rig_of(mongo_client, state_database)


# -- preparing and taking over -----------------------------------------------------------------------


def test_preparing_twice_changes_nothing_that_exists(rig: Rig) -> None:
    """P4: a crash in the middle of a preparation is repeated by the next term."""
    rig.claim()
    before = rig.document
    rig.partitions.prepare({SUBSCRIPTION: token(9)}, layouts(SUBSCRIPTION, partitions=3), LATER)
    assert rig.document == before
    others = [image for image in rig.partitions.of({SUBSCRIPTION: 0}) if image.index]
    assert [(image.index, image.token) for image in others] == [(1, token(9)), (2, token(9))]
    assert all(image.fencing_token == LATER for image in others)


def test_a_sweep_makes_a_new_image_only_where_something_has_happened(rig: Rig) -> None:
    """P8: and what it gives is what a reading of all partitions gives."""
    generations = {SUBSCRIPTION: 0}
    rig.partitions.prepare({SUBSCRIPTION: token(9)}, layouts(SUBSCRIPTION, partitions=3), VERSION)
    with rig.store.start_session() as session:
        known = rig.partitions.sweep(generations, session, {})
        assert list(known.values()) == rig.partitions.of(generations)
        again = rig.partitions.sweep(generations, session, known)
        assert all(now is before for now, before in zip(again.values(), known.values(), strict=True))
        rig.claim()
        later = rig.partitions.sweep(generations, session, again)
        assert list(later.values()) == rig.partitions.of(generations)
        assert [image.index for image in later.values() if image not in again.values()] == [0]


def test_names_that_begin_alike_are_kept_apart(rig: Rig) -> None:
    """A generation 1 is not 10, and a handler `a` is not `a_b`."""
    rig.partitions.prepare({SUBSCRIPTION: None}, layouts(SUBSCRIPTION, generation=10), VERSION)
    rig.partitions.prepare({SUBSCRIPTION: None}, layouts(SUBSCRIPTION, generation=1), VERSION)
    more = f"{SUBSCRIPTION}_more"
    rig.partitions.prepare({more: None}, layouts(more, generation=1), VERSION)
    assert len(rig.partitions.take_over({SUBSCRIPTION: 1}, LATER)) == 1
    taken = {document["_id"] for document in rig.documents.find({"term": LATER})}
    assert taken == {f"{BRIDGE}/{SUBSCRIPTION}/1/0"}


def test_a_take_over_shuts_out_the_messages_of_older_terms(rig: Rig) -> None:
    """P3: claim with the new version only."""
    image = rig.take_over(LATER)
    assert image.term == LATER
    assert rig.try_claim(term=VERSION) is None
    assert rig.try_claim(term=LATER) is not None


def test_a_take_over_commits_on_the_spot_what_is_handled(rig: Rig) -> None:
    """P6: it cannot be started again, and the new term dispatches behind it."""
    claim = rig.claim(1, 5)
    assert rig.claims.handle(claim, 4, token(4))
    image = rig.take_over(LATER)
    assert (image.committed, image.token, image.claim, image.handled) == (4, token(4), None, None)
    assert rig.try_claim(5, term=LATER) is not None


def test_a_take_over_leaves_a_live_claim_alone(rig: Rig) -> None:
    """P6, P7: neither fence, owner nor expiry move; the counts stay."""
    rig.claim()
    rig.lapse()
    rig.claim(owner="second")
    before = rig.document
    image = rig.take_over(LATER)
    assert rig.document == {**before, "term": LATER}
    assert image.live
    assert image.crashes == 1


def test_a_take_over_does_not_lower_an_epoch_that_is_ahead(rig: Rig) -> None:
    """P4: it is not won; its image says so, and nothing there was touched."""
    rig.spoil(term=LATER + 10)
    assert rig.claims.handle(rig.claim(term=LATER + 10), 1, token(1))
    before = rig.document
    image = rig.take_over(LATER)
    assert image.term == LATER + 10
    assert rig.document == before


def test_a_take_over_can_be_repeated(rig: Rig) -> None:
    """A crash right behind it: the same version finds everything as it was."""
    first = rig.take_over(LATER)
    assert rig.take_over(LATER) == first


@pytest.mark.parametrize("state", ["halted", "paused"])
def test_a_take_over_keeps_a_partition_that_stands_still_standing(rig: Rig, state: str) -> None:
    """P9: a deploy does not silently resume what a person must look at."""
    rig.spoil(state=state)
    assert rig.take_over(LATER).state == state


# -- images ------------------------------------------------------------------------------------------


def test_an_image_judges_by_the_servers_clock(rig: Rig) -> None:
    """P10: live and due are the server's verdicts."""
    empty = rig.image
    assert (empty.live, empty.due_in, empty.data, empty.parked) == (False, 0, "", False)
    rig.claim()
    assert rig.image.live
    rig.lapse()
    lapsed = rig.image
    assert not lapsed.live
    assert lapsed.claim is not None


# -- looks -------------------------------------------------------------------------------------------

Act = Callable[[Rig], Any]


def _has_changed(rig: Rig, seen: Seen) -> bool:
    rig.partitions.flush()  # what has no majority yet is not seen
    return bool(rig.partitions.list_changed({rig.where: seen}))


@pytest.mark.parametrize(
    "act",
    [
        lambda rig, claim: rig.claims.handle(claim, 1, token(1)),
        lambda rig, claim: rig.claims.handle(replace(claim, inline=True), 1, token(1)),
        lambda rig, claim: rig.claims.handle(claim, 1, token(1)) and rig.claims.commit(rig.where, 1, lasting=False),
        lambda rig, claim: rig.claims.park(claim, delay=1.0, not_before=None, error="once"),
        lambda rig, claim: rig.claims.wait(claim, delay=1.0, cause="away", doubtful=False),
        lambda rig, claim: rig.claims.crash(claim, "killed"),
        lambda rig, claim: rig.claims.halt(claim, token(1), "key", "no"),
        lambda rig, claim: rig.claims.discard(claim, token(1)),
        lambda rig, claim: rig.claims.set_aside(claim, token(1), {"_id": "letter", "cause": "failed"}),
        lambda rig, claim: rig.claims.advance(claim, 1, token(1), ends=True),
        lambda rig, claim: rig.claims.single_out(claim),
        lambda rig, claim: rig.claims.relinquish(rig.where, claim.owner),
    ],
    ids=["handled", "inline", "committed", "parked", "waiting", "crashed", "halted", "discarded", "set aside", "a list",
         "singled out", "relinquished"],
)  # fmt: skip
def test_a_look_sees_every_claim_and_every_outcome_and_nothing_twice(
    rig: Rig, act: Callable[[Rig, Claim], Any]
) -> None:
    """P1: of a run that nobody has claimed, and of one that runs, whatever its execution says."""
    awaited = Seen(rig.image.fencing_token, claimed=False)
    assert not _has_changed(rig, awaited)
    claim = rig.claim()
    assert _has_changed(rig, awaited)
    running = Seen(claim.fencing_token, claimed=True)
    assert rig.claims.extend([claim]) == []
    assert not _has_changed(rig, running)
    act(rig, claim)
    assert _has_changed(rig, running)
    assert _has_changed(rig, awaited)


@pytest.mark.parametrize(
    "act",
    [
        lambda rig: rig.try_claim(owner="next"),
        lambda rig: rig.partitions.retry(rig.image, 0),
    ],
    ids=["a newer claim", "retried by a person"],
)
def test_a_look_sees_what_others_do_to_a_claim(rig: Rig, act: Act) -> None:
    """P1: each of them raises the fence. That it has lapsed by itself the sweep sees."""
    rig.claim()
    rig.lapse()
    running = Seen(rig.image.fencing_token, claimed=True)
    assert not _has_changed(rig, running)
    act(rig)
    assert _has_changed(rig, running)


@pytest.mark.parametrize("count", [3, 150])
def test_a_look_compares_each_partition_with_itself(rig: Rig, count: int) -> None:
    """P1: two may have the same fence, and one of them be further than the other; also where many are out."""
    rig.partitions.prepare({SUBSCRIPTION: None}, layouts(SUBSCRIPTION, partitions=count), VERSION)
    ids = [f"{BRIDGE}/{SUBSCRIPTION}/0/{index}" for index in range(count)]
    for index, partition_id in enumerate(ids):
        rig.documents.update_one({"_id": partition_id}, {"$set": {"fencingToken": 300 + index // 2}})
    seen: dict[str, Seen | None] = {each: Seen(300 + n // 2, claimed=False) for n, each in enumerate(ids)}
    seen |= {ids[1]: Seen(299, claimed=False), ids[-1]: None}
    rig.partitions.flush()
    assert sorted(image.index for image in rig.partitions.list_changed(seen)) == [1, count - 1]
    assert rig.partitions.list_changed({}) == []


# -- an operator's commands --------------------------------------------------------------------------


def halted(rig: Rig) -> Image:
    """The image of a partition that halted at its first change, after a retry."""
    assert rig.claims.park(rig.claim(), delay=-1.0, not_before=None, error="once")
    assert rig.claims.halt(rig.claim(), token(1), "key", "ValueError: no")
    return rig.image


def test_pausing_lets_a_running_handler_finish(rig: Rig) -> None:
    """No new claim begins; the outcome is accepted and committed, and it stays paused."""
    claim = rig.claim()
    assert rig.partitions.pause(rig.image, 0)
    assert rig.claims.handle(claim, 1, token(1))
    assert rig.claims.commit(rig.where, 1)
    assert rig.try_claim(2) is None
    assert rig.partitions.resume(rig.image, 0)
    assert rig.try_claim(2) is not None


def test_pausing_is_not_disturbed_by_progress(rig: Rig) -> None:
    """What happens between looking and pausing changes nothing about the wish."""
    seen = rig.image
    assert rig.claims.discard(rig.claim(), token(1))
    assert rig.partitions.pause(seen, 0)


@pytest.mark.parametrize("state", ["halted", "paused", "closed"])
def test_only_a_flowing_partition_is_paused(rig: Rig, state: str) -> None:
    """A halted partition must not become a paused one, which `resume` would let go."""
    seen = rig.image
    rig.spoil(state=state)
    assert not rig.partitions.pause(seen, 0)


@pytest.mark.parametrize("state", ["halted", "flowing", "closed"])
def test_only_a_paused_partition_is_resumed(rig: Rig, state: str) -> None:
    """A halted one asks for `retry` or `skip`."""
    rig.spoil(state=state)
    assert not rig.partitions.resume(rig.image, 0)


def test_retrying_a_halted_partition_starts_its_change_again_with_its_counts_at_zero(rig: Rig) -> None:
    """And raises the fence, so that nothing from before can write."""
    image = halted(rig)
    assert rig.partitions.retry(image, 0)
    stored = rig.document
    assert (stored["state"], stored["retry"], stored["halted"], stored["claim"]) == ("flowing", None, None, None)
    assert stored["fencingToken"] > image.fencing_token
    assert stored["committed"] == image.committed
    claim = rig.claim()
    assert (claim.retries, claim.crashes) == (0, 0)


def test_retrying_ends_the_wait_of_a_parked_change(rig: Rig) -> None:
    """A countdown of an hour, and a person who has repaired the cause."""
    assert rig.claims.park(rig.claim(), delay=3600.0, not_before=None, error="later")
    assert rig.partitions.retry(rig.image, 0)
    assert rig.try_claim() is not None


def test_skipping_passes_over_the_head(rig: Rig) -> None:
    """P4: position and token move by one change, the fence grows."""
    image = halted(rig)
    assert rig.partitions.discard(image, 0)
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"], stored["state"]) == (1, token(1), "flowing")
    assert stored["halted"] is stored["retry"] is stored["claim"] is None
    assert stored["fencingToken"] > image.fencing_token


Command = Callable[[Rig, Image], bool]
COMMANDS: dict[str, Command] = {
    "retry": lambda rig, image: rig.partitions.retry(image, 0),
    "skip": lambda rig, image: rig.partitions.discard(image, 0),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
@pytest.mark.parametrize(
    "change",
    [
        {"committed": 1},
        {"fencingToken": 1 << 60},
        {"state": "flowing"},
        {"handled": {"owner": "me", "last": 1, "resumeToken": token(1)}},
    ],
)
def test_a_command_is_refused_when_the_partition_is_not_as_it_was_seen(
    rig: Rig, command: Command, change: Document
) -> None:
    """Two operators, or an operator and an execution: the second one looks again."""
    image = halted(rig)
    rig.spoil(**change)
    before = rig.document
    assert not command(rig, image)
    assert rig.document == before


def test_a_command_shuts_out_the_execution_that_was_under_way(rig: Rig) -> None:
    """P3: a retry of a partition whose claim has not ended clears the claim and raises the fence."""
    claim = rig.claim()
    assert rig.partitions.retry(rig.image, 0)
    assert not rig.claims.handle(claim, 1, token(1))
    assert rig.claim(owner="next").crashes == 0


# -- subscriptions -----------------------------------------------------------------------------------


def test_a_subscription_is_created_by_its_first_take_over_and_kept_by_the_next(rig: Rig) -> None:
    """P4: the epoch grows, everything else stays."""
    subscriptions = rig.store.subscriptions
    created = subscriptions.take_over(layouts("record", "audit"), VERSION)
    assert {name: document["term"] for name, document in created.items()} == {"record": VERSION, "audit": VERSION}
    assert subscriptions.pin("record", VERSION, Timestamp(5, 1), None)
    assert advance(subscriptions, "record", VERSION, token(3), Timestamp(6, 1), "f")
    again = subscriptions.take_over(layouts("record"), LATER)["record"]
    assert again["term"] == LATER
    assert (again["resumeToken"], again["clusterTime"], again["fingerprint"]) == (token(3), Timestamp(6, 1), "f")
    assert subscriptions.take_over(layouts("record"), VERSION)["record"]["term"] == LATER, "not won"


def test_a_watermark_only_grows(rig: Rig) -> None:
    """P4: compared by `_data` alone."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    assert advance(subscriptions, "record", VERSION, token(3), Timestamp(6, 1), "f")
    for data in (token(3), {**token(3), "_typeBits": b"\x01"}, token(2)):
        assert not advance(subscriptions, "record", VERSION, data, Timestamp(6, 1), "f")
    assert advance(subscriptions, "record", VERSION, {**token(4), "_typeBits": b"\x01"}, None, "f")
    assert advance(subscriptions, "record", VERSION, token(5), None, "f")


def test_an_older_term_moves_nothing_of_a_subscription(rig: Rig) -> None:
    """P3: neither watermark, pin nor start."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    subscriptions.take_over(layouts("record"), LATER)
    before = subscriptions.read_all()
    assert not advance(subscriptions, "record", VERSION, token(3), None, "f")
    assert not subscriptions.pin("record", VERSION, Timestamp(1, 1), None)
    assert not subscriptions.move_start("record", VERSION, Timestamp(1, 1), "now")
    assert subscriptions.read_all() == before


def test_a_start_is_pinned_once_for_each_subscription(rig: Rig) -> None:
    """P1: the second pin changes nothing; a new subscription takes the bridge's position with it."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    position = {"resumeToken": token(7), "clusterTime": Timestamp(7, 7)}
    assert subscriptions.pin("record", VERSION, Timestamp(5, 1), position)
    assert not subscriptions.pin("record", VERSION, Timestamp(9, 9), None)
    (document,) = subscriptions.read_all()
    assert (document["startAtOperationTime"], document["resumeToken"]) == (Timestamp(5, 1), token(7))


def test_moving_the_start_drops_the_token_that_the_server_no_longer_accepts(rig: Rig) -> None:
    """After lost history: what partitions have committed stays."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    assert advance(subscriptions, "record", VERSION, token(3), Timestamp(6, 1), "f")
    assert subscriptions.move_start("record", VERSION, Timestamp(9, 1), "now")
    (document,) = subscriptions.read_all()
    assert not document.keys() & {"resumeToken", "fingerprint"}
    assert document["startAtOperationTime"] == document["clusterTime"] == Timestamp(9, 1)
    (gap,) = document["gaps"]
    assert (gap["from"], gap["until"], gap["policy"]) == (Timestamp(6, 1), Timestamp(9, 1), "now")


def test_a_start_is_never_lowered(rig: Rig) -> None:
    """P4: neither a position behind the new start, nor a start that was pinned behind it."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record", "audit"), VERSION)
    assert advance(subscriptions, "record", VERSION, token(3), Timestamp(6, 1), "f")
    assert not subscriptions.move_start("record", VERSION, Timestamp(5, 1), "now")
    assert subscriptions.pin("audit", VERSION, Timestamp(20, 1), None)
    assert subscriptions.move_start("audit", VERSION, Timestamp(5, 1), "now")
    audit, record = sorted(subscriptions.read_all(), key=lambda document: str(document["_id"]))
    assert (record["resumeToken"], record["clusterTime"]) == (token(3), Timestamp(6, 1))
    assert audit["startAtOperationTime"] == audit["clusterTime"] == Timestamp(20, 1)


def test_lost_history_is_void_once_the_subscription_stands_elsewhere(rig: Rig) -> None:
    """P16: and a term that has ended records none."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    assert subscriptions.pin("record", VERSION, Timestamp(5, 1), None)
    assert subscriptions.mark_lost("record", VERSION, Timestamp(5, 1), Timestamp(9, 1), "$why")
    (document,) = subscriptions.read_all()
    seen = parse_lost_history(document)
    assert seen is not None
    assert (seen["at"], seen["oldest"], seen["error"]) == (Timestamp(5, 1), Timestamp(9, 1), "$why")
    assert advance(subscriptions, "record", VERSION, token(3), Timestamp(6, 1), "f")
    (moved,) = subscriptions.read_all()
    assert parse_lost_history(moved) is None
    assert not subscriptions.mark_lost("record", VERSION - 1, Timestamp(5, 1), None, "late")
    assert subscriptions.mark_lost("record", VERSION, Timestamp(6, 1), None, "nobody knows the oldest")
    (again,) = subscriptions.read_all()
    assert again["lost"].keys() == {"since", "at", "error"}, "there are no nulls"


TRACES = (
    {"committed": Int64(1)},
    {"state": "halted"},
    {"state": "paused"},
    {"claim": {"owner": "o"}},
    {"retry": {"count": 1}},
    {"halted": {"key": "k"}},
    {"handled": {"last": 1}},
)


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: next(iter(trace)))
def test_one_trace_of_work_shows_that_a_subscription_was_begun(rig: Rig, trace: dict[str, Any]) -> None:
    """P1: also in an old layout; what was begun is not begun again somewhere else without a decision."""
    rig.partitions.prepare({"record": None, "recorder": None}, layouts("record", "recorder", partitions=2), VERSION)
    assert not rig.partitions.are_touched("record")
    rig.documents.update_one({"_id": f"{BRIDGE}/record/0/1"}, {"$set": trace})
    assert rig.partitions.are_touched("record")
    assert not rig.partitions.are_touched("recorder")


@pytest.mark.parametrize("text", NASTY)
def test_strings_of_users_survive_in_a_subscription(rig: Rig, text: str) -> None:
    """A fingerprint or token that looks like an expression is stored as it is."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), VERSION)
    assert advance(subscriptions, "record", VERSION, {"_data": "82", "note": text}, None, text)
    (document,) = subscriptions.read_all()
    assert (document["fingerprint"], document["resumeToken"]["note"]) == (text, text)


def test_bridges_do_not_see_each_other(rig: Rig) -> None:
    """`shop` and `shop-2` and `shop0` share a database."""
    for name in (f"{BRIDGE}-2", f"{BRIDGE}0", BRIDGE[:-1]):
        rig.documents.database["handlers"].insert_one({"_id": f"{name}/record"})
    rig.store.subscriptions.take_over(layouts("record"), VERSION)
    assert [document["_id"] for document in rig.store.subscriptions.read_all()] == [f"{BRIDGE}/record"]


def test_the_time_of_a_lapse_is_the_claims_own_ttl(rig: Rig) -> None:
    """P10: seen by the images of the listener."""
    rig.claim(ttl=TTL)
    rig.claims.relinquish(rig.where, "me")
    rig.claim(ttl=1.0)
    assert rig.image.live
    wait_for(lambda: not rig.image.live)
