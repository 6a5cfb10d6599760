"""
Claims and outcomes against a real replica set, one guard after the other.

Rules 1 to 7 are those of `mongo_celery/bridge/state/claims.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import bson
import pytest
from bson import Int64, Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery.bridge.existing import make_token
from mongo_celery.bridge.state.claims import Claim, build_advance, build_finished, build_handled
from mongo_celery.bridge.state.partitions import visible_state
from mongo_celery.bridge.worker.outcome import retry_time
from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.expressions import LONGEST_SECONDS, SHIFT
from mongo_celery.mongo.steps import run_sync
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.rights import STATE, UrlOf
from tests.rig.changes import TERM, Document, letter_of, token
from tests.rig.partition import NASTY, PartitionRig, make_partition


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> PartitionRig:
    return make_partition(mongo_client, state_database)


# -- the claim ---------------------------------------------------------------------------------------


def test_every_claim_raises_the_fence_to_at_least_the_cluster_time(
    rig: PartitionRig, mongo_client: MongoClient[Document]
) -> None:
    """P4, rule 1: first delivery, redelivery and retry hold different fencing tokens."""
    seconds = mongo_client.admin.command("ping")["operationTime"].time
    fences = []
    for number in range(5):
        fences.append(rig.claim(owner=f"o{number}").fencing_token)
        rig.claims.relinquish(rig.where, f"o{number}")
    assert fences == sorted(set(fences))
    assert fences[0] >= seconds * SHIFT
    rig.spoil(fencingToken=1 << 60)
    assert rig.claim().fencing_token == (1 << 60) + 1, "also if it is ahead of the clock"


_REFUSED: dict[str, tuple[Document, Document, Document | None]] = {
    "an old term": ({"committed": 0}, {"term": TERM - 1}, {}),
    "a term that nobody led with": ({"committed": 0}, {"term": TERM + 1}, {}),
    "a change that is done": ({"committed": 1}, {"first": 1, "token": "829"}, {"first": 2, "token": "829"}),
    "a change that is not yet due": ({"committed": 1}, {"first": 3, "token": "829"}, {"first": 2, "token": "829"}),
    "the committed token": ({"resumeToken": token(5)}, {"token": token(5)["_data"]}, {"token": token(6)["_data"]}),
    "a token before it": ({"resumeToken": token(5)}, {"token": token(4)["_data"]}, None),
    **{state: ({"state": state}, {}, None) for state in ("halted", "paused", "closed")},
}
"""What is stored, a claim that is refused then, and one that is not."""


@pytest.mark.parametrize(("stored", "refused", "taken"), _REFUSED.values(), ids=_REFUSED)
def test_a_claim_is_refused(rig: PartitionRig, stored: Document, refused: Document, taken: Document | None) -> None:
    """Rule 2, P2, P9: a message of another term, a change that is not the next one, a partition that stands still."""
    rig.spoil(**stored)
    assert rig.try_claim(**refused) is None
    assert taken is None or rig.try_claim(**taken) is not None


def test_what_is_handled_cannot_be_claimed_again(rig: PartitionRig) -> None:
    """P6: also when its claim has lapsed and its commit is late."""
    claim = rig.claim()
    assert rig.claims.handle(claim, 1, token(1))
    rig.lapse()
    assert rig.try_claim(owner="other") is None


def test_a_live_claim_keeps_others_out_until_it_lapses(rig: PartitionRig) -> None:
    """Rule 1, P10: by the server's clock alone."""
    started = time.monotonic()
    rig.claim(ttl=1.0)
    wait_for(lambda: rig.try_claim(owner="other"))
    assert time.monotonic() - started > 0.95


def test_replacing_a_lapsed_claim_counts_a_crash_and_ends_runs_of_several(rig: PartitionRig) -> None:
    """P6: the guilty change is found by running one change at a time up to the last one of the lapsed run."""
    rig.claim(1, 7)
    rig.lapse()
    second = rig.claim(1, 3, owner="second")
    assert second.crashes == 1
    assert rig.document["oneByOneUntil"] == 7
    rig.lapse()
    assert rig.claim(1, 1, owner="third").crashes == 2
    assert rig.document["oneByOneUntil"] == 7, "a shorter run does not lower it"


