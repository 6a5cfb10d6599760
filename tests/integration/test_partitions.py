"""
Partitions and subscriptions as a take-over, the listener and an operator change them.

P1 to P10 are the design's invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64
from pymongo import MongoClient

from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image, Seen
from tests.rig.changes import BRIDGE, HANDLER, TERM, Document, token
from tests.rig.partition import PartitionRig, layouts, make_partition
from tests.rig.term import advance

LATER = TERM + 1


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> PartitionRig:
    return make_partition(mongo_client, state_database)


def test_names_that_begin_alike_are_kept_apart(rig: PartitionRig) -> None:
    rig.partitions.prepare({HANDLER: None}, layouts(HANDLER, partitioning=10), TERM)
    rig.partitions.prepare({HANDLER: None}, layouts(HANDLER, partitioning=1), TERM)
    more = f"{HANDLER}_more"
    rig.partitions.prepare({more: None}, layouts(more, partitioning=1), TERM)
    assert len(rig.partitions.take_over({HANDLER: 1}, LATER)) == 1
    taken = {document["_id"] for document in rig.documents.find({"term": LATER})}
    assert taken == {f"{BRIDGE}/{HANDLER}/1/0"}


@pytest.mark.parametrize("state", ["flowing", "halted", "paused"])
def test_a_take_over_keeps_the_state_and_shuts_out_the_messages_of_older_terms(rig: PartitionRig, state: str) -> None:
    """P3; P9: a deploy does not silently resume what a person must look at."""
    rig.spoil(state=state)
    image = rig.take_over(LATER)
    assert (image.term, image.state) == (LATER, state)
    assert rig.try_claim(term=TERM) is None
    assert (rig.try_claim(term=LATER) is not None) is (state == "flowing")


def test_a_take_over_commits_what_is_handled_and_leaves_a_larger_term_alone(rig: PartitionRig) -> None:
    """P4, P6: what is handled cannot be started again. What a later term has is not won."""
    assert rig.claims.handle(rig.claim(1, 5), 4, token(4))
    image = rig.take_over(LATER)
    assert (image.committed, image.token, image.claim, image.handled) == (4, token(4), None, None)
    assert rig.claims.handle(rig.claim(5, term=LATER), 5, token(5))
    before = rig.document
    assert rig.take_over(TERM).term == LATER
    assert rig.document == before


def test_a_take_over_leaves_a_live_claim_alone(rig: PartitionRig) -> None:
    rig.claim()
    rig.lapse()
    rig.claim(owner="second")
    before = rig.document
    image = rig.take_over(LATER)
    assert rig.document == {**before, "term": LATER}
    assert image.live
    assert image.crashes == 1


def _has_changed(rig: PartitionRig, seen: Seen) -> bool:
    rig.partitions.flush()  # what has no majority yet is not seen
    return bool(rig.partitions.list_changed({rig.where: seen}))


@pytest.mark.parametrize(
    "act",
    [
        lambda rig, claim: rig.claims.handle(claim, 1, token(1)),
        lambda rig, claim: rig.claims.finish(claim, 1, token(1)),
        lambda rig, claim: rig.claims.handle(claim, 1, token(1)) and rig.claims.commit(rig.where, 1, lasting=False),
        lambda rig, claim: rig.claims.park(claim, delay=1.0, not_before=None, error="once"),
        lambda rig, claim: rig.claims.wait(claim, delay=1.0, cause="away", doubtful=False),
        lambda rig, claim: rig.claims.crash(claim, "killed"),
        lambda rig, claim: rig.claims.halt(claim, token(1), "key", "no"),
        lambda rig, claim: rig.claims.discard(claim, token(1)),
        lambda rig, claim: rig.claims.set_aside(claim, token(1), {"_id": "letter", "cause": "failed"}),
        lambda rig, claim: rig.claims.single_out(claim),
        lambda rig, claim: rig.claims.relinquish(rig.where, claim.owner),
        lambda rig, _: rig.lapse() or rig.try_claim(owner="next"),
        lambda rig, _: rig.partitions.retry(rig.image),
    ],
    ids=["handled", "inline", "committed", "parked", "waiting", "crashed", "halted", "discarded", "set aside",
         "singled out", "relinquished", "claimed anew", "retried by a person"],
)  # fmt: skip
def test_a_look_sees_every_claim_and_every_outcome_and_nothing_twice(
    rig: PartitionRig, act: Callable[[PartitionRig, Claim], Any]
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


@pytest.mark.parametrize("count", [3, 150])
def test_a_look_compares_each_partition_with_itself(rig: PartitionRig, count: int) -> None:
    """P1: two may have the same fence, and one of them be further than the other; also where many are out."""
    rig.partitions.prepare({HANDLER: None}, layouts(HANDLER, partitions=count), TERM)
    ids = [f"{BRIDGE}/{HANDLER}/0/{index}" for index in range(count)]
    for index, partition_id in enumerate(ids):
        rig.documents.update_one({"_id": partition_id}, {"$set": {"fencingToken": 300 + index // 2}})
    seen: dict[str, Seen | None] = {each: Seen(300 + n // 2, claimed=False) for n, each in enumerate(ids)}
    seen |= {ids[1]: Seen(299, claimed=False), ids[-1]: None}
    rig.partitions.flush()
    assert sorted(image.index for image in rig.partitions.list_changed(seen)) == [1, count - 1]
    assert rig.partitions.list_changed({}) == []


def halted(rig: PartitionRig) -> Image:
    assert rig.claims.park(rig.claim(), delay=-1.0, not_before=None, error="once")
    assert rig.claims.halt(rig.claim(), token(1), "key", "ValueError: no")
    return rig.image


def test_retrying_a_halted_partition_starts_its_change_again_with_its_counts_at_zero(rig: PartitionRig) -> None:
    """P3: and raises the fence, so that nothing from before can write, whether its claim has ended or not."""
    claim = rig.claim()
    assert rig.partitions.retry(rig.image)
    assert not rig.claims.handle(claim, 1, token(1))
    image = halted(rig)
    assert rig.partitions.retry(image)
    stored = rig.document
    assert (stored["state"], stored["retry"], stored["halted"], stored["claim"]) == ("flowing", None, None, None)
    assert stored["fencingToken"] > image.fencing_token
    assert stored["committed"] == image.committed
    claim = rig.claim()
    assert (claim.retries, claim.crashes) == (0, 0)


@pytest.mark.parametrize(
    ("command", "change"),
    [
        *((command, change) for command in ("retry", "discard") for change in (
            {"committed": 1}, {"fencingToken": 1 << 60}, {"state": "flowing"},
            {"handled": {"owner": "me", "last": 1, "resumeToken": token(1)}},
        )),
        *(("pause", {"state": state}) for state in ("halted", "paused", "closed")),
        *(("resume", {"state": state}) for state in ("halted", "flowing", "closed")),
    ],
)  # fmt: skip
def test_a_command_is_refused_when_the_partition_is_not_as_it_was_seen(
    rig: PartitionRig, command: str, change: Document
) -> None:
    """Two operators, or one and an execution. What has halted must not become paused, which `resume` would let go."""
    image = halted(rig) if command in {"retry", "discard"} else rig.image
    rig.spoil(**change)
    before = rig.document
    assert not getattr(rig.partitions, command)(image)
    assert rig.document == before


_LEFT: dict[str, Document] = {
    "a claim": {"claim": {"owner": "me", "until": datetime(2100, 1, 1, tzinfo=UTC)}},
    "a run that was handled": {"handled": {"last": 6, "resumeToken": token(6)}},
    "stored changes": {"stored": {"to": token(6)["_data"]}},
    "a parked key": {"parkedKeys": [{"hash": Int64(7)}]},
    "halted": {"state": "halted"},
    "beyond the watermark": {"resumeToken": token(6)},
    "of another term": {"term": Int64(TERM - 1)},
}


@pytest.mark.parametrize("left", _LEFT.values(), ids=_LEFT)
def test_partitions_with_anything_left_are_not_replaced(rig: PartitionRig, left: Document) -> None:
    old, new = layouts(HANDLER)[HANDLER], layouts(HANDLER, partitions=2, partitioning=TERM)[HANDLER]
    rig.store.subscriptions.take_over({HANDLER: old}, TERM)
    rig.spoil(resumeToken=token(5), fencingToken=Int64(1 << 60))
    before = rig.document
    rig.spoil(**left)
    assert rig.partitions.replace(HANDLER, old, new, token(5), TERM) == "busy"
    rig.spoil(**{name: before.get(name) for name in left})
    assert rig.partitions.replace(HANDLER, old, new, token(5), TERM - 1) == "over"
    assert rig.document == before
    assert rig.partitions.replace(HANDLER, old, new, token(5), TERM) == "done"
    assert [image.fencing_token for image in rig.partitions.of({HANDLER: TERM})] == [1 << 60] * 2


def test_a_subscription_is_created_by_its_first_take_over_and_kept_by_the_next(rig: PartitionRig) -> None:
    """P3, P4: the epoch grows, everything else stays, and an older term moves nothing. Other bridges are not seen."""
    subscriptions = rig.store.subscriptions
    for name in (f"{BRIDGE}-2", f"{BRIDGE}0", BRIDGE[:-1]):
        rig.documents.database["handlers"].insert_one({"_id": f"{name}/record"})
    created = subscriptions.take_over(layouts("record", "audit"), TERM)
    assert {name: document["term"] for name, document in created.items()} == {"record": TERM, "audit": TERM}
    assert subscriptions.pin("record", TERM, Timestamp(5, 1), None)
    assert advance(subscriptions, "record", TERM, token(3), Timestamp(6, 1), "f")
    again = subscriptions.take_over(layouts("record"), LATER)["record"]
    assert again["term"] == LATER
    assert (again["resumeToken"], again["clusterTime"], again["fingerprint"]) == (token(3), Timestamp(6, 1), "f")
    assert subscriptions.take_over(layouts("record"), TERM)["record"]["term"] == LATER, "not won"
    before = subscriptions.read_all()
    assert sorted(document["_id"] for document in before) == [f"{BRIDGE}/audit", f"{BRIDGE}/record"]
    assert not advance(subscriptions, "record", TERM, token(4), None, "f")
    assert not subscriptions.pin("record", TERM, Timestamp(1, 1), None)
    assert not subscriptions.move_start("record", TERM, Timestamp(9, 1), "now")
    assert subscriptions.read_all() == before


def test_a_watermark_only_grows(rig: PartitionRig) -> None:
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record"), TERM)
    assert advance(subscriptions, "record", TERM, token(3), Timestamp(6, 1), "f")
    for data in (token(3), {**token(3), "_typeBits": b"\x01"}, token(2)):
        assert not advance(subscriptions, "record", TERM, data, Timestamp(6, 1), "f")
    assert advance(subscriptions, "record", TERM, {**token(4), "_typeBits": b"\x01"}, None, "f")
    assert advance(subscriptions, "record", TERM, token(5), None, "f")


def test_a_start_is_never_lowered(rig: PartitionRig) -> None:
    """P4: neither a position behind the new start, nor a start that was pinned behind it."""
    subscriptions = rig.store.subscriptions
    subscriptions.take_over(layouts("record", "audit"), TERM)
    assert advance(subscriptions, "record", TERM, token(3), Timestamp(6, 1), "f")
    assert not subscriptions.move_start("record", TERM, Timestamp(5, 1), "now")
    assert subscriptions.pin("audit", TERM, Timestamp(20, 1), None)
    assert subscriptions.move_start("audit", TERM, Timestamp(5, 1), "now")
    audit, record = sorted(subscriptions.read_all(), key=lambda document: str(document["_id"]))
    assert (record["resumeToken"], record["clusterTime"]) == (token(3), Timestamp(6, 1))
    assert audit["startAtOperationTime"] == audit["clusterTime"] == Timestamp(20, 1)


def test_one_trace_of_work_shows_that_a_subscription_was_begun(rig: PartitionRig) -> None:
    """P1: also in an old layout; what was begun is not begun again somewhere else without a decision."""
    rig.partitions.prepare({"record": None, "recorder": None}, layouts("record", "recorder", partitions=2), TERM)
    where = {"_id": f"{BRIDGE}/record/0/1"}
    before = rig.documents.find_one(where)
    assert before is not None
    traces: list[Document] = [{"committed": Int64(1)}, {"state": "halted"}, {"state": "paused"}]
    traces += [{name: {"some": "value"}} for name in ("claim", "retry", "halted", "handled")]
    for trace in traces:
        assert not rig.partitions.are_touched("record")
        rig.documents.update_one(where, {"$set": trace})
        assert rig.partitions.are_touched("record"), trace
        rig.documents.replace_one(where, before)
    assert not rig.partitions.are_touched("recorder")
