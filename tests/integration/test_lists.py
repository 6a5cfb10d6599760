"""Bulk handlers and coalescing on a real replica set: which change is charged, and what is recorded when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import bson
import pytest
from bson.errors import InvalidBSON
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from pymongo import DeleteOne, MongoClient, ReplaceOne, UpdateOne
from pymongo.errors import AutoReconnect

from mongo_celery import Changes
from mongo_celery.bridge.worker import execution
from mongo_celery.errors import StaleFencingTokenError
from tests.rig.changes import BRIDGE, HANDLER, Document, event_of_key, hash_of, number_of, token
from tests.rig.worker import Begin, WantedError, WorkerRig, fail_at, worker_with


@pytest.fixture
def begin(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[Begin]:
    """Give what makes a partition with nothing done and a worker, whose handler has these options; once a test."""
    options = {"single": False, "failure_policy": "dead_letter"}
    with worker_with(mongo_client, mongo_url, state_database, **options) as begin:
        yield begin


def letters_of(lists: WorkerRig) -> list[tuple[int, str]]:
    """Number and cause of each dead letter."""
    return [(number, cause) for _, number, cause in lists.letters]


def numbers(calls: Sequence[Sequence[int]]) -> list[int]:
    """All that was given, in order."""
    return [each for call in calls for each in call]


@contextmanager
def ended(*errors: type[BaseException]) -> Iterator[None]:
    """Something that ends with an outcome instead of a result."""
    with pytest.raises(errors or (Ignore, WantedError)):
        yield


# -- one claim, one call, one outcome -----------------------------------------------------------------


# -- a list that fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False])
def test_the_policy_hits_exactly_the_change_that_fails_and_what_was_before_it_is_done(
    begin: Begin, tells: bool
) -> None:
    """P2, P6: under the same claim; the rest comes with the next run."""
    lists = begin()
    lists.handle = fail_at(4, tells=tells)
    with ended(WantedError):
        lists.run(1, *"abcdefgh")
    image = lists.rig.image
    assert (image.committed, image.data, letters_of(lists)) == (4, token(4)["_data"], [(4, "failed")])
    assert image.claim is None
    if tells:
        assert lists.calls == [[1, 2, 3, 4, 5, 6, 7, 8]], "it is started once"
    letter = lists.rig.letters.find_one()
    assert letter is not None
    assert (letter["seq"], letter["attempts"], letter["error"]) == (4, 1, "WantedError: as asked")
    assert letter["hash"] % (1 << 64) == hash_of("d"), "it has the place of its own key"
    lists.calls.clear()
    lists.run(5, *"efgh")
    assert lists.calls == [[5, 6, 7, 8]]


def test_every_change_is_done_or_has_a_letter_whichever_fail(begin: Begin) -> None:
    """P2: also the first and the last."""
    lists = begin()
    lists.handle = fail_at(1, 5, 6, 12)
    lists.flow(*"abcdefghijkl")
    assert [number for number, _ in letters_of(lists)] == [1, 5, 6, 12]
    assert lists.rig.image.committed == 12
    assert {*numbers(lists.calls)} == {*range(1, 13)}


def test_what_is_finished_is_recorded_while_the_claim_goes_on(begin: Begin) -> None:
    """P2: whatever becomes of the rest, also where the process ends: nothing of it runs again."""
    lists = begin()
    seen: list[tuple[int, int]] = []

    def handle(changes: Changes) -> None:
        image = lists.rig.image
        assert image.claim is not None
        seen.append((image.committed, image.claim["first"]))
        if len(changes) == 4:
            raise WantedError("half of it, please")
        if number_of(changes[0]) == 3:
            raise SystemExit

    lists.handle = handle
    with pytest.raises(SystemExit):
        lists.run(1, *"abcd")
    assert seen == [(0, 1), (0, 1), (2, 3)]
    image = lists.rig.image
    assert (image.committed, image.claim, image.crashes, image.one_by_one_until) == (2, None, 1, 4)


@pytest.mark.parametrize(
    ("policy", "state", "committed", "cause"),
    [
        ("halt", "halted", 1, None),
        ("skip", "flowing", 2, "skipped"),
        ("discard", "flowing", 2, None),
        ("park_key", "flowing", 2, "parked"),
    ],
)
def test_each_policy_hits_the_failing_change(
    begin: Begin, policy: str, state: str, committed: int, cause: str | None
) -> None:
    """P6: as it would hit one that is a run by itself."""
    lists = begin(failure_policy=policy)
    lists.handle = fail_at(2, tells=True)
    with ended(WantedError):
        lists.run(1, *"abc")
    image = lists.rig.image
    assert (image.state, image.committed) == (state, committed)
    assert letters_of(lists) == ([] if cause is None else [(2, cause)])
    if policy == "park_key":
        assert [each["hash"] % (1 << 64) for each in lists.rig.document["parkedKeys"]] == [hash_of("b")]
    if policy == "halt":
        assert lists.rig.document["halted"]["resumeToken"] == token(2)


def test_a_retry_is_of_one_change_which_is_alone_when_it_runs_again(begin: Begin) -> None:
    """P6: its attempts are its own, and what follows waits behind it."""
    lists = begin()

    def handle(changes: Changes) -> None:
        if any(number_of(change) == 3 for change in changes):
            raise Retry(exc=WantedError("later"))

    lists.handle = handle
    with ended(Retry):
        lists.run(1, *"abcd")
    document = lists.rig.document
    assert (document["committed"], document["retry"]["count"], document["claim"]) == (2, 1, None)
    lists.calls.clear()
    with ended(Retry):
        lists.run(3, *"cd")
    assert (lists.calls, lists.retries[-1]) == ([[3]], 1)
    lists.handle = bool
    lists.run(3, *"cd")
    assert lists.calls[1:] == [[3], [4]]
    assert lists.rig.image.committed == 4


def test_an_outage_is_nobodys_and_the_list_is_not_split_for_it(begin: Begin) -> None:
    """P6: all of it waits, uncharged; then its first change goes ahead alone."""
    lists = begin()

    def away(_changes: Changes) -> None:
        raise AutoReconnect("no primary")

    lists.handle = away
    with ended(Ignore):
        lists.run(1, *"abcd")
    assert lists.calls == [[1, 2, 3, 4]]
    image = lists.rig.image
    assert image.waiting is not None
    assert (image.committed, image.retries, image.crashes) == (0, 0, 0)
    lists.rig.spoil(**{"retry.notBefore": None})
    lists.handle = bool
    lists.run(1, *"abcd")
    assert lists.calls[1:] == [[1], [2, 3, 4]]


def test_time_that_a_list_has_used_up_is_charged_to_no_change(begin: Begin) -> None:
    """P6: each gets the whole time limit, as a run of its own."""
    lists = begin()

    def handle(changes: Changes) -> None:
        if any(number_of(change) == 3 for change in changes):
            raise SoftTimeLimitExceeded

    lists.handle = handle
    with ended(Ignore):
        lists.run(1, *"abcd")
    image = lists.rig.image
    assert (image.committed, image.one_by_one_until, image.claim, image.crashes) == (0, 4, None, 0)
    lists.flow(*"abcd")
    assert letters_of(lists) == [(3, "failed")]
    assert lists.calls[1:] == [[1], [2], [3], [4]]


def test_a_list_that_crashed_runs_change_by_change(begin: Begin) -> None:
    """P6: a worker that was killed charges its first change alone."""
    lists = begin()
    lists.rig.claim(1, 4, owner="dead")
    lists.rig.lapse()
    lists.run(1, *"abcd")
    assert lists.calls == [[1]]
    assert lists.rig.document["handled"]["last"] == 1


def test_a_change_that_cannot_be_decoded_is_found_without_halving(begin: Begin) -> None:
    """P6: what it fails with says which it is; what is before it is given, and the others are not asked for it."""
    lists = begin()
    lists.handle = lambda changes: [number_of(change) for change in changes]
    raws = [bson.encode(event_of_key(number, key)) for number, key in enumerate("abcdefgh", 1)]
    raws[4] = raws[4].replace(b"insert", b"ins\xffrt")
    with ended(InvalidBSON):
        lists.run(1, *"abcdefgh", changes=tuple(raws))
    assert lists.calls[-1:] == [[1, 2, 3, 4]]
    assert len(lists.calls) <= 2
    assert lists.rig.image.committed == 5
    (letter,) = lists.find().letters
    assert letter.attempts == 1


def test_no_list_is_longer_than_its_handler_wants(begin: Begin) -> None:
    """P12: a listener of an earlier deploy, or of an earlier handler, has sent more."""
    lists = begin(batch_size=2)
    lists.run(1, *"abcde")
    assert lists.calls == [[1, 2], [3, 4], [5]]
    assert lists.rig.image.committed == 5


@pytest.mark.parametrize("chained", [True, False])
def test_the_error_that_was_being_handled_is_the_one_that_counts(begin: Begin, chained: bool) -> None:
    """P6: a `from` that was forgotten makes an outage no failure of the change."""
    lists = begin()

    def handle(changes: Changes) -> None:
        try:
            raise AutoReconnect("no primary")
        except AutoReconnect as error:
            if chained:
                raise changes.failed_at(1) from error
            raise changes.failed_at(1)  # noqa: B904 - a `from` that was forgotten

    lists.handle = handle
    with ended(Ignore):
        lists.run(1, *"abc")
    image = lists.rig.image
    assert image.waiting is not None
    assert (lists.calls, image.committed, image.retries, letters_of(lists)) == ([[1, 2, 3]], 1, 0, [])


def test_a_handler_that_ignores_its_list_passes_over_all_of_it(begin: Begin) -> None:
    """P1: as it does with a single change."""
    lists = begin()

    def handle(_changes: Changes) -> None:
        raise Ignore

    lists.handle = handle
    lists.run(1, *"abc")
    assert lists.rig.document["handled"]["last"] == 3


# -- transactions -------------------------------------------------------------------------------------


# -- fenced writes ------------------------------------------------------------------------------------


def test_the_writes_of_a_list_bear_its_token_and_a_stale_list_is_refused(
    begin: Begin, mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P3: each operation is judged by its document's own stamp."""
    lists = begin()
    copies = mongo_client[state_database]["copies"]

    def copy(changes: Changes) -> None:
        requests: list[Any] = [
            ReplaceOne({"_id": each["documentKey"]["_id"]}, {"n": number_of(each)}, upsert=True) for each in changes
        ]
        changes.fenced(copies).bulk_write([*requests, DeleteOne({"_id": "gone"})])

    lists.handle = copy
    lists.run(1, *"abca")
    key = f"{BRIDGE}/{HANDLER}"
    found = {each["_id"]: (each["n"], each["_fence"][key]["p"]["0"]) for each in copies.find()}
    (fence,) = lists.tokens
    assert found == {"a": (4, fence), "b": (2, fence), "c": (3, fence)}
    lists.rig.claims.commit(lists.rig.where)

    def late(changes: Changes) -> None:
        lists.rig.lapse()
        lists.rig.claim(5, 6, owner="newer")
        copies.update_one({"_id": "a"}, {"$set": {f"_fence.{key}.p.0": changes[0].fencing_token + 1, "n": 9}})
        with pytest.raises(StaleFencingTokenError) as refused:
            changes.fenced(copies).bulk_write([UpdateOne({"_id": each}, {"$set": {"n": 0}}) for each in "ab"])
        raise refused.value

    lists.handle = late
    with ended(Ignore):
        lists.run(5, "a", "b")
    assert {each["_id"]: each["n"] for each in copies.find()} == {"a": 9, "b": 0, "c": 3}
    assert lists.rig.document["claim"]["owner"] == "newer"