def test_a_change_that_waits_for_infrastructure_is_charged_nothing(rig: PartitionRig) -> None:
    """P14: neither retries nor crashes move; since when it waits stays, and how often grows until another outcome."""
    assert rig.claims.wait(rig.claim(), delay=0.0, cause="$first", doubtful=False)
    first = rig.document["retry"]["waiting"]
    again = wait_for(lambda: rig.try_claim(owner="again"))
    assert (again.retries, again.crashes, again.waits, again.doubts) == (0, 0, 1, 0)
    assert rig.claims.wait(again, delay=0.0, cause="second", doubtful=True)
    image = rig.image
    assert image.waiting is not None
    assert (image.waiting["since"], image.waiting["cause"]) == (first["since"], "second")
    assert (image.retries, image.crashes, image.error) == (0, 0, None)
    third = wait_for(lambda: rig.try_claim(owner="third"))
    assert (third.waits, third.doubts) == (2, 1)
    assert rig.claims.park(third, delay=0.0, not_before=None, error="a retry of its own")
    assert rig.image.waiting is None
    assert wait_for(lambda: rig.try_claim(owner="fourth")).waits == 0


def test_a_bridges_rights_are_enough_to_end_the_transaction_of_a_lapsed_claim_only(
    guarded_url: UrlOf, make_client: MakeClient
) -> None:
    """The dead worker was another client of the same user. A live claim's transaction is left alone."""
    dead, successor = (make_client(guarded_url("bridge")) for _ in range(2))
    rig = make_partition(successor, STATE)
    locked = dead[STATE]["locked_by_the_dead"]  # the servers are those of other tests, too
    locked.insert_one({"_id": 1})
    with dead.start_session() as session:
        rig.claim(session=session.session_id["id"])
        session.start_transaction()
        locked.update_one({"_id": 1}, {"$set": {"n": 1}}, session=session)
        assert not rig.claims.end_transactions([rig.where])
        rig.lapse()
        assert rig.claims.end_transactions([rig.where]) == [rig.where]
        assert successor[STATE]["locked_by_the_dead"].update_one({"_id": 1}, {"$set": {"n": 2}}).modified_count == 1
    rig.claim(owner="another")
    rig.lapse()
    assert not rig.claims.end_transactions([rig.where])


def test_what_is_counted_of_an_existing_document_falls_on_no_other_change(rig: PartitionRig) -> None:
    """P14, rule 6: one that was not stored comes again elsewhere; the next change begins with nothing and at once."""
    first, again = (make_token(Timestamp(1, 1), TERM - number, 1) for number in (1, 2))
    parked = rig.claim(1, 5, token=first)
    assert rig.claims.park(parked, delay=600, not_before=None, error="later")
    assert rig.try_claim(1, token=first) is None, "it is the same change, and waits"
    assert not rig.claims.withdraw(rig.where, "me")
    rig.spoil(**{"retry.notBefore": None, "retry.crashes": 9})
    same = rig.claim(1, 5, token=first)
    assert (same.retries, same.crashes) == (1, 9)
    assert rig.claims.wait(same, delay=600, cause="away", doubtful=True)
    other = rig.claim(1, 3, token=again, owner="other")
    assert (other.retries, other.crashes, other.waits, other.doubts) == (0, 0, 0, 0)
    rig.lapse()
    change = rig.claim(1, 2, owner="third")
    assert (change.retries, change.crashes, rig.document["oneByOneUntil"]) == (0, 0, None), "its lapse was of the other"
    assert rig.document["retry"]["lapsed"] == []
    rig.lapse()
    assert rig.claim(1, 2, owner="fourth").crashes == 1, "a change of the stream is read again as it is"


def test_what_an_older_term_has_counted_of_an_existing_document_keeps_nothing_waiting(rig: PartitionRig) -> None:
    """P14: unless it is stored, or the partition has halted there."""
    data = make_token(Timestamp(1, 1), TERM, 1)
    claim = rig.claim(1, 5, token=data)
    assert rig.claims.crash(claim, "killed")
    claim = rig.claim(1, 1, token=data)
    assert rig.claims.park(claim, delay=600, not_before=None, error="later")
    mine = rig.image
    assert (mine.retries, mine.crashes, visible_state(mine)) == (1, 1, "retrying")
    theirs = rig.take_over(TERM + 1)
    assert (theirs.retries, theirs.crashes, theirs.error, visible_state(theirs)) == (0, 0, None, "flowing")
    rig.spoil(stored={"to": data, "since": datetime.now(UTC), "reason": "parked"})
    assert (rig.image.retries, visible_state(rig.image)) == (1, "retrying"), "it is stored, and the same change"
    rig.spoil(stored=None, halted={"resumeToken": {"_data": data}, "key": "1"}, state="halted")
    assert rig.image.error == "later"


