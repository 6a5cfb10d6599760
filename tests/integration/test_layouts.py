"""
Changing the layout against frozen listeners, crashes in the middle, and handlers that are not there.

P1 to P10 are the design's invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64
from pymongo import MongoClient

from mongo_celery.bridge.listener import draining
from mongo_celery.bridge.listener.takeover import Takeover
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.errors import LayoutError, LeaseLostError
from tests.integration.term_rig import BRIDGE, TermRig, advance, begin_term, mark_at

Document = dict[str, Any]
Begin = Callable[..., TermRig]

DRAINED = mark_at(Timestamp(1000, 5))
LATER = mark_at(Timestamp(1000, 9))
OLD, NEW = 2, 3


@pytest.fixture
def begin(mongo_client: MongoClient[Document], state_database: str) -> Begin:
    """Give what begins a term, for so many partitions and these handlers."""

    def start(partitions: int, *names: str) -> TermRig:
        return begin_term(mongo_client, state_database, partitions, names or ("record",))

    return start


def flip(rig: TermRig, takeover: Takeover, mark: Any = DRAINED) -> None:
    draining.flip(rig.store, rig.renewal, takeover, rig.led(takeover, dict.fromkeys(takeover.images, mark)))


def generation(rig: TermRig, number: int) -> dict[str, Document]:
    return {where: found for where, found in rig.documents().items() if where.split("/")[2] == str(number)}


# -- stale listeners ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [NEW, NEW + 2], ids=["the same layout", "another layout"])
def test_a_flip_that_wakes_too_late_leaves_the_living_generation_alone(begin: Begin, wanted: int) -> None:
    """P1, P2, P4: its lease has lapsed, a successor has flipped and works there; nothing of it is touched."""
    begin(OLD).take_over()
    frozen = begin(wanted)
    drained_by_frozen = frozen.take_over()
    successor = begin(NEW)
    flip(successor, successor.take_over(), LATER)
    successor.partitions.update_one({"_id": f"{BRIDGE}/record/1/0"}, {"$set": {"committed": Int64(7)}})
    before = generation(successor, 1)

    with pytest.raises(LeaseLostError):
        flip(frozen, drained_by_frozen)

    after = generation(successor, 1)
    assert {where: after[where] for where in before} == before
    assert len(before) == NEW
    images = begin(NEW).take_over().images["record"]
    assert sorted(image.index for image in images) == list(range(NEW)), "strays belong to nobody"


def test_a_leftover_of_an_older_terms_flip_is_prepared_again(begin: Begin) -> None:
    """New layout: a crash before the flip; the drained position of then is not the one of now."""
    begin(OLD).take_over()
    crashed = begin(NEW + 2)
    crashed.take_over()
    crashed.store.partitions.prepare({"record": DRAINED.token}, 1, NEW + 2, crashed.version)
    again = begin(NEW)
    flip(again, again.take_over(), LATER)
    found = generation(again, 1)
    assert len(found) == NEW
    assert all(each["resumeToken"] == LATER.token for each in found.values())
    assert {(each["epoch"], each["state"]) for each in found.values()} == {(again.version, "flowing")}


def test_what_a_frozen_listener_prepares_between_the_steps_of_a_flip_is_not_taken_for_mine(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: its position is an older one, and would bring back what is done."""
    begin(OLD).take_over()
    frozen = begin(NEW)
    rig = begin(NEW)
    takeover = rig.take_over()
    discard = Partitions.discard
    wakes = [frozen.version]

    def wake(self: Partitions, *arguments: Any) -> None:
        discard(self, *arguments)
        for version in wakes:
            wakes.clear()
            self.prepare({"record": DRAINED.token}, 1, NEW, version)

    monkeypatch.setattr(Partitions, "discard", wake)
    flip(rig, takeover, LATER)
    assert not wakes
    assert all(each["resumeToken"] == LATER.token for each in generation(rig, 1).values())


def test_the_term_that_flipped_and_the_next_both_win_the_new_generation(begin: Begin) -> None:
    """P3: partitions that were prepared with a version are raised by larger ones only."""
    begin(OLD).take_over()
    rig = begin(NEW)
    flip(rig, rig.take_over())
    document = rig.store.leases.read()
    assert document is not None
    rig.renewal.refresh(document)
    again = rig.take_over()
    assert again.layout is again.wanted
    assert {image.epoch for image in again.images["record"]} == {rig.version}
    following = begin(NEW)
    assert {image.epoch for image in following.take_over().images["record"]} == {following.version}


# -- generations that are over -----------------------------------------------------------------------