# -- coalescing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells", [True, False])
def test_a_dead_letter_names_what_its_change_stood_for(begin: Begin, tells: bool) -> None:
    """P9: nothing vanishes in silence."""
    lists = begin(coalesce=True)
    lists.handle = fail_at(3, tells=tells)
    with ended(WantedError):
        lists.run(1, *"aaab")
    assert lists.calls[0] == [3, 4]
    assert (letters_of(lists), lists.rig.image.committed) == ([(3, "failed")], 3)
    (letter,) = lists.find().letters
    assert (letter.passed, letter.passed_over) == (2, [token(1)["_data"], token(2)["_data"]])


def test_what_was_passed_over_for_a_change_that_comes_later_is_given_before_the_one_that_fails(begin: Begin) -> None:
    """P2: a list that ends at a failing change leaves no document behind with an older state than it had there."""
    lists = begin(coalesce=True)
    lists.handle = fail_at(4, tells=True)
    with ended(WantedError):
        lists.run(1, *"aabcb")
    assert lists.calls == [[2, 4, 5], [3]], "of what was finished nothing is given again"
    assert (letters_of(lists), lists.rig.image.committed) == ([(4, "failed")], 4)


def test_what_a_change_stood_for_is_named_after_a_halt_too(begin: Begin) -> None:
    """P9: by the policy as by the command, and over a `retry`."""
    lists = begin(coalesce=True, failure_policy="halt")
    lists.handle = fail_at(2)
    with ended(WantedError):
        lists.run(1, *"aa")
    assert lists.rig.image.state == "halted"
    assert lists.rig.partitions.retry(lists.rig.image)
    with ended(WantedError):
        lists.run(2, *"aa")
    assert lists.calls == [[2], [2]], "it is given itself: no later one takes its place, and loses the names"
    assert lists.bridge.operations.skip(HANDLER, 0).run().fields["parts"][0]["result"] == "done"
    (letter,) = lists.find().letters
    assert (letter.passed, letter.passed_over) == (1, [token(1)["_data"]])