def test_relinquishing_counts_nothing_and_touches_nobody_elses_claim(rig: PartitionRig) -> None:
    """A claim whose answer was lost: no attempt, no crash; an answered `handled` stays."""
    claim = rig.claim()
    assert not rig.claims.relinquish(rig.where, "somebody else")
    assert rig.document["claim"] is not None
    assert rig.claims.relinquish(rig.where, "me")
    again = rig.claim(owner="again")
    assert (again.crashes, again.retries) == (0, 0)
    assert again.fencing_token > claim.fencing_token
    assert rig.claims.handle(again, 1, token(1))
    rig.claims.relinquish(rig.where, "again")
    assert rig.document["claim"] is not None


# -- what counts as a crash --------------------------------------------------------------------------


def test_an_owner_that_lives_withdraws_the_crash_that_was_charged_in_its_name_once(rig: PartitionRig) -> None:
    """P14, rule 5: whoever replaces a lapsed claim cannot know whether its worker lives. Crashes of others stay."""
    rig.claim()
    rig.lapse()
    assert rig.claim(owner="second").crashes == 1
    rig.lapse()
    third = rig.claim(owner="third")
    assert rig.claims.crash(third, "killed")
    assert rig.claims.withdraw(rig.where, "me")
    assert not rig.claims.withdraw(rig.where, "me")
    fourth = rig.claim(owner="fourth")
    assert fourth.crashes == 2
    assert not rig.claims.withdraw(rig.where, "third"), "it said itself that it crashed"
    assert rig.claims.handle(fourth, 1, token(1))
    assert rig.claims.commit(rig.where)
    before = rig.document
    assert not rig.claims.withdraw(rig.where, "second"), "the next change has counts of its own"
    assert rig.document == before


def test_the_lapse_of_a_claim_whose_worker_was_told_to_end_is_no_crash(rig: PartitionRig) -> None:
    """P14: a deploy kills long handlers; the changes of its run still go one by one, since its end was unclean."""
    claim = rig.claim(1, 7)
    assert rig.claims.extend([claim], leaving=True) == []
    rig.lapse()
    second = rig.claim(owner="second")
    assert second.crashes == 0
    assert rig.document["oneByOneUntil"] == 7
    rig.lapse()
    assert rig.claim(owner="third").crashes == 1, "the second was not told to end"


# -- outcomes: who may write them --------------------------------------------------------------------


Outcome = Callable[[PartitionRig, Claim], bool]
OUTCOMES: dict[str, Outcome] = {
    "heartbeat": lambda rig, claim: not rig.claims.extend([claim]),
    "is mine": lambda rig, claim: rig.claims.is_mine(claim),
    "handled": lambda rig, claim: rig.claims.handle(claim, claim.first, token(claim.first)),
    "position": lambda rig, claim: rig.claims.finish(claim, claim.first, token(claim.first)),
    "park": lambda rig, claim: rig.claims.park(claim, delay=1.0, not_before=None, error="e"),
    "wait": lambda rig, claim: rig.claims.wait(claim, delay=1.0, cause="c", doubtful=False),
    "crash": lambda rig, claim: rig.claims.crash(claim, "e"),
    "halt": lambda rig, claim: rig.claims.halt(claim, token(claim.first), "key", "e"),
    "skip": lambda rig, claim: rig.claims.discard(claim, token(claim.first)),
    "dead letter": lambda rig, claim: rig.claims.set_aside(claim, token(claim.first), letter_of(1, 1)),
}
outcome = pytest.mark.parametrize("act", OUTCOMES.values(), ids=OUTCOMES.keys())


@outcome
@pytest.mark.parametrize(
    "moved", [None, {"fencingToken": 1 << 60}, {"claim.owner": "other"}, {"committed": 1}, {"claim": None}], ids=str
)
def test_an_outcome_is_refused_after_a_newer_claim(rig: PartitionRig, act: Outcome, moved: Document | None) -> None:
    """Rule 3, P3: the zombie that wakes after its successor has begun; and each condition for itself."""
    zombie = rig.claim()
    if moved is None:
        rig.lapse()
        rig.claim(owner="successor")
    else:
        rig.spoil(**moved)
    before = rig.document
    assert not act(rig, zombie)
    assert rig.document == before
    assert rig.letters.count_documents({}) == 0