def test_a_crash_right_behind_the_flip_leaves_no_generation_open(begin: Begin) -> None:
    """P3: the next take-over shuts all generations of the bridge but the one in force, and of no other bridge."""
    first = begin(OLD, "record", "audit")
    first.take_over()
    first.partitions.insert_one({"_id": f"{BRIDGE}-2/record/0/0", "epoch": Int64(1), "state": "flowing"})
    first.store.partitions.prepare({"record": None}, 10, 1, first.version)
    layout = {"generation": 1, "partitions": NEW}
    first.database["leases"].update_one({"_id": BRIDGE}, {"$set": layout})
    rig = begin(NEW)
    rig.take_over()
    old = {**generation(rig, 0), **generation(rig, 10)}
    other = old.pop(f"{BRIDGE}-2/record/0/0")
    assert other["state"] == "flowing"
    assert len(old) == 2 * OLD + 1
    assert {(each["epoch"], each["state"]) for each in old.values()} == {(rig.version, "closed")}
    assert {each["state"] for each in generation(rig, 1).values()} == {"flowing"}


def test_a_flip_shuts_the_generation_of_handlers_that_are_not_there(begin: Begin) -> None:
    """P3: they may come back, but in the new generation only."""
    begin(OLD, "record", "audit").take_over()
    rig = begin(NEW)
    takeover = rig.take_over()
    draining.check_can_drain(rig.options, rig.handlers, takeover)
    flip(rig, takeover)
    assert {each["state"] for each in generation(rig, 0).values()} == {"closed"}


def test_a_generation_of_a_later_term_is_not_closed_by_an_older_one(begin: Begin) -> None:
    """P3: closing is guarded by the epoch like everything else."""
    old = begin(OLD)
    later = begin(OLD)
    later.take_over()
    old.store.partitions.close_others(5, old.version)
    assert {each["state"] for each in generation(old, 0).values()} == {"flowing"}
    later.store.partitions.close_others(5, later.version)
    assert {each["state"] for each in generation(old, 0).values()} == {"closed"}


def test_a_larger_epoch_anywhere_raises_the_version(begin: Begin) -> None:
    """P4: a lease from a backup; also what a later flip will find must lie below it."""
    rig = begin(OLD)
    ahead = rig.version + (1 << 50)
    rig.store.partitions.prepare({"record": None}, 1, 1, ahead)
    assert rig.take_over().version == rig.version > ahead


# -- handlers that are not there ---------------------------------------------------------------------

CLAIM = {"owner": "a", "first": 1, "last": 1, "ttl": 10_000, "until": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resumeToken": LATER.token, "committed": Int64(1)}, "is ahead of its watermark"),
        ({"claim": CLAIM}, "is claimed"),
        ({"handled": {"owner": "a", "last": Int64(1), "resumeToken": LATER.token}}, "is ahead of its watermark"),
        ({"state": "halted"}, "is halted"),
        ({"state": "paused"}, "is paused"),
    ],
)
def test_a_handler_that_is_not_there_with_work_under_way_refuses_another_layout(
    begin: Begin, change: Document, reason: str
) -> None:
    """P2, P9: what its partitions have done would be done again; the sentence names it and both remedies."""
    before = begin(OLD, "record", "audit")
    before.take_over()
    assert advance(before.store.subscriptions, "audit", before.version, DRAINED.token, DRAINED.cluster_time, "f")
    before.partitions.update_one({"_id": f"{BRIDGE}/audit/0/1"}, {"$set": change})
    rig = begin(NEW)
    with pytest.raises(LayoutError) as caught:
        draining.check_can_drain(rig.options, rig.handlers, rig.take_over())
    text = str(caught.value)
    assert f"partition 1 of audit, which has no handler here, {reason}" in text
    assert "Register" in text
    assert f"{BRIDGE}/audit" in text
    assert rig.options.database in text

    rig.database["subscriptions"].delete_one({"_id": f"{BRIDGE}/audit"})
    rig.partitions.delete_many({"_id": {"$regex": f"^{BRIDGE}/audit/"}})
    draining.check_can_drain(rig.options, rig.handlers, rig.take_over())


def test_a_handler_that_is_not_there_can_begin_nothing_while_the_others_are_drained(begin: Begin) -> None:
    """P2: its last messages would move it on behind the check."""
    before = begin(OLD, "record", "audit")
    before.take_over()
    rig = begin(NEW)
    rig.take_over()
    where = before.store.partitions.partition_id("audit", 0, 0)
    claimed = before.store.claims.take(where, owner="a", first=1, last=1, version=before.version, token=LATER.data)
    assert claimed is None


def test_a_handler_that_is_not_there_does_not_hinder_a_term_that_keeps_the_layout(begin: Begin) -> None:
    """A deploy without it is no change of layout, whatever it has left."""
    before = begin(OLD, "record", "audit")
    before.take_over()
    before.partitions.update_one({"_id": f"{BRIDGE}/audit/0/1"}, {"$set": {"state": "halted"}})
    takeover = begin(OLD).take_over()
    assert takeover.layout is takeover.wanted
    assert before.documents()[f"{BRIDGE}/audit/0/1"]["state"] == "halted"
