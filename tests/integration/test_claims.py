"""
Claims and outcomes against a real replica set, one guard after the other.

Rules 1 to 4 are those of `mongo_celery/bridge/state/claims.py`. Where an update has several conditions, each has a
test in which everything but this one condition would let the update through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from bson import Int64, Timestamp
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.existing import make_token
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import FAILED, KeptChange, Place, Selection, dead_letter
from mongo_celery.bridge.state.partitions import visible_state
from mongo_celery.mongo.expressions import SHIFT
from tests.fixtures.process import wait_for
from tests.fixtures.rights import STATE, UrlOf
from tests.integration.partition_rig import BRIDGE, NASTY, SUBSCRIPTION, TTL, VERSION, Rig, rig_of, token

Document = dict[str, Any]
MakeClient = Callable[..., MongoClient[Document]]
Failpoint = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> Rig:
    """Give one partition that flows and that nobody has claimed."""
    return rig_of(mongo_client, state_database)


def a_dead_letter(number: int = 1, error: str = "ValueError: no") -> Document:
    return dead_letter(
        bridge=BRIDGE,
        subscription=SUBSCRIPTION,
        token=token(number),
        key="insert shop.orders 1",
        kept=KeptChange({}, "event"),
        error=error,
        traceback="Traceback",
        attempts=1,
        place=Place(0, 0, number, 1, 0),
        cause=FAILED,
    )


# -- the claim ---------------------------------------------------------------------------------------


def test_a_claim_stores_owner_run_and_expiry(rig: Rig) -> None:
    """Rule 1: the document says who runs what until when."""
    claim = rig.claim(1, 3)
    stored = rig.document
    assert (stored["claim"]["owner"], stored["claim"]["first"], stored["claim"]["last"]) == ("me", 1, 3)
    assert stored["claim"]["ttl"] == TTL * 1000
    assert (stored["fencingToken"], claim.retries, claim.crashes) == (claim.fencing_token, 0, 0)


def test_every_claim_raises_the_fence_to_at_least_the_cluster_time(
    rig: Rig, mongo_client: MongoClient[Document]
) -> None:
    """P4, rule 1: first delivery, redelivery and retry hold different fencing tokens."""
    seconds = mongo_client.admin.command("ping")["operationTime"].time
    fences = []
    for number in range(5):
        fences.append(rig.claim(owner=f"o{number}").fencing_token)
        rig.claims.relinquish(rig.where, f"o{number}")
    assert fences == sorted(set(fences))
    assert fences[0] >= seconds * SHIFT


def test_a_fence_that_is_ahead_of_the_clock_still_grows(rig: Rig) -> None:
    """P4: the larger one of old + 1 and the clock."""
    rig.spoil(fencingToken=1 << 60)
    assert rig.claim().fencing_token == (1 << 60) + 1


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_message_of_another_version_claims_nothing(rig: Rig, version: int) -> None:
    """Rule 2: equal, not at least: an old term's message, and one with a version that nobody led with."""
    assert rig.try_claim(term=version) is None
    assert rig.try_claim() is not None


@pytest.mark.parametrize("first", [1, 3])
def test_a_claim_must_begin_right_behind_what_is_committed(rig: Rig, first: int) -> None:
    """P2: neither a change that is done nor one that is not yet due."""
    rig.spoil(committed=1)
    assert rig.try_claim(first, token="829") is None
    assert rig.try_claim(2, token="829") is not None


@pytest.mark.parametrize("data", [token(5)["_data"], token(4)["_data"]])
def test_a_change_whose_token_is_committed_cannot_be_claimed(rig: Rig, data: str) -> None:
    """P2: a number that fits does not help where the stored token is not smaller (numbers were given anew)."""
    rig.spoil(resumeToken=token(5))
    assert rig.try_claim(token=data) is None
    assert rig.try_claim(token=token(6)["_data"]) is not None


def test_what_is_handled_cannot_be_claimed_again(rig: Rig) -> None:
    """P6: also when its claim has lapsed and its commit is late."""
    claim = rig.claim()
    assert rig.claims.handle(claim, 1, token(1))
    rig.lapse()
    assert rig.try_claim(owner="other") is None


def test_a_live_claim_keeps_others_out_until_it_lapses(rig: Rig) -> None:
    """Rule 1, P10: by the server's clock alone."""
    rig.claim(ttl=1.0)
    started = time.monotonic()
    assert rig.try_claim(owner="other") is None
    wait_for(lambda: rig.try_claim(owner="other"))
    assert time.monotonic() - started > 0.8