@outcome
@pytest.mark.parametrize("meanwhile", ["nothing", "its lapse", "a take-over"])
def test_an_execution_may_write_its_outcome_as_long_as_nobody_claims(
    rig: PartitionRig, act: Outcome, meanwhile: str
) -> None:
    """Rule 3, P6, P7: executions prove themselves by fence and owner, not by the term; a late heartbeat ends none."""
    claim = rig.claim()
    if meanwhile == "its lapse":
        rig.lapse()
    if meanwhile == "a take-over":
        rig.take_over(TERM + 1)
    assert act(rig, claim)


@pytest.mark.parametrize("name", [name for name in OUTCOMES if name not in {"handled", "is mine"}])
def test_nothing_but_handled_itself_is_accepted_after_handled(rig: PartitionRig, name: str) -> None:
    """P6: what is handled is only committed. (`is mine` is a majority read, and the mark is written with w:1.)"""
    claim = rig.claim()
    assert rig.claims.handle(claim, 1, token(1))
    assert not OUTCOMES[name](rig, claim)


# -- outcomes: what they write -----------------------------------------------------------------------


def test_a_heartbeat_extends_the_claim_by_its_own_ttl(rig: PartitionRig) -> None:
    """Also for a transactional handler, whose claim is longer than the bridge's."""
    claim = rig.claim(ttl=60.0)
    before = rig.document["claim"]["until"]
    rig.spoil(**{"claim.until": before - timedelta(seconds=30)})
    assert rig.claims.extend([claim]) == []
    assert rig.document["claim"]["until"] >= before


def test_a_commit_takes_its_values_from_handled(rig: PartitionRig) -> None:
    """Rule 4: whatever its message says. A repeated `handled` may grow, and a partition that was paused stays so."""
    claim = rig.claim(1, 9)
    for last in (3, 3, 4):
        assert rig.claims.handle(claim, last, token(last))
    rig.spoil(state="paused")
    assert rig.claims.commit(rig.where, 1)
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"], stored["state"]) == (4, token(4), "paused")
    assert stored["claim"] is stored["handled"] is stored["retry"] is None
    assert stored["fencingToken"] == claim.fencing_token


def test_a_commit_without_handled_changes_nothing(rig: PartitionRig) -> None:
    """P3, P11: a commit message carries no authority, neither for a run that is not handled nor for another one."""
    claim = rig.claim()
    before = rig.document
    assert not rig.claims.commit(rig.where, 1) | rig.claims.commit(rig.where)
    assert rig.document == before
    assert rig.claims.handle(claim, 1, token(1))
    assert rig.claims.commit(rig.where, 1)
    assert rig.claims.handle(rig.claim(2, 2), 2, token(2))
    assert [rig.claims.commit(rig.where, first) for first in (1, 3, 2, 2)] == [False, False, True, False]


def test_a_position_that_is_written_inline_is_what_a_commit_would_make_it(rig: PartitionRig) -> None:
    """Rule 7: of a run of which only a part is done, with its retries; in one write."""
    found = []
    for short in (False, True):
        rig.spoil(committed=0, resumeToken=None, retry=None, lastRun=None, handled=None, claim=None)
        assert rig.claims.park(rig.claim(1, 5), delay=-1.0, not_before=None, error="once")
        claim = rig.claim(1, 5)
        write = rig.claims.finish if short else rig.claims.handle
        assert write(claim, 3, token(3))
        assert short or rig.claims.commit(rig.where, 1)
        stored = rig.document
        ran = stored.pop("lastRun")
        assert (ran["last"], type(ran["took"])) == (3, Int64)
        assert ran["claimed"] <= ran["at"]
        assert stored.pop("fencingToken") == claim.fencing_token
        found.append(stored)
    assert found[0] == found[1]
    assert (found[1]["committed"], found[1]["resumeToken"]) == (3, token(3))
    assert rig.try_claim(1) is None
    assert rig.try_claim(4) is not None


def test_a_position_that_is_written_inline_can_be_repeated_until_the_next_claim(rig: PartitionRig) -> None:
    """Rule 7: an answer that was lost is asked for again; not another place, and not under another fence."""
    claim = rig.claim(1, 3)
    written = [rig.claims.finish(claim, last, token(n)) for last, n in ((2, 2), (2, 2), (3, 3), (2, 3))]
    assert written == [True, True, False, False]
    assert rig.document["committed"] == 2
    rig.claim(3)
    before = rig.document
    assert not rig.claims.finish(claim, 2, token(2))
    assert rig.document == before