def test_single_changes_are_coalesced_within_a_run(begin: Begin) -> None:
    """P2: of a handler of single changes; what fails behind others has its outcome under the same claim."""
    lists = begin(single=True, coalesce=True)
    lists.run(1, *"abab")
    assert lists.calls == [[3], [4]]
    assert lists.rig.document["handled"]["last"] == 4
    lists.rig.claims.commit(lists.rig.where)
    lists.calls.clear()
    lists.handle = fail_at(6)
    with ended(WantedError):
        lists.run(5, *"abac")
    assert lists.calls == [[6], [5]], "what a later change stood for is given, where that one is not any more"
    assert (lists.rig.image.committed, letters_of(lists)) == (6, [(6, "failed")])
    lists.run(7, *"ac")
    assert lists.calls[2:] == [[7], [8]]


def test_a_change_that_fails_when_time_is_up_is_sent_alone(begin: Begin) -> None:
    """P2, P6: what stands before it would take too long; nothing is counted, and each has its own time."""
    lists = begin(single=True, coalesce=True, run_seconds=1e-6)
    lists.handle = fail_at(7)
    keys = [*"abcdef", *"fedcba"]
    with ended(Ignore):
        lists.run(1, *keys)
    assert lists.calls == [[7], [1]]
    image = lists.rig.image
    assert (image.committed, image.one_by_one_until, image.claim, letters_of(lists)) == (1, 12, None, [])
    lists.flow(*keys[1:])
    assert letters_of(lists) == [(7, "failed")]


@pytest.mark.parametrize("seconds", [-1.0, 60.0], ids=["recorded", "not yet"])
def test_a_crash_of_a_coalesced_run_repeats_what_could_not_be_recorded_alone(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """P2, P6: the position follows as far as no document is left behind it."""
    monkeypatch.setattr(execution, "_PROGRESS_SECONDS", seconds)
    lists = begin(single=True, coalesce=True)
    seen: list[int] = []

    def handle(changes: Changes) -> None:
        seen.append(lists.rig.image.committed)
        if number_of(changes[0]) == 6:
            raise SystemExit

    lists.handle = handle
    with pytest.raises(SystemExit):
        lists.run(1, *"abacdefd")
    assert lists.calls == [[2], [3], [4], [6]]
    assert seen == ([0, 0, 3, 4] if seconds < 0 else [0] * 4)
    image = lists.rig.image
    assert (image.committed, image.claim, image.crashes, image.one_by_one_until) == (4, None, 1, 8)
