"""Parked keys on a real replica set: what waits behind what, how it is released, and who may come in between."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from bson import Int64
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import Changes
from mongo_celery.bridge.state.claims import PARKED_MAX, Claims, record_session
from mongo_celery.bridge.state.dead_letters import FAILED, REPLAYS_MAX
from mongo_celery.bridge.state.replays import Replays
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.table import Table
from tests.fixtures.process import wait_for
from tests.rig.changes import BRIDGE, HANDLER, Document, hash_of, number_of, token
from tests.rig.term import around, open_transaction
from tests.rig.worker import WantedError, WorkerRig, worker_on


@pytest.fixture
def parking(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[WorkerRig]:
    with worker_on(mongo_client, mongo_url, state_database, failure_policy="park_key") as made:
        yield made


def waiting(parking: WorkerRig, *keys: str) -> None:
    """Changes of key `bad`, the first of which has failed, and of some others."""
    parking.bad = {"bad"}
    parking.flow(*(keys or ("bad", "good", "bad", "other", "bad")))
    parking.bad = set()


def test_changes_of_a_parked_key_wait_behind_it_and_others_flow(parking: WorkerRig) -> None:
    waiting(parking)
    assert parking.letters == [("bad", 1, "parked"), ("bad", 3, "parked_behind"), ("bad", 5, "parked_behind")]
    assert parking.got == [("good", 2), ("other", 4)]
    assert [each[:2] for each in parking.started] == [("bad", 1), ("good", 2), ("other", 4)]
    assert parking.keys == {hash_of("bad")}
    assert (parking.rig.image.committed, parking.rig.image.parked_keys) == (5, 1)
    behind = parking.find(3).letters[0]
    assert (behind.attempts, behind.traceback, behind.parked) == (0, "", hash_of("bad"))


def test_a_worker_ends_the_transaction_with_which_a_dead_one_has_locked_the_partition(
    parking: WorkerRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = parking.rig

    def run() -> bool:
        with suppress(Ignore):
            parking.run(1, "good")
        return bool(parking.got)

    claim = rig.claim(owner="dead", ttl=0.1)
    with rig.documents.database.client.start_session() as session:
        assert record_session(Table(rig.documents, 1.0), claim, session)
        session.start_transaction()
        rig.documents.update_one({"_id": rig.where}, {"$set": {"note": 1}}, session=session)
        wait_for(run, message="one message after another comes to nothing, as long as the partition is locked")
        with pytest.raises(OperationFailure):
            session.commit_transaction()
    assert parking.got == [("good", 1)]
    assert [record for record in caplog.records if getattr(record, "event", "") == "transaction_ended"]


def test_a_partition_that_is_full_of_parked_keys_halts_and_says_what_to_do(parking: WorkerRig) -> None:
    parking.rig.spoil(parkedKeys=[{"hash": Int64(number)} for number in range(PARKED_MAX)])
    parking.bad = {"bad"}
    with pytest.raises(WantedError):
        parking.run(1, "bad")
    image = parking.rig.image
    assert (image.state, image.committed, parking.letters) == ("halted", 0, [])
    assert image.error is not None
    assert all(word in image.error for word in (f"dead-letters list {HANDLER}", f"retry {HANDLER}", "WantedError"))
    parking.rig.spoil(parkedKeys=[{"hash": Int64(number)} for number in range(PARKED_MAX - 1)])
    assert parking.rig.partitions.retry(image)
    parking.flow("bad")
    assert parking.letters == [("bad", 1, "parked")]


def test_a_change_at_which_a_partition_halted_waits_behind_its_key_when_it_is_set_aside(parking: WorkerRig) -> None:
    waiting(parking, "bad")
    claim = parking.rig.claim(2)
    assert parking.rig.claims.halt(claim, token(2), "key", "cannot be stored")
    letter = {**parking.rig.letters.find_one({}, {"at": 0}), "_id": f"{BRIDGE}/{HANDLER}/{token(2)['_data']}"}  # type: ignore[dict-item]
    letter = {**letter, "cause": "set_aside", "resumeToken": token(2)}
    del letter["parked"]
    assert parking.rig.partitions.set_aside(parking.rig.image, letter, parking.rig.store.dead_letters.collection)
    assert [cause for _, _, cause in parking.letters] == ["parked", "parked_behind"]
    assert parking.find().parked[HANDLER, hash_of("bad")].count == 2


def test_a_change_that_cannot_wait_as_a_dead_letter_halts_and_the_log_says_so(
    parking: WorkerRig, caplog: pytest.LogCaptureFixture
) -> None:
    """P9: here a validator refuses each letter."""
    caplog.set_level(logging.INFO, "mongo_celery.worker")
    waiting(parking, "bad", "bad")
    letters = parking.rig.letters
    letters.database.command("collMod", letters.name, validator={"none": True})
    with pytest.raises(Ignore):
        parking.run(3, "bad")
    image = parking.rig.image
    assert (image.state, image.committed) == ("halted", 2)
    records = [record for record in caplog.records if getattr(record, "event", "") == "change_behind"]
    assert [record.__dict__["policy"] for record in records] == ["dead_letter", "halt"]


def test_a_replay_of_any_letter_replays_all_that_wait_for_its_key_in_order(parking: WorkerRig) -> None:
    """P2: from the first on; the last one releases the key, and later changes run."""
    waiting(parking)
    dry = parking.ask(5, dry_run=True)
    assert parking.requests == []
    asked = parking.ask(5)
    assert [replace(each, result="done") for each in dry] == asked
    first, last = asked
    assert (first.result, first.follow, last.result) == ("done", 1, "done")
    assert [each.letter.endswith(token(1)["_data"]) for each in parking.requests] == [True]
    assert [each.result for each in parking.ask(3)] == ["unchanged", "unchanged"]
    parking.drain()
    assert parking.got[2:] == [("bad", 1), ("bad", 3), ("bad", 5)]
    assert (parking.letters, parking.keys, parking.requests) == ([], frozenset(), [])
    parking.flow("bad")
    assert parking.got[-1] == ("bad", 6)
    fences = [fence for key, _, fence in parking.started if key == "bad"]
    assert fences == sorted(set(fences)), "no target refuses any of them, and each refuses those before"
    assert fences[-1] - fences[-2] >= REPLAYS_MAX - 1


def test_nothing_of_a_parked_key_overtakes_what_waits_for_it(parking: WorkerRig) -> None:
    """P3: its newer token would have targets refuse the release, so it fails at its start, and says why."""
    waiting(parking, "good", "bad", "bad")
    document = parking.rig.letters.find_one({"cause": "parked"}) or {}
    name = {"_id": f"{BRIDGE}/{HANDLER}/{token(1)['_data']}", "resumeToken": token(1), "cause": FAILED}
    parking.rig.letters.insert_one({**{key: document[key] for key in document if key != "parked"}, **name})
    assert [each.result for each in parking.ask(1, over_newer=True)] == ["done"]
    tried = len(parking.started)
    with pytest.raises(CommandRefusedError):
        parking.replay()
    assert (len(parking.started), parking.rig.image.claim) == (tried, None)
    parking.ask(2)
    parking.drain()
    assert parking.got[1:] == [("bad", 2), ("bad", 3)]
    assert [each.result for each in parking.ask(1, over_newer=True)] == ["done"]
    parking.drain()
    assert (parking.letters, parking.requests) == ([], [])


def test_an_existing_document_waits_at_its_place(parking: WorkerRig) -> None:
    parking.existing = {2}
    waiting(parking, "bad", "bad", "bad")
    assert {cause for _, number, cause in parking.letters if number == 2} == {"parked_behind"}
    asked = parking.ask()
    assert [(each.result, each.follow) for each in asked] == [("done", 0)] * 3, "all of them were chosen"
    parking.drain()
    assert parking.got == [("bad", 1), ("bad", 2), ("bad", 3)]
    assert (parking.letters, parking.keys) == ([], frozenset())


def test_a_change_that_comes_in_while_a_key_is_released_joins_it(parking: WorkerRig) -> None:
    waiting(parking, "bad", "bad")
    parking.ask()
    with pytest.raises(Ignore):
        parking.run(3, "bad")
    parking.replay()
    with pytest.raises(Ignore):
        parking.run(4, "bad")
    assert parking.letters == [("bad", number, "parked_behind") for number in (2, 3, 4)]
    parking.drain()
    assert parking.got == [("bad", number) for number in (1, 2, 3, 4)]
    assert (parking.letters, parking.keys) == ([], frozenset())


def test_a_failure_stops_the_release_and_what_is_behind_it_waits_on(parking: WorkerRig) -> None:
    waiting(parking)

    def fail_at_three(changes: Changes) -> None:
        if number_of(changes[0]) == 3:
            raise WantedError("still")

    parking.handle = fail_at_three
    parking.ask()
    parking.drain()
    assert parking.letters == [("bad", 3, "parked"), ("bad", 5, "parked_behind")]
    assert parking.find(3).letters[0].error == "WantedError: still"
    parking.flow("bad")
    assert parking.letters[-1] == ("bad", 6, "parked_behind")
    parking.handle = bool
    parking.ask(6)
    parking.drain()
    assert [each for each in parking.got if each[0] == "bad"] == [("bad", number) for number in (1, 3, 5, 6)]
    assert (parking.letters, parking.keys) == ([], frozenset())


def test_a_first_letter_that_cannot_be_replayed_holds_its_key_until_it_is_discarded(parking: WorkerRig) -> None:
    waiting(parking)
    parking.rig.letters.update_one({"cause": "parked"}, {"$set": {"kept": "name"}})
    results = parking.ask()
    assert [each.result for each in results] == ["refused"] * 3
    assert parking.requests == []
    assert [each.follow for each in parking.discard(1, dry_run=True)] == [2]
    assert (len(parking.letters), parking.requests) == (3, [])
    (discarded,) = parking.discard(1)
    assert (discarded.result, discarded.follow) == ("done", 2)
    parking.flow("bad")
    parking.drain()
    assert [each for each in parking.got if each[0] == "bad"] == [("bad", 3), ("bad", 5), ("bad", 6)]
    assert (parking.letters, parking.keys) == ([], frozenset())


_DAMAGES: list[tuple[Document, bool]] = [
    ({"$unset": {"traceback": ""}}, True),
    ({"$unset": {"key": "", "attempts": "", "at": ""}}, True),
    ({"$unset": {"replays": ""}}, True),
    ({"$set": {"passedOver": "damaged"}}, True),
    ({"$unset": {"resumeToken": ""}}, False),
    ({"$set": {"fencingToken": None}}, False),
    ({"$set": {"replay": "damaged"}}, False),
]


def test_a_letter_whose_partition_is_locked_is_discarded_later(parking: WorkerRig) -> None:
    waiting(parking)
    with (
        open_transaction(parking.bridge.client, parking.bridge.options.database, parking.rig.image.id),
        pytest.raises(CommandRefusedError) as refused,
    ):
        parking.discard()
    assert isinstance(refused.value.__cause__, PyMongoError)
    assert is_lock(refused.value.__cause__)

    def has_discarded() -> bool:
        with suppress(CommandRefusedError):  # the command's own transaction may stay open for a minute
            parking.discard()
        return not parking.letters

    wait_for(has_discarded, 120.0)


@pytest.mark.parametrize(("damage", "may_be_replayed"), _DAMAGES, ids=str)
def test_damaged_letters_release_their_key_when_they_are_replayed_or_discarded(
    parking: WorkerRig, damage: Document, may_be_replayed: bool
) -> None:
    """P12, P16, P17: a field that nobody needs for it keeps no key parked."""
    waiting(parking)
    parking.rig.letters.update_many({}, damage)
    results = parking.ask() if may_be_replayed else parking.discard()
    assert [each.result for each in results] == ["done"] * 3
    parking.drain()
    replayed = [("bad", 1), ("bad", 3), ("bad", 5)] if may_be_replayed else []
    assert [each for each in parking.got if each[0] == "bad"] == replayed
    assert (parking.letters, parking.keys, parking.requests) == ([], frozenset(), [])


def test_the_last_replay_and_the_next_change_do_not_pass_each_other(
    parking: WorkerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: a change that was claimed before, and would wait behind, while an operator discards the last letter."""
    waiting(parking, "bad")

    def discard() -> None:
        assert parking.rig.store.replays.discard(parking.find(1).letters[0].document_id) == "done"

    around(monkeypatch, (Claims, "set_aside"), discard)
    with pytest.raises(Ignore):
        parking.run(2, "bad")
    assert (parking.letters, parking.keys) == ([], frozenset()), "it is not set aside behind nothing"
    image = parking.rig.image
    assert (image.committed, image.claim, image.crashes) == (1, None, 0)
    parking.flow("bad")
    assert parking.got == [("bad", 2)]