@pytest.mark.parametrize("how", ["finish", "handle", "advance"])
def test_in_a_transaction_a_success_is_written_once(
    rig: PartitionRig, mongo_client: MongoClient[Document], how: str
) -> None:
    """P6: else a body that is repeated behind its own commit would have its effects twice."""
    claim = rig.claim(1, 3)
    change: Any = {
        "finish": build_finished(claim, 1, token(1)),
        "handle": build_handled(claim, 1, token(1)),
        "advance": build_advance(1, token(1), None),
    }[how]
    with mongo_client.start_session() as session:
        with session.start_transaction():
            assert run_sync(rig.claims.write_inside(session, claim, change))
        assert (how != "handle") == (rig.document["committed"] == 1) == (rig.document["handled"] is None)
        with session.start_transaction():
            assert not run_sync(rig.claims.write_inside(session, claim, change))


def test_the_position_of_a_list_moves_under_its_claim_and_not_under_an_older_one(rig: PartitionRig) -> None:
    """P3: an answer may be lost; what a newer execution has claimed is not moved by the one before."""
    stale = rig.claim(1, 3)
    rig.lapse()
    claim = rig.claim(1, 5, owner="newer")
    assert not rig.claims.advance(stale, 2, token(2))
    assert rig.claims.advance(claim, 2, token(2))
    assert rig.claims.advance(claim, 2, token(2)), "its answer was lost"
    assert (rig.document["committed"], rig.document["claim"]["first"]) == (2, 3)


def test_a_retry_is_parked_by_a_delay_of_the_servers_clock(rig: PartitionRig) -> None:
    """P10: counted, with its error, and not claimed before; a person may end the wait."""
    assert rig.claims.park(rig.claim(), delay=100.0, not_before=None, error="busy")
    image = rig.image
    assert 50 < image.due_in <= 100
    assert image.parked
    assert (image.retries, image.crashes, image.error, image.claim) == (1, 0, "busy", None)
    assert rig.try_claim() is None
    assert rig.partitions.retry(image)
    claim, parked = rig.claim(), time.monotonic()
    assert rig.claims.park(claim, delay=0.5, not_before=None, error="later")
    assert wait_for(rig.try_claim).retries == 1
    assert time.monotonic() - parked > 0.45


@pytest.mark.parametrize("text", NASTY)
def test_strings_of_users_survive_every_outcome(rig: PartitionRig, text: str) -> None:
    """`$literal`: a string that begins with `$` is stored, not evaluated, and removes no field."""
    owner = f"${text}"
    assert rig.claims.crash(rig.claim(owner=owner), text)
    assert rig.document["retry"]["error"] == text
    claim = rig.claim(owner=owner)
    assert rig.document["claim"]["owner"] == owner
    assert not rig.claims.extend([claim])
    assert rig.claims.park(claim, delay=-1.0, not_before=None, error=text)
    assert rig.document["retry"]["error"] == text
    assert rig.claims.set_aside(rig.claim(owner=owner), token(1), {**letter_of(1, 1, error=text), "key": text})
    assert [(found["error"], found["key"]) for found in rig.letters.find()] == [(text, text)]
    claim = rig.claim(2, owner=owner)
    assert rig.claims.handle(claim, 2, token(2))
    assert rig.claims.commit(rig.where, 2)
    head = {"_data": token(3)["_data"], "note": text}
    assert rig.claims.halt(rig.claim(3, owner=owner), head, text, text)
    image = rig.image
    assert image.head is not None
    assert (image.head["resumeToken"], image.head["key"], image.error) == (head, text, text)
    assert rig.partitions.discard(image)
    assert rig.document["resumeToken"] == head