def test_a_parked_change_cannot_be_claimed_before_its_time(rig: Rig) -> None:
    """P10: by the server's clock."""
    claim = rig.claim()
    assert rig.claims.park(claim, delay=0.5, not_before=None, error="later")
    assert rig.try_claim() is None
    assert wait_for(rig.try_claim).retries == 1


@pytest.mark.parametrize("state", ["halted", "paused", "closed"])
def test_a_partition_that_stands_still_cannot_be_claimed(rig: Rig, state: str) -> None:
    """P9: only a person lets it flow again."""
    rig.spoil(state=state)
    assert rig.try_claim() is None


def test_a_partition_that_does_not_exist_cannot_be_claimed(rig: Rig) -> None:
    """P11: a claim makes nothing."""
    rig.documents.delete_one({"_id": rig.where})
    assert rig.try_claim() is None
    assert rig.documents.find_one({"_id": rig.where}) is None


def test_replacing_a_lapsed_claim_counts_a_crash_and_ends_runs_of_several(rig: Rig) -> None:
    """P6: the guilty change is found by running one change at a time up to the last one of the lapsed run."""
    rig.claim(1, 7)
    rig.lapse()
    second = rig.claim(1, 3, owner="second")
    assert second.crashes == 1
    assert rig.document["single"] == 7
    rig.lapse()
    assert rig.claim(1, 1, owner="third").crashes == 2
    assert rig.document["single"] == 7, "a shorter run does not lower it"


def test_a_claim_that_ended_in_a_retry_is_no_crash(rig: Rig) -> None:
    """Retries and crashes are counted apart, and both survive the next claim."""
    rig.claim()
    rig.lapse()
    claim = rig.claim(owner="second")
    assert rig.claims.park(claim, delay=0.0, not_before=None, error="again")
    third = wait_for(lambda: rig.try_claim(owner="third"))
    assert (third.retries, third.crashes) == (1, 1)
    assert rig.document["retry"]["error"] == "again"


def test_a_change_that_waits_for_infrastructure_is_charged_nothing(rig: Rig) -> None:
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


def test_a_waiting_change_cannot_be_claimed_before_its_time(rig: Rig) -> None:
    """P10: by the server's clock, as a parked one."""
    assert rig.claims.wait(rig.claim(), delay=60.0, cause="away", doubtful=False)
    assert rig.try_claim() is None
    assert rig.image.parked


def test_only_the_transaction_of_a_lapsed_claim_is_ended(rig: Rig, mongo_client: MongoClient[Document]) -> None:
    """What a dead worker has locked is free again; a live claim's transaction is left alone."""
    documents = mongo_client[rig.documents.database.name]["locked"]
    documents.insert_one({"_id": 1})
    with mongo_client.start_session() as session:
        rig.claim(session=session.session_id["id"])
        session.start_transaction()
        documents.update_one({"_id": 1}, {"$set": {"n": 1}}, session=session)
        assert not rig.claims.end_transactions([rig.where])
        rig.lapse()
        assert rig.claims.end_transactions([rig.where]) == [rig.where]
        assert documents.update_one({"_id": 1}, {"$set": {"n": 2}}).modified_count == 1
        with pytest.raises(OperationFailure) as caught:
            session.commit_transaction()
        assert caught.value.has_error_label("TransientTransactionError")
    rig.claim(owner="another")
    assert rig.document["claim"]["session"] is None
    rig.lapse()
    assert not rig.claims.end_transactions([rig.where])