def test_two_that_remove_the_last_letters_at_once_leave_no_key_parked(
    parking: WorkerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: each would see the other's letter, and leave the key to it."""
    waiting(parking, "bad", "bad")
    first, last = (each.document_id for each in parking.find().letters)
    replays, layout = parking.rig.store.replays, Layout(0, 1, "")

    def discard_the_other() -> None:
        assert replays.discard(last, layout) == "done"

    around(monkeypatch, (Replays, "_release_key"), discard_the_other)
    assert replays.discard(first, layout) == "done"
    assert (parking.letters, parking.keys, parking.requests) == ([], frozenset(), [])


def test_a_later_letter_gives_way_to_an_earlier_one_and_uses_no_token_a_second_time(parking: WorkerRig) -> None:
    """P2, P3: a first start of it, which may go on somewhere, must not be able to write over the second."""
    waiting(parking, "bad", "bad")
    last = parking.find(2).letters[0]
    assert last.place is not None
    assert parking.request(last) == "done"
    with pytest.raises(Ignore):
        parking.replay()
    assert (len(parking.started), parking.rig.image.claim) == (1, None)
    assert [each.letter[-8:] for each in parking.requests] == [token(1)["_data"]]
    parking.drain()
    assert parking.got == [("bad", 1), ("bad", 2)]
    assert parking.started[-1] == ("bad", 2, last.place.fencing_token + 2)


def test_a_replay_that_was_replaced_releases_nothing(parking: WorkerRig) -> None:
    """P3: a worker that wakes up late neither removes its letter, nor asks for the next."""
    waiting(parking, "bad", "bad")
    parking.ask()

    def be_replaced(_changes: Changes) -> None:
        parking.handle = bool
        parking.rig.lapse()
        parking.replay()

    parking.handle = be_replaced
    with pytest.raises(Ignore):
        parking.replay()
    assert parking.got == [("bad", 1), ("bad", 1)]
    assert parking.letters == [("bad", 2, "parked_behind")]
    parking.drain()
    assert (parking.got[-1], parking.keys) == (("bad", 2), frozenset())


def test_a_change_that_a_rewind_brings_again_waits_in_its_place(parking: WorkerRig) -> None:
    waiting(parking, "good", "bad", "bad")
    parking.ask()
    parking.rig.spoil(committed=Int64(0), resumeToken=None)
    before = parking.find(2).letters[0]
    parking.flow("bad", "bad", "bad")  # of another key than before: as if it had been done in time
    assert parking.letters == [("bad", 1, "parked_behind"), ("bad", 2, "parked"), ("bad", 3, "parked_behind")]
    again = parking.find(2).letters[0]
    assert "WantedError" in again.traceback
    for each in (before, again):  # why the key is parked
        assert (each.error, each.traceback, each.attempts) == ("WantedError: as asked", before.traceback, 1)
    assert before.place is not None
    assert again.place is not None
    assert again.place.fencing_token > before.place.fencing_token
    parking.drain()
    assert [each for each in parking.got if each[0] == "bad"] == [("bad", number) for number in (1, 2, 3)]
    assert (parking.letters, parking.keys) == ([], frozenset())