# -- dead letters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["position", "letter", "commit"])
def test_a_dead_letter_is_written_with_its_position_or_not_at_all(
    rig: PartitionRig, make_client: MakeClient, failpoint: Failpoint, state_database: str, stage: str
) -> None:
    """P1: the transaction fails at its first write, at its second, or at its commit: nothing remains."""
    patient = make_partition(make_client(appname="dead-letter"), state_database)
    claim = rig.claim()
    before = rig.document
    failing: Any = {
        "position": {"failCommands": ["update"], "mode": {"skip": 1}},  # the claim's is the first
        "letter": {"failCommands": ["update"], "mode": {"skip": 2}},
        "commit": {"failCommands": ["commitTransaction"], "mode": "alwaysOn"},
    }[stage]
    with failpoint(errorCode=8000, appName="dead-letter", **failing), pytest.raises(OperationFailure):
        patient.claims.set_aside(claim, token(1), letter_of(1, 1))
    assert rig.document == {**before, "claim": {**before["claim"], "session": rig.document["claim"]["session"]}}
    assert rig.letters.count_documents({}) == 0
    lost = {"failCommands": ["commitTransaction"], "closeConnection": True, "mode": {"times": 1}}
    with failpoint(appName="dead-letter", **lost):  # the driver asks again
        assert patient.claims.set_aside(claim, token(1), letter_of(1, 1))
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"], stored["claim"], stored["retry"]) == (1, token(1), None, None)
    (found,) = rig.letters.find()
    assert (found["resumeToken"], found["error"], found["attempts"]) == (token(1), "ValueError: no", 1)
    assert isinstance(found["at"], datetime)


@pytest.mark.parametrize(
    "failing",
    [
        {"failCommands": ["findAndModify"], "mode": {"times": 1}},
        {"failCommands": ["update"], "mode": {"times": 1}},
        {"failCommands": ["commitTransaction"], "mode": {"times": 1}},
    ],
    ids=["position", "letter", "commit"],
)
def test_a_skipped_change_is_kept_or_not_passed_at_all(
    rig: PartitionRig, make_client: MakeClient, failpoint: Failpoint, state_database: str, failing: Any
) -> None:
    """P1, P13: the command fails at any of its writes, and is given again."""
    operator = make_partition(make_client(appname="skip"), state_database)
    assert rig.claims.halt(rig.claim(), token(1), "key", "e")
    before, letter = rig.document, {**letter_of(1, rig.image.fencing_token), "cause": "skipped"}
    with failpoint(errorCode=8000, appName="skip", **failing), pytest.raises(OperationFailure):
        operator.partitions.set_aside(rig.image, letter, operator.letters)
    assert (rig.document, rig.letters.count_documents({})) == (before, 0)
    assert operator.partitions.set_aside(rig.image, letter, operator.letters)
    assert (rig.image.committed, rig.image.state, rig.letters.count_documents({})) == (1, "flowing", 1)


# -- what users can put into the state is bounded when it is written -------------------------------


# ruff: noqa: DTZ001 - users write times without a zone

WEST, EAST = timezone(timedelta(hours=-12)), timezone(timedelta(hours=14))
LATE = [1.7e12, math.inf, 10**40, datetime(9999, 12, 31), datetime.max.replace(tzinfo=WEST)]
PAST = [None, 0, -1e300, -math.inf, datetime(1, 1, 1), datetime.min.replace(tzinfo=EAST), datetime(1969, 1, 1)]


@pytest.mark.parametrize("when", [*LATE, *PAST])
def test_a_retry_beyond_all_bounds_can_be_read_and_undone(rig: PartitionRig, when: Any) -> None:
    """Listener and commands go on; `retry` ends the wait. What lies before now is due, also before the epoch."""
    not_before, delay = retry_time(when)
    assert rig.claims.park(rig.claim(), not_before=not_before, delay=delay, error="as asked")
    image = rig.image
    assert image.parked is (when in LATE)
    if image.parked:
        assert 0.9 * LONGEST_SECONDS < image.due_in <= LONGEST_SECONDS
        assert rig.document["retry"]["notBefore"].year < 2300
        assert rig.partitions.retry(image)
    assert rig.try_claim(owner="again") is not None


@pytest.mark.parametrize("when", [math.nan, "tomorrow", timedelta(days=1), [1], {"a": 1}], ids=repr)
def test_what_is_no_time_is_an_error_of_the_handler(when: Any) -> None:
    """It goes to the failure policy; else the execution would end without an outcome, again and again."""
    with pytest.raises(HandlerUsageError):
        retry_time(when)


def test_text_that_is_no_utf8_in_the_state_ends_nobody(rig: PartitionRig) -> None:
    """Tokens carry the `_id` of documents, and old versions have stored what they were given."""
    raw = bson.encode({"$set": {"retry": {"error": "bad ????"}, "halted": {"resumeToken": token(1), "key": "????"}}})
    rig.documents.update_one({"_id": rig.where}, RawBSONDocument(raw.replace(b"????", b"\xff\xfe\x80\xff")))
    assert rig.image.error == "bad ����"