def test_a_bridges_rights_are_enough_to_end_its_own_transactions(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """The dead worker was another client of the same user."""
    dead, successor = (make_client(guarded_url("bridge")) for _ in range(2))
    rig = rig_of(successor, STATE)
    locked = dead[STATE]["locked_by_the_dead"]  # the servers are those of other tests, too
    locked.insert_one({"_id": 1})
    with dead.start_session() as session:
        rig.claim(session=session.session_id["id"])
        session.start_transaction()
        locked.update_one({"_id": 1}, {"$set": {"n": 1}}, session=session)
        rig.lapse()
        assert rig.claims.end_transactions([rig.where]) == [rig.where]
        assert successor[STATE]["locked_by_the_dead"].update_one({"_id": 1}, {"$set": {"n": 2}}).modified_count == 1


def test_a_process_that_dies_while_it_sets_a_change_aside_keeps_nothing_locked(
    rig: Rig, make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """P7: its transaction stays open; who claims next need not wait until the server ends that."""
    dying = rig_of(make_client(appname="dies"), state_database)
    claim = rig.claim(ttl=1)
    with failpoint(failCommands=["commitTransaction"], errorCode=8000, appName="dies"), pytest.raises(OperationFailure):
        dying.claims.set_aside(claim, token(1), a_dead_letter())
    with pymongo.timeout(0.5), pytest.raises(PyMongoError):  # it is locked
        rig.documents.update_one({"_id": rig.where}, {"$set": {"note": 1}})
    assert wait_for(lambda: rig.claims.end_transactions([rig.where])) == [rig.where]
    assert rig.claim(owner="next").crashes == 1
    assert rig.letters.count_documents({}) == 0


def test_what_is_counted_of_an_existing_document_falls_on_no_other_change(rig: Rig) -> None:
    """P14, rule 6: one that was not stored comes again elsewhere; the next change begins with nothing and at once."""
    first, again = (make_token(Timestamp(1, 1), VERSION - number, 1) for number in (1, 2))
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
    assert (change.retries, change.crashes, rig.document["single"]) == (0, 0, None), "its lapse was of the other"
    assert rig.document["retry"]["lapsed"] == []
    rig.lapse()
    assert rig.claim(1, 2, owner="fourth").crashes == 1, "a change of the stream is read again as it is"


def test_what_an_older_term_has_counted_of_an_existing_document_keeps_nothing_waiting(rig: Rig) -> None:
    """P14: unless it is stored, or the partition has halted there."""
    data = make_token(Timestamp(1, 1), VERSION, 1)
    claim = rig.claim(1, 5, token=data)
    assert rig.claims.crash(claim, "killed")
    claim = rig.claim(1, 1, token=data)
    assert rig.claims.park(claim, delay=600, not_before=None, error="later")
    mine = rig.image
    assert (mine.retries, mine.crashes, mine.single, visible_state(mine)) == (1, 1, 5, "retrying")
    theirs = rig.take_over(VERSION + 1)
    assert (theirs.retries, theirs.crashes, theirs.single, theirs.error) == (0, 0, 0, None)
    assert (theirs.due_in, theirs.retry, visible_state(theirs)) == (0, None, "flowing")
    rig.spoil(spilled={"to": data, "since": datetime.now(UTC), "reason": "parked"})
    assert (rig.image.retries, visible_state(rig.image)) == (1, "retrying"), "it is stored, and the same change"
    rig.spoil(spilled=None, halted={"resumeToken": {"_data": data}, "key": "1"}, state="halted")
    assert rig.image.error == "later"
    rig.spoil(halted=None, state="flowing", **{"retry.of": "82nonsense"})
    assert rig.image.retries == 1


def test_a_claim_replaces_the_whole_of_an_older_one(rig: Rig) -> None:
    """`$set` of a document in a pipeline merges: no key of the lapsed claim may shine through."""
    rig.claim(1, 7, ttl=9.0)
    rig.lapse()
    rig.spoil(**{"claim.rest": "of an older release"})
    rig.claim(1, 1, owner="second", ttl=1.0)
    claim = rig.document["claim"]
    assert (claim["first"], claim["last"], claim["ttl"], claim["owner"]) == (1, 1, 1000, "second")


def test_relinquishing_counts_nothing_and_touches_nobody_elses_claim(rig: Rig) -> None:
    """A claim whose answer was lost: no attempt, no crash; an answered `handled` stays."""
    claim = rig.claim()
    assert not rig.claims.relinquish(rig.where, "somebody else")
    assert rig.document["claim"] is not None
    assert rig.claims.relinquish(rig.where, "me")
    again = rig.claim(owner="again")
    assert (again.crashes, again.retries) == (0, 0)
    assert again.fencing_token > claim.fencing_token
    assert rig.document["single"] is None
    assert rig.claims.handle(again, 1, token(1))
    rig.claims.relinquish(rig.where, "again")
    assert rig.document["claim"] is not None


# -- what counts as a crash --------------------------------------------------------------------------


def test_an_owner_that_lives_withdraws_the_crash_that_was_charged_in_its_name_once(rig: Rig) -> None:
    """P14, rule 5: whoever replaces a lapsed claim cannot know whether its worker lives."""
    rig.claim()
    rig.lapse()
    assert rig.claim(owner="second").crashes == 1
    assert rig.claims.withdraw(rig.where, "me")
    assert not rig.claims.withdraw(rig.where, "me")
    rig.lapse()
    assert rig.claim(owner="third").crashes == 1, "the second's own"


def test_a_withdrawal_leaves_the_crashes_of_others_whatever_comes_in_between(rig: Rig) -> None:
    """P14: the successor's own death, or that of a third, is counted before, meanwhile and after."""
    rig.claim()
    rig.lapse()
    rig.claim(owner="second")
    rig.lapse()
    third = rig.claim(owner="third")
    assert rig.claims.crash(third, "killed")
    assert rig.claims.withdraw(rig.where, "me")
    assert rig.claim(owner="fourth").crashes == 2
    assert not rig.claims.withdraw(rig.where, "third"), "it said itself that it crashed"
    assert rig.claims.withdraw(rig.where, "second")
    assert rig.document["retry"]["crashes"] == 1


def test_a_withdrawal_that_comes_after_the_commit_changes_nothing(rig: Rig) -> None:
    """P14: the next change has counts of its own."""
    rig.claim()
    rig.lapse()
    second = rig.claim(owner="second")
    assert rig.claims.handle(second, 1, token(1))
    assert rig.claims.commit(rig.where)
    before = rig.document
    assert not rig.claims.withdraw(rig.where, "me")
    assert rig.document == before


def test_a_retry_between_lapse_and_withdrawal_keeps_both_counts(rig: Rig) -> None:
    """Retries and crashes are counted apart; neither forgets whose crashes there are."""
    rig.claim()
    rig.lapse()
    assert rig.claims.park(rig.claim(owner="second"), delay=0.0, not_before=None, error="again")
    assert rig.claims.withdraw(rig.where, "me")
    third = wait_for(lambda: rig.try_claim(owner="third"))
    assert (third.retries, third.crashes) == (1, 0)


def test_what_an_older_version_has_counted_is_kept_and_never_goes_below_zero(rig: Rig) -> None:
    """A rolling deploy: it knows no owners, and drops those that it finds."""
    rig.spoil(retry={"count": 0, "crashes": 2, "notBefore": None, "error": None})
    assert not rig.claims.withdraw(rig.where, "me")
    rig.claim()
    rig.lapse()
    assert rig.claim(owner="second").crashes == 3
    rig.spoil(**{"retry.crashes": 0})
    assert rig.claims.withdraw(rig.where, "me")
    assert rig.document["retry"]["crashes"] == 0


def test_the_list_of_owners_is_bounded(rig: Rig) -> None:
    """State does not grow with a change that is tried for ever."""
    rig.claim()
    for number in range(40):
        rig.lapse()
        rig.claim(owner=f"o{number}")
    assert len(rig.document["retry"]["lapsed"]) == 16
    assert rig.document["retry"]["crashes"] == 40


def test_the_lapse_of_a_claim_whose_worker_was_told_to_end_is_no_crash(rig: Rig) -> None:
    """P14: a deploy kills long handlers; the changes of its run still go one by one, since its end was unclean."""
    claim = rig.claim(1, 7)
    assert rig.claims.extend([claim], leaving=True) == []
    rig.lapse()
    second = rig.claim(owner="second")
    assert second.crashes == 0
    assert rig.document["single"] == 7
    rig.lapse()
    assert rig.claim(owner="third").crashes == 1, "the second was not told to end"


# -- outcomes: who may write them --------------------------------------------------------------------


def inline(claim: Claim) -> Claim:
    """The same claim where no commit task follows."""
    return replace(claim, inline=True)


Outcome = Callable[[Rig, Claim], bool]
OUTCOMES: dict[str, Outcome] = {
    "heartbeat": lambda rig, claim: not rig.claims.extend([claim]),
    "is mine": lambda rig, claim: rig.claims.is_mine(claim),
    "handled": lambda rig, claim: rig.claims.handle(claim, claim.first, token(claim.first)),
    "position": lambda rig, claim: rig.claims.handle(inline(claim), claim.first, token(claim.first)),
    "park": lambda rig, claim: rig.claims.park(claim, delay=1.0, not_before=None, error="e"),
    "wait": lambda rig, claim: rig.claims.wait(claim, delay=1.0, cause="c", doubtful=False),
    "crash": lambda rig, claim: rig.claims.crash(claim, "e"),
    "halt": lambda rig, claim: rig.claims.halt(claim, token(claim.first), "key", "e"),
    "skip": lambda rig, claim: rig.claims.discard(claim, token(claim.first)),
    "dead letter": lambda rig, claim: rig.claims.set_aside(claim, token(claim.first), a_dead_letter()),
}
outcome = pytest.mark.parametrize("act", OUTCOMES.values(), ids=OUTCOMES.keys())


@outcome
def test_an_execution_may_write_its_outcome(rig: Rig, act: Outcome) -> None:
    """Rule 3: else the refusals below would prove nothing."""
    assert act(rig, rig.claim())


@outcome
@pytest.mark.parametrize(
    "change", [{"fencingToken": 1 << 60}, {"claim.owner": "other"}, {"committed": 1}, {"claim": None}]
)
def test_an_outcome_is_refused_when_fence_owner_or_position_have_moved(
    rig: Rig, act: Outcome, change: Document
) -> None:
    """Rule 3, P3: each of the conditions for itself; nothing is written."""
    claim = rig.claim()
    rig.spoil(**change)
    before = rig.document
    assert not act(rig, claim)
    assert rig.document == before
    assert rig.letters.count_documents({}) == 0


@outcome
def test_an_outcome_is_refused_after_a_newer_claim(rig: Rig, act: Outcome) -> None:
    """P3: the zombie that wakes after its successor has begun."""
    zombie = rig.claim()
    rig.lapse()
    rig.claim(owner="successor")
    before = rig.document
    assert not act(rig, zombie)
    assert rig.document == before


@outcome
def test_an_outcome_is_accepted_after_the_claim_has_lapsed_if_nobody_claimed_since(rig: Rig, act: Outcome) -> None:
    """Table: a late heartbeat alone does not end an execution."""
    claim = rig.claim()
    rig.lapse()
    assert act(rig, claim)


@outcome
def test_an_outcome_is_accepted_after_a_take_over(rig: Rig, act: Outcome) -> None:
    """P7, P6: handlers that run are adopted: they prove themselves by fence and owner, not by the version."""
    claim = rig.claim()
    rig.take_over(VERSION + 1)
    assert act(rig, claim)


@pytest.mark.parametrize("name", [name for name in OUTCOMES if name not in {"handled", "is mine"}])
def test_nothing_but_handled_itself_is_accepted_after_handled(rig: Rig, name: str) -> None:
    """P6: what is handled is only committed. (`is mine` is a majority read, and the mark is written with w:1.)"""
    claim = rig.claim()
    assert rig.claims.handle(claim, 1, token(1))
    assert not OUTCOMES[name](rig, claim)


# -- outcomes: what they write -----------------------------------------------------------------------


def test_a_heartbeat_extends_the_claim_by_its_own_ttl(rig: Rig) -> None:
    """Also for a transactional handler, whose claim is longer than the bridge's."""
    claim = rig.claim(ttl=60.0)
    before = rig.document["claim"]["until"]
    rig.spoil(**{"claim.until": before - timedelta(seconds=30)})
    assert rig.claims.extend([claim]) == []
    assert rig.document["claim"]["until"] >= before


def test_handled_can_be_repeated_by_its_owner_and_may_grow(rig: Rig) -> None:
    """An answer that was lost is asked for again."""
    claim = rig.claim(1, 3)
    assert rig.claims.handle(claim, 2, token(2))
    assert rig.claims.handle(claim, 2, token(2))
    assert rig.claims.handle(claim, 3, token(3))
    handled = rig.document["handled"]
    assert handled.pop("took") >= 0
    assert handled == {"owner": "me", "last": 3, "resumeToken": token(3)}


def test_handled_of_another_owner_is_not_overwritten(rig: Rig) -> None:
    """Rule 3: not even by one that holds the fence."""
    claim = rig.claim()
    rig.spoil(handled={"owner": "other", "last": 1, "resumeToken": token(1)})
    assert not rig.claims.handle(claim, 1, token(1))


def test_a_commit_takes_its_values_from_handled(rig: Rig) -> None:
    """Rule 4: position and token of the mark, whatever run the committing message belongs to."""
    claim = rig.claim(1, 9)
    assert rig.claims.handle(claim, 4, token(4))
    assert rig.claims.commit(rig.where, 1)
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"]) == (4, token(4))
    assert stored["claim"] is stored["handled"] is stored["retry"] is None
    assert stored["fencingToken"] == claim.fencing_token


def test_a_commit_without_handled_changes_nothing(rig: Rig) -> None:
    """P3, P11: a commit message carries no authority."""
    rig.claim()
    before = rig.document
    assert not rig.claims.commit(rig.where, 1)
    assert not rig.claims.commit(rig.where)
    assert rig.document == before


@pytest.mark.parametrize("first", [1, 3])
def test_a_commit_of_another_run_changes_nothing(rig: Rig, first: int) -> None:
    """P3: what is handled now belongs to the run behind `committed`."""
    claim = rig.claim(1, 1)
    assert rig.claims.handle(claim, 1, token(1))
    assert rig.claims.commit(rig.where, 1)
    assert rig.claims.handle(rig.claim(2, 2), 2, token(2))
    assert not rig.claims.commit(rig.where, first)
    assert rig.claims.commit(rig.where, 2)
    assert not rig.claims.commit(rig.where, 2), "it is done already"


def test_a_commit_leaves_the_state_alone(rig: Rig) -> None:
    """A partition that was paused while a handler ran commits it and stays paused."""
    claim = rig.claim()
    rig.spoil(state="paused")
    assert rig.claims.handle(claim, 1, token(1))
    assert rig.claims.commit(rig.where, 1)
    assert rig.document["state"] == "paused"


def test_a_position_that_is_written_inline_is_what_a_commit_would_make_it(rig: Rig) -> None:
    """Rule 7: of a run of which only a part is done, with its retries; in one write."""
    found = []
    for short in (False, True):
        rig.spoil(committed=0, resumeToken=None, retry=None, lastRun=None, handled=None, claim=None)
        assert rig.claims.park(rig.claim(1, 5), delay=-1.0, not_before=None, error="once")
        claim = rig.claim(1, 5, inline=short)
        assert rig.claims.handle(claim, 3, token(3))
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


def test_a_position_that_is_written_inline_can_be_repeated_until_the_next_claim(rig: Rig) -> None:
    """Rule 7: an answer that was lost is asked for again; not another place, and not under another fence."""
    claim = inline(rig.claim(1, 3))
    assert rig.claims.handle(claim, 2, token(2))
    assert rig.claims.handle(claim, 2, token(2))
    before = rig.document
    assert not rig.claims.handle(claim, 3, token(3))
    assert not rig.claims.handle(claim, 2, token(3))
    assert rig.document["committed"] == before["committed"] == 2
    rig.claim(3)
    before = rig.document
    assert not rig.claims.handle(claim, 2, token(2))
    assert rig.document == before


@pytest.mark.parametrize("is_inline", [True, False])
def test_in_a_transaction_a_success_is_written_once(
    rig: Rig, mongo_client: MongoClient[Document], is_inline: bool
) -> None:
    """P6: else a body that is repeated behind its own commit would have its effects twice."""
    claim = inline(rig.claim()) if is_inline else rig.claim()
    with mongo_client.start_session() as session:
        with session.start_transaction():
            assert rig.claims.handle(claim, 1, token(1), session)
        assert is_inline == (rig.document["committed"] == 1) == (rig.document["handled"] is None)
        with session.start_transaction():
            assert not rig.claims.handle(claim, 1, token(1), session)


def test_a_position_that_is_written_inline_leaves_the_state_alone(rig: Rig) -> None:
    """A partition that was paused while a handler ran stays paused, and has its position."""
    claim = inline(rig.claim())
    rig.spoil(state="paused")
    assert rig.claims.handle(claim, 1, token(1))
    assert (rig.document["state"], rig.document["committed"]) == ("paused", 1)


def test_a_retry_is_parked_by_a_delay_of_the_servers_clock(rig: Rig) -> None:
    """P10: counted, with its error, and due so many seconds from the server's now."""
    assert rig.claims.park(rig.claim(), delay=100.0, not_before=None, error="busy")
    image = rig.image
    assert 99 < image.due_in <= 100
    assert image.parked
    assert (image.retries, image.crashes, image.error, image.claim) == (1, 0, "busy", None)


def test_a_retry_is_parked_until_a_time(rig: Rig) -> None:
    """`retry(eta=...)`."""
    when = datetime.now(UTC) + timedelta(hours=1)
    assert rig.claims.park(rig.claim(), delay=None, not_before=when, error="later")
    assert 3590 < rig.image.due_in <= 3601


def test_retries_add_up_and_a_commit_clears_them(rig: Rig) -> None:
    """The next change begins without the attempts of this one."""
    for number in range(3):
        claim = rig.claim(owner=f"o{number}")
        assert claim.retries == number
        assert rig.claims.park(claim, delay=-1.0, not_before=None, error="again")
    claim = rig.claim()
    assert rig.claims.handle(claim, 1, token(1))
    assert rig.claims.commit(rig.where, 1)
    assert rig.claim(2).retries == 0


def test_a_recorded_crash_counts_and_singles_out(rig: Rig) -> None:
    """A hard time limit: the claim ends at once, and the next claim does not count it again."""
    claim = rig.claim(1, 5)
    assert rig.claims.crash(claim, "SystemExit: 1")
    stored = rig.document
    assert (stored["claim"], stored["single"], stored["retry"]["crashes"]) == (None, 5, 1)
    assert rig.claim(owner="next").crashes == 1


def test_a_halt_records_the_head_and_keeps_the_counts(rig: Rig) -> None:
    """P9: the partition says at which change it stands, and why."""
    claim = rig.claim()
    assert rig.claims.park(claim, delay=-1.0, not_before=None, error="once")
    assert rig.claims.halt(rig.claim(), token(1), "insert shop.orders 1", "ValueError: no")
    image = rig.image
    assert (image.state, image.retries, image.error) == ("halted", 1, "ValueError: no")
    assert image.head is not None
    assert image.head == {"at": image.head["at"], "key": "insert shop.orders 1", "resumeToken": token(1)}
    assert abs(image.head["at"] - image.read_at) < timedelta(minutes=1), "the server's time"
    assert rig.try_claim() is None


def test_a_skip_writes_the_position_itself(rig: Rig) -> None:
    """A failed task publishes no commit link; one change of a longer run is passed over."""
    assert rig.claims.discard(rig.claim(1, 5), token(1))
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"], stored["claim"], stored["retry"]) == (1, token(1), None, None)
    assert rig.try_claim(2) is not None


@pytest.mark.parametrize("text", NASTY)
def test_strings_of_users_survive_every_outcome(rig: Rig, text: str) -> None:
    """`$literal`: a string that begins with `$` is stored, not evaluated, and removes no field."""
    owner = f"${text}"
    assert rig.claims.crash(rig.claim(owner=owner), text)
    assert rig.document["retry"]["error"] == text
    claim = rig.claim(owner=owner)
    assert rig.document["claim"]["owner"] == owner
    assert not rig.claims.extend([claim])
    assert rig.claims.park(claim, delay=-1.0, not_before=None, error=text)
    assert rig.document["retry"]["error"] == text
    assert rig.claims.set_aside(rig.claim(owner=owner), token(1), {**a_dead_letter(error=text), "key": text})
    found = rig.letters.find_one({})
    assert found is not None
    assert (found["error"], found["key"]) == (text, text)
    claim = rig.claim(2, owner=owner)
    assert rig.claims.handle(claim, 2, token(2))
    assert rig.claims.commit(rig.where, 2)
    head = {"_data": token(3)["_data"], "note": text}
    assert rig.claims.halt(rig.claim(3, owner=owner), head, text, text)
    image = rig.image
    assert image.head is not None
    assert (image.head["resumeToken"], image.head["key"], image.error) == (head, text, text)
    assert rig.partitions.discard(image, 0)
    assert rig.document["resumeToken"] == head


# -- dead letters ------------------------------------------------------------------------------------


def test_a_dead_letter_and_its_position_are_written_together(rig: Rig) -> None:
    """P1: the letter has the server's time, the change's bytes and the error."""
    assert rig.claims.set_aside(rig.claim(1, 5), token(1), a_dead_letter())
    stored = rig.document
    assert (stored["committed"], stored["resumeToken"], stored["claim"], stored["retry"]) == (1, token(1), None, None)
    found = rig.letters.find_one({})
    assert found is not None
    assert (found["resumeToken"], found["error"], found["attempts"]) == (token(1), "ValueError: no", 1)
    assert isinstance(found["at"], datetime)
    assert rig.store.dead_letters.count() == {SUBSCRIPTION: 1}


@pytest.mark.parametrize("stage", ["position", "letter", "commit"])
def test_a_dead_letter_is_written_with_its_position_or_not_at_all(
    rig: Rig, make_client: MakeClient, failpoint: Failpoint, state_database: str, stage: str
) -> None:
    """P1: the transaction fails at its first write, at its second, or at its commit: nothing remains."""
    patient = rig_of(make_client(appname="dead-letter"), state_database)
    claim = rig.claim()
    before = rig.document
    commands = {"position": ["update"], "letter": ["update"], "commit": ["commitTransaction"]}[stage]
    mode: Any = {"position": {"skip": 1}, "letter": {"skip": 2}, "commit": "alwaysOn"}[
        stage
    ]  # the claim's is the first
    with (
        failpoint(failCommands=commands, errorCode=8000, appName="dead-letter", mode=mode),
        pytest.raises(OperationFailure),
    ):
        patient.claims.set_aside(claim, token(1), a_dead_letter())
    assert rig.document == {**before, "claim": {**before["claim"], "session": rig.document["claim"]["session"]}}
    assert rig.letters.count_documents({}) == 0
    assert patient.claims.set_aside(claim, token(1), a_dead_letter())


def test_a_dead_letter_whose_commit_was_not_answered_is_there_once(
    rig: Rig, make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """P1: the driver asks again for the outcome of its own commit."""
    patient = rig_of(make_client(appname="dead-letter"), state_database)
    with failpoint(
        failCommands=["commitTransaction"],
        closeConnection=True,
        appName="dead-letter",
        mode={"times": 1},
    ):
        assert patient.claims.set_aside(rig.claim(), token(1), a_dead_letter())
    assert rig.document["committed"] == 1
    assert rig.letters.count_documents({}) == 1


def test_a_change_can_be_set_aside_again_after_a_rewind(rig: Rig) -> None:
    """A letter replaces the one of the same change."""
    assert rig.claims.set_aside(rig.claim(), token(1), a_dead_letter(error="first"))
    rig.spoil(committed=0, resumeToken=None)
    assert rig.claims.set_aside(rig.claim(), token(1), a_dead_letter(error="second"))
    assert [found["error"] for found in rig.letters.find()] == ["second"]


def test_an_error_that_no_retry_cures_reaches_the_caller(
    make_client: MakeClient, failpoint: Failpoint, state_database: str
) -> None:
    """P9: a claim that cannot be taken raises; it does not look like a duplicate."""
    client = make_client(appname="claimant")
    other = rig_of(client, state_database)
    with (
        failpoint(failCommands=["findAndModify"], errorCode=13, appName="claimant"),
        pytest.raises(PyMongoError),
    ):
        other.try_claim()


# -- what commands ask of the dead letters -------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"since": datetime(2026, 1, 1, 0, 3, 10, tzinfo=UTC)},
        {"keys": [7]},
        {"subscription": SUBSCRIPTION, "keys": [7.0]},
        {"subscription": SUBSCRIPTION, "ids": [token(7)["_data"]]},
        {"subscription": SUBSCRIPTION, "since": datetime(2026, 1, 1, 0, 3, 10, tzinfo=UTC)},
    ],
    ids=["time", "key", "key of a handler", "id", "time of a handler"],
)
def test_what_commands_ask_for_is_found_by_an_index(rig: Rig, asked: Document) -> None:
    """Of thousands of dead letters only those that are shown are read."""
    letters = rig.store.dead_letters
    letters.ensure_indexes()
    documents = [
        {
            **a_dead_letter(number),
            "change": {"documentKey": {"_id": number}},
            "at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        }
        for number in range(1, 200)
    ]
    letters.collection.insert_many(documents)
    state = letters.collection.database
    state.command("profile", 2)
    try:
        found = letters.find(Selection(**asked), [SUBSCRIPTION], 0)
        count = letters.count_selected(Selection(**asked), [SUBSCRIPTION])
    finally:
        state.command("profile", 0)
    read = state["system.profile"].find({"ns": letters.collection.full_name, "op": {"$in": ["query", "command"]}})
    assert 1 <= len(found) == count <= 10
    assert max(each.get("docsExamined", 0) for each in read) <= len(found) + 1
