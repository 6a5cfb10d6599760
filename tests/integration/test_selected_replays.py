"""Changes that are to run again, on a real replica set: which ones, as what, with which tokens, and all or none."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import CommandRefusedError
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.bridge.operations import selected_replays
from mongo_celery.bridge.operations.places import parse_place
from mongo_celery.bridge.operations.rewinding import read_history
from mongo_celery.bridge.operations.selected_replays import Asking, ReplayPlan, plan_replay, replay
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, SELECTED
from mongo_celery.bridge.state.replays import Replays
from mongo_celery.bridge.stream.source import Selector
from mongo_celery.mongo.oplog import read_oplog
from tests.fixtures.process import wait_for
from tests.integration.positions_rig import HANDLER, Stage, data_of, staged

Document = dict[str, Any]


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[Stage]:
    """Give a stage that is led: nobody has to stop for a replay. A time tells its changes from the set's start."""
    with MongoClient[Document](mongo_url) as client:
        began = read_oplog(client).first.time
    wait_for(lambda: time.time() >= began + 1)
    with staged(mongo_url, database, state_database) as made:
        yield made


def asking(stage: Stage, start: str = "", until: str | None = None, **options: Any) -> Asking:
    """A range: all of the stage's changes by default."""
    first = stage.events[0]["clusterTime"].as_datetime().isoformat()
    end = None if until is None else parse_place(until)
    return Asking(HANDLER, parse_place(start or first), end, **options)


def plan(stage: Stage, *arguments: Any, **options: Any) -> ReplayPlan:
    return plan_replay(stage.bridge.wiring, asking(stage, *arguments, **options))


def letters_of(stage: Stage) -> list[Document]:
    return list(stage.state["dead_letters"].find().sort("_id"))


def tokens_of(found: ReplayPlan) -> list[str]:
    return [letter["resumeToken"]["_data"] for letter in found.letters]


def test_a_range_becomes_dead_letters_whose_replays_are_asked_for(stage: Stage) -> None:
    """The bytes are kept, nothing moves, and who asked for it is known."""
    before = [stage.partition(index) for index in (0, 1)]
    found = plan(stage)
    assert tokens_of(found) == [data_of(event["_id"]) for event in stage.events]
    assert not letters_of(stage), "a plan changes nothing"
    replay(stage.bridge.wiring, found, over_newer=False, reason="mails were lost")
    letters = letters_of(stage)
    assert [letter["change"]["documentKey"] for letter in letters] == [event["documentKey"] for event in stage.events]
    assert {letter["cause"] for letter in letters} == {SELECTED}
    assert all("mails were lost" in letter["error"] and letter["at"] for letter in letters)
    asked = stage.store.replays.read()
    assert [each.letter for each in asked] == [letter["_id"] for letter in letters]
    assert [each.partition for each in asked] == [stage.index(event) for event in stage.events]
    assert [stage.partition(index) for index in (0, 1)] == before
    (shown,) = read_status(stage.bridge.wiring)["subscriptions"]
    assert (shown["dead_letters"], shown["replaying"]) == (len(letters), len(letters)), "nobody has to look at them"
    stage.state["replays"].update_one({}, {"$set": {"failed": True}})
    assert stage.store.replays.count_selected() == {HANDLER: len(letters) - 1}
    (act,) = read_history(stage.bridge.wiring)
    assert (act["act"], act["count"], act["reason"]) == ("replay", len(letters), "mails were lost")


def test_a_key_a_place_and_a_time_narrow_it(stage: Stage) -> None:
    """Behind a token, before a time; of one document."""
    wanted = stage.events[2]
    found = plan(stage, key=str(wanted["documentKey"]["_id"]))
    assert tokens_of(found) == [data_of(wanted["_id"])]
    behind = plan(stage, data_of(wanted["_id"]))
    assert tokens_of(behind) == [data_of(event["_id"]) for event in stage.events[3:]]
    first = stage.events[0]["clusterTime"].as_datetime().isoformat()
    assert not plan(stage, "oldest", first).letters
    with pytest.raises(CommandRefusedError, match="nothing lies between"):
        plan(stage, until=first)
    assert not plan(stage, source=f"{stage.data.name}.others").letters


def test_what_is_yet_to_be_handled_is_left_out(stage: Stage) -> None:
    """P2: its replay would be in front of it."""
    stage.data["orders"].insert_one({})
    found = plan(stage)
    assert (len(found.letters), found.pending) == (len(stage.events), 1)


def test_no_replay_writes_over_what_its_change_or_a_later_one_has_written(stage: Stage) -> None:
    """P3: the tokens lie below those of every claim since the second of the change, and grow with the stream."""
    found = plan(stage)
    for index in (0, 1):
        mine = [letter for letter in found.letters if letter["partition"] == index]
        fences = [letter["fence"] for letter in mine]
        assert all(later - earlier >= REPLAYS_MAX for earlier, later in pairwise(fences))
        for letter, event in zip(mine, stage.of(index), strict=True):
            assert letter["fence"] + REPLAYS_MAX < event["clusterTime"].time << 20
    # The changes were handled in this layout, by claims that followed them.
    letter = found.letters[-1]
    of_replay = Fence("shop/summarise", letter["generation"], letter["partition"], letter["fence"] + REPLAYS_MAX)
    last = Fence("shop/summarise", stage.generation, letter["partition"], stage.partition(letter["partition"])["fence"])
    assert not of_replay.admits(last.stamp(None))
    assert of_replay.admits(None)


def test_a_change_from_before_the_layout_is_below_every_stamp(stage: Stage) -> None:
    """P3: its partitions were others, and their stamps would not tell."""
    later = stage.events[-1]["clusterTime"].time + 3600 << 20
    stage.state["subscriptions"].update_one({}, {"$set": {"layout.generation": later}})
    for index in (0, 1):
        document = stage.partition(index)
        stage.state["partitions"].insert_one({**document, "_id": f"shop/{HANDLER}/{later}/{index}"})
    assert {letter["generation"] for letter in plan(stage).letters} == {0}


def test_killed_before_the_replays_are_asked_for_it_can_be_repeated(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or none: letters alone run nothing, and are replaced; what is asked for is not asked for again."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Replays, "request_all", dies)
        with pytest.raises(KeyboardInterrupt):
            replay(stage.bridge.wiring, plan(stage, data_of(stage.events[2]["_id"])), over_newer=False, reason=None)
    assert not stage.store.replays.read()
    found = plan(stage)
    replay(stage.bridge.wiring, found, over_newer=False, reason=None)
    assert len(stage.store.replays.read()) == len(stage.events) == len(letters_of(stage))
    assert [letter["fence"] for letter in letters_of(stage)] == [letter["fence"] for letter in found.letters]
    with pytest.raises(CommandRefusedError, match=f"{len(stage.events)} of these changes are dead letters"):
        plan(stage)
    with pytest.raises(CommandRefusedError, match="dead letters of summarise already"):
        replay(stage.bridge.wiring, found, over_newer=False, reason=None)


def test_nothing_of_a_parked_key_is_asked_for(stage: Stage) -> None:
    """P3: what waits for it comes first; also where it was parked since the plan was made."""
    found = plan(stage)
    first = found.letters[0]
    where = {"_id": stage.partition_id(first["partition"])}
    stage.state["partitions"].update_one(where, {"$set": {"parkedKeys": [first["hash"]]}})
    before = stage.everything()
    with pytest.raises(CommandRefusedError, match=re.escape(f"1 of these changes belong to keys of {HANDLER} that")):
        plan(stage)
    with pytest.raises(CommandRefusedError, match=re.escape(f"the first is {first['key']}: what waits")):
        replay(stage.bridge.wiring, found, over_newer=True, reason=None)
    assert stage.everything() == before
    others = plan(stage, data_of(stage.events[0]["_id"]))
    assert len(others.letters) == len(stage.events) - 1


def test_two_who_ask_at_once_ask_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds in its transaction that it was done."""
    found = plan(stage)
    monkeypatch.setattr(selected_replays, "_refuse_known", lambda *_: None)
    replay(stage.bridge.wiring, found, over_newer=False, reason=None)
    with pytest.raises(CommandRefusedError, match="are being replayed already"):
        replay(stage.bridge.wiring, found, over_newer=True, reason=None)
    assert not any(each.over_newer for each in stage.store.replays.read())


def test_a_handler_that_was_sent_back_meanwhile_gets_its_changes_anyway(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may take long to say yes; also between that and the transaction."""
    found = plan(stage)
    stage.release()
    stage.rewind(data_of(stage.events[2]["_id"]))
    acts = read_history(stage.bridge.wiring)
    with pytest.raises(CommandRefusedError, match="was sent back, or has a new layout"):
        replay(stage.bridge.wiring, found, over_newer=False, reason=None)
    assert not letters_of(stage)
    original = selected_replays._refuse_moved
    looks = iter([True, False])
    with monkeypatch.context() as patch:
        patch.setattr(selected_replays, "_refuse_moved", lambda *args: next(looks) or original(*args))
        with pytest.raises(CommandRefusedError, match="was sent back, or has a new layout"):
            replay(stage.bridge.wiring, found, over_newer=False, reason=None)
    assert not stage.store.replays.read()
    assert read_history(stage.bridge.wiring) == acts


def test_what_is_too_much_or_unknown_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: one sentence, and nothing changes."""
    before = stage.everything()
    with pytest.raises(CommandRefusedError, match=re.escape("(did you mean 'summarise'?)")):
        plan_replay(stage.bridge.wiring, Asking("sumarise", parse_place("oldest")))
    with pytest.raises(CommandRefusedError, match="lies before the oldest entry"):
        plan(stage, "2001-01-01")
    monkeypatch.setattr(selected_replays, "REQUESTS_MAX", 3)
    with pytest.raises(CommandRefusedError, match="More than 3 changes of summarise lie there"):
        plan(stage)
    assert stage.everything() == before


def test_what_the_handler_would_not_get_is_no_part_of_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its filter decides, as in the listener; what it cannot decide is counted and left out."""
    monkeypatch.setattr(Selector, "asks_for", lambda *_: False)
    assert not plan(stage).letters

    def fails(*_: Any) -> bool:
        raise ValueError("no")

    monkeypatch.setattr(Selector, "asks_for", fails)
    found = plan(stage)
    assert (len(found.letters), found.refused) == (0, len(stage.events))
