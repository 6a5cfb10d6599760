"""Runs of several changes, and lists, on a real replica set: what is recorded when, and which change is charged."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson.errors import InvalidBSON
from bson.int64 import Int64
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import AutoReconnect

from mongo_celery import Change, Changes
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claims
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, REQUESTED
from mongo_celery.bridge.state.replays import Replays
from mongo_celery.bridge.worker import execution
from mongo_celery.bridge.worker.envelope import Carrier, Run
from mongo_celery.bridge.worker.runtime import WorkerRuntime
from mongo_celery.errors import CommandRefusedError, HandlerCrashedError, RefusedChangeError
from mongo_celery.locking import after_commit
from mongo_celery.signals import change_dead_lettered, change_halted
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event
from tests.rig.changes import HANDLER, TERM, Document, event_of_key, hash_of, make_run, number_of, token
from tests.rig.worker import APP_NAME, Begin, WantedError, WorkerRig, fail_at, worker_with

INLINE = {"carrier": Carrier("a-message-that-nothing-follows")}


@pytest.fixture
def begin(
    mongo_client: MongoClient[Document], mongo_url: str, state_database: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Begin]:
    monkeypatch.setattr(execution, "_PROGRESS_SECONDS", 60.0)  # none is recorded, however long a change takes
    with worker_with(mongo_client, mongo_url, state_database, failure_policy="dead_letter") as begin:
        yield begin


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is recorded between any two changes, as if each of them took long."""
    monkeypatch.setattr(execution, "_PROGRESS_SECONDS", -1.0)


@pytest.mark.parametrize("options", [{}, INLINE], ids=["chain", "inline"])
def test_a_crash_charges_the_change_that_was_under_way_and_repeats_nothing_that_is_recorded(
    begin: Begin, always: None, options: dict[str, Any]
) -> None:
    del always
    runs = begin()

    def handle(changes: Changes) -> None:
        if number_of(changes[0]) == 70:
            raise SystemExit

    runs.handle = handle
    keys = ["k"] * 100
    with pytest.raises(SystemExit):
        runs.run(1, *keys, **options)
    image = runs.rig.image
    assert (image.committed, image.claim, image.crashes, image.one_by_one_until) == (69, None, 1, 100)
    runs.handle = bool
    runs.flow(*keys[69:75])
    assert runs.calls[69:] == [[70], [70], [71], [72], [73], [74], [75]], "one by one from there on"


@pytest.mark.parametrize("place", [1, 4, 8])
@pytest.mark.parametrize("options", [{}, INLINE], ids=["chain", "inline"])
def test_a_change_that_fails_at_any_place_of_a_run_is_started_once(
    begin: Begin, place: int, options: dict[str, Any]
) -> None:
    runs = begin()
    runs.handle = fail_at(place)
    with pytest.raises(WantedError):
        runs.run(1, *"abcdefgh", **options)
    image = runs.rig.image
    assert (image.committed, image.data, image.claim) == (place, token(place)["_data"], None)
    assert runs.calls == [[number] for number in range(1, place + 1)]
    letter = runs.rig.letters.find_one()
    assert letter is not None
    assert (letter["seq"], letter["attempts"], letter["error"]) == (place, 1, "WantedError: as asked")
    assert letter["hash"] % (1 << 64) == hash_of("abcdefgh"[place - 1]), "it has the place of its own key"
    if place < 8:
        runs.run(place + 1, *"abcdefgh"[place:], **options)
        assert runs.calls[place:] == [[number] for number in range(place + 1, 9)]


def test_a_retry_at_a_later_place_is_that_changes_own(begin: Begin) -> None:
    """P2: parked as the first, with its own count, behind what is done."""
    runs = begin()

    def handle(changes: Changes) -> None:
        if number_of(changes[0]) == 3 and len(runs.calls) < 5:
            raise Retry(exc=WantedError("later"), when=datetime.now(UTC))

    runs.handle = handle
    with pytest.raises(Retry):
        runs.run(1, *"abcde")
    image = runs.rig.image
    assert (image.committed, image.retries, image.claim) == (2, 1, None)
    with pytest.raises(Retry):
        runs.run(3, *"cde")
    assert runs.rig.image.retries == 2
    runs.run(3, *"cde")
    assert runs.calls == [[1], [2], [3], [3], [3], [4], [5]]
    assert runs.retries == [0, 0, 0, 1, 2, 0, 0]


def test_a_run_begins_no_change_when_its_seconds_are_over(begin: Begin) -> None:
    """The rest is sent anew, with the whole time for each."""
    runs = begin(run_seconds=0.000001)
    runs.run(1, *"abcd")
    assert runs.calls == [[1]]
    assert runs.rig.document["handled"]["last"] == 1


def test_a_newer_execution_ends_a_run_that_was_recorded_before(begin: Begin, always: None) -> None:
    del always
    runs = begin()

    def handle(changes: Changes) -> None:
        if number_of(changes[0]) == 2:
            runs.rig.lapse()
            runs.rig.claim(2, 4, owner="newer")

    runs.handle = handle
    with pytest.raises(Ignore):
        runs.run(1, *"abcd")
    assert runs.calls == [[1], [2]]
    document = runs.rig.document
    assert (document["committed"], document["claim"]["owner"]) == (1, "newer")


@pytest.fixture
def unanswered(failpoint: Failpoint) -> AbstractContextManager[int]:
    return failpoint(failCommands=["update"], appName=APP_NAME, closeConnection=True)


def test_an_outcome_that_is_refused_at_last_takes_back_what_was_charged_meanwhile(
    begin: Begin, unanswered: AbstractContextManager[None]
) -> None:
    """P14: a duplicate claimed before the write could be made, and charged an owner that lives."""
    worker = begin()
    worker.patience = 0.1

    def meet_an_outage(_changes: Changes) -> None:
        raise AutoReconnect("away")

    worker.handle = meet_an_outage
    with unanswered:
        with pytest.raises(Ignore):
            worker.run(1, "a")
        worker.rig.lapse()
        assert worker.rig.claim(owner="duplicate").crashes == 1
    wait_for(lambda: worker.rig.document["retry"]["crashes"] == 0)
    assert worker.rig.document["claim"]["owner"] == "duplicate"


def test_a_halt_that_is_written_late_is_signalled_then(begin: Begin, unanswered: AbstractContextManager[None]) -> None:
    """Not before it is stored: a receiver that looks at the status must find it."""
    worker, states = begin(failure_policy="halt"), list[str]()
    worker.patience = 0.1
    worker.bad = {"a"}

    def look(**_: Any) -> None:
        states.append(worker.rig.document["state"])

    change_halted.connect(look)
    try:
        with unanswered, pytest.raises(Ignore):
            worker.run(1, "a")
        wait_for(lambda: states == ["halted"])
    finally:
        change_halted.disconnect(look)


def test_an_outcome_that_is_refused_at_last_leaves_no_claim(
    begin: Begin, unanswered: AbstractContextManager[None]
) -> None:
    """P14: the key behind which a change was to wait was released before the write; the next claim counts no crash."""
    worker, key = begin(failure_policy="park_key"), 5
    worker.patience = 0.1
    worker.rig.spoil(parkedKeys=[{"key": "a", "hash": Int64(key)}])
    with unanswered:
        with pytest.raises(Ignore):
            worker.run(1, "a", hash=key, hashes=())
        assert worker.rig.document["claim"] is not None
        worker.rig.spoil(parkedKeys=[])
    wait_for(lambda: worker.rig.document["claim"] is None)
    assert (worker.calls, worker.rig.document["handled"]) == ([], None)
    assert worker.rig.claim(owner="next").crashes == 0


def test_a_signal_that_always_comes_is_counted_at_last(begin: Begin) -> None:
    """P9, P14: it may be that of a hard time limit whose clock began long before the handler."""
    worker = begin(failure_policy="halt")

    def meet_a_signal(_changes: Changes) -> None:
        raise SystemExit(signal.SIGTERM - 256)

    worker.handle = meet_a_signal
    for ends in range(1, 12):
        with pytest.raises(SystemExit):
            worker.run(1, "a")
        retry = worker.rig.document["retry"]
        assert (worker.rig.document["claim"], retry["crashes"]) == (None, ends // 11)
        assert (retry["waiting"] or {}).get("doubts", 10) == min(ends, 10)
        worker.rig.spoil(**{"retry.notBefore": None})
    assert "SIGTERM" in worker.rig.document["retry"]["error"]
    worker.rig.spoil(**{"retry.crashes": 9})
    with pytest.raises(HandlerCrashedError):
        worker.run(1, "a")
    assert worker.rig.document["state"] == "halted"


def letters_of(lists: WorkerRig) -> list[tuple[int, str]]:
    return [(number, cause) for _, number, cause in lists.letters]


def test_every_change_is_done_or_has_a_letter_whichever_fail(begin: Begin) -> None:
    lists = begin(single=False)
    lists.handle = fail_at(1, 5, 6, 12)
    lists.flow(*"abcdefghijkl")
    assert [number for number, _ in letters_of(lists)] == [1, 5, 6, 12]
    assert lists.rig.image.committed == 12
    assert {number for call in lists.calls for number in call} == {*range(1, 13)}


def test_what_is_finished_is_recorded_while_the_claim_goes_on(begin: Begin) -> None:
    """P2: whatever becomes of the rest, also where the process ends: nothing of it runs again."""
    lists = begin(single=False)
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
    lists = begin(single=False, failure_policy=policy)
    lists.handle = fail_at(2, tells=True)
    with pytest.raises(WantedError):
        lists.run(1, *"abc")
    image = lists.rig.image
    assert (image.state, image.committed) == (state, committed)
    assert letters_of(lists) == ([] if cause is None else [(2, cause)])
    if policy == "park_key":
        assert [each["hash"] % (1 << 64) for each in lists.rig.document["parkedKeys"]] == [hash_of("b")]
    if policy == "halt":
        assert lists.rig.document["halted"]["resumeToken"] == token(2)


def test_an_outage_is_nobodys_and_the_list_is_not_split_for_it(begin: Begin) -> None:
    lists = begin(single=False)

    def away(_changes: Changes) -> None:
        raise AutoReconnect("no primary")

    lists.handle = away
    with pytest.raises(Ignore):
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
    lists = begin(single=False)

    def handle(changes: Changes) -> None:
        if any(number_of(change) == 3 for change in changes):
            raise SoftTimeLimitExceeded

    lists.handle = handle
    with pytest.raises(Ignore):
        lists.run(1, *"abcd")
    image = lists.rig.image
    assert (image.committed, image.one_by_one_until, image.claim, image.crashes) == (0, 4, None, 0)
    lists.flow(*"abcd")
    assert letters_of(lists) == [(3, "failed")]
    assert lists.calls[1:] == [[1], [2], [3], [4]]


def test_a_list_that_crashed_runs_change_by_change(begin: Begin) -> None:
    """P6: a worker that was killed charges its first change alone."""
    lists = begin(single=False)
    lists.rig.claim(1, 4, owner="dead")
    lists.rig.lapse()
    lists.run(1, *"abcd")
    assert lists.calls == [[1]]
    assert lists.rig.document["handled"]["last"] == 1


def test_a_change_that_cannot_be_decoded_is_found_without_halving(begin: Begin) -> None:
    """P6: what it fails with says which it is; what is before it is given, and the others are not asked for it."""
    lists = begin(single=False)
    lists.handle = lambda changes: [number_of(change) for change in changes]
    raws = [bson.encode(event_of_key(number, key)) for number, key in enumerate("abcdefgh", 1)]
    raws[4] = raws[4].replace(b"insert", b"ins\xffrt")
    with pytest.raises(InvalidBSON):
        lists.run(1, *"abcdefgh", changes=tuple(raws))
    assert lists.calls[-1:] == [[1, 2, 3, 4]]
    assert len(lists.calls) <= 2
    assert lists.rig.image.committed == 5
    (letter,) = lists.find().letters
    assert letter.attempts == 1


@pytest.mark.parametrize("chained", [True, False])
def test_the_error_that_was_being_handled_is_the_one_that_counts(begin: Begin, chained: bool) -> None:
    """P6: a `from` that was forgotten makes an outage no failure of the change."""
    lists = begin(single=False)

    def handle(changes: Changes) -> None:
        try:
            raise AutoReconnect("no primary")
        except AutoReconnect as error:
            if chained:
                raise changes.failed_at(1) from error
            raise changes.failed_at(1)  # noqa: B904 - a `from` that was forgotten

    lists.handle = handle
    with pytest.raises(Ignore):
        lists.run(1, *"abc")
    image = lists.rig.image
    assert image.waiting is not None
    assert (lists.calls, image.committed, image.retries, letters_of(lists)) == ([[1, 2, 3]], 1, 0, [])


@pytest.mark.parametrize("tells", [True, False])
def test_a_dead_letter_names_what_its_change_stood_for(begin: Begin, tells: bool) -> None:
    lists = begin(single=False, coalesce=True)
    lists.handle = fail_at(3, tells=tells)
    with pytest.raises(WantedError):
        lists.run(1, *"aaab")
    assert lists.calls[0] == [3, 4]
    assert (letters_of(lists), lists.rig.image.committed) == ([(3, "failed")], 3)
    (letter,) = lists.find().letters
    assert (letter.passed, letter.passed_over) == (2, [token(1)["_data"], token(2)["_data"]])


def test_what_a_change_stood_for_is_named_after_a_halt_too(begin: Begin) -> None:
    lists = begin(single=False, coalesce=True, failure_policy="halt")
    lists.handle = fail_at(2)
    with pytest.raises(WantedError):
        lists.run(1, *"aa")
    assert lists.rig.image.state == "halted"
    assert lists.rig.partitions.retry(lists.rig.image)
    with pytest.raises(WantedError):
        lists.run(2, *"aa")
    assert lists.calls == [[2], [2]], "it is given itself: no later one takes its place, and loses the names"
    assert lists.bridge.operations.skip(HANDLER, 0).run().fields["parts"][0]["result"] == "done"
    (letter,) = lists.find().letters
    assert (letter.passed, letter.passed_over) == (1, [token(1)["_data"]])


def test_single_changes_are_coalesced_within_a_run(begin: Begin) -> None:
    lists = begin(coalesce=True)
    lists.run(1, *"abab")
    assert lists.calls == [[3], [4]]
    assert lists.rig.document["handled"]["last"] == 4
    lists.rig.claims.commit(lists.rig.where)
    lists.calls.clear()
    lists.handle = fail_at(6)
    with pytest.raises(WantedError):
        lists.run(5, *"abac")
    assert lists.calls == [[6], [5]], "what a later change stood for is given, where that one is not any more"
    assert (lists.rig.image.committed, letters_of(lists)) == (6, [(6, "failed")])
    lists.run(7, *"ac")
    assert lists.calls[2:] == [[7], [8]]


@pytest.mark.parametrize("seconds", [-1.0, 60.0], ids=["recorded", "not yet"])
def test_a_crash_of_a_coalesced_run_repeats_what_could_not_be_recorded_alone(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """P2, P6: the position follows as far as no document is left behind it."""
    monkeypatch.setattr(execution, "_PROGRESS_SECONDS", seconds)
    lists = begin(coalesce=True)
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


# -- runs of stored changes -----------------------------------------------------------------------------


_KILOBYTE, _MEGABYTE = 1 << 10, 1 << 20
_HASH = 2**64 - 5


@pytest.fixture
def worker(begin: Begin) -> WorkerRig:
    made = begin(failure_policy="halt")
    made.patience = 1.0
    return made


@pytest.fixture
def documents(worker: WorkerRig) -> Collection[Document]:
    return worker.rig.documents.database["backlog"]


def store(worker: WorkerRig, *changes: bytes) -> Run:
    """Store changes, as the listener does; the run that names them."""
    data = [token(place)["_data"] for place in range(1, 1 + len(changes))]
    stored = [StoredChange(each, raw, _HASH) for each, raw in zip(data, changes, strict=True)]
    worker.rig.store.backlog.insert(worker.rig.where, stored, TERM)
    return run_of(1, len(changes), stored=tuple(data))


def execute(worker: WorkerRig, run: Run, handle: Callable[[Change], object] = bool) -> list[Change]:
    """Let a worker run a run; the changes that the handler got."""
    got: list[Change] = []

    def note(changes: Changes) -> None:
        got.append(changes[0])
        handle(changes[0])

    worker.handle = note
    worker.execute(run)
    return got


def rest(worker: WorkerRig) -> Document | None:
    state = worker.rig.document
    return state if state["claim"] is None else None


def made(number: int = 1, size: int = 200 * _KILOBYTE) -> bytes:
    """A change of so many bytes, which can hardly be compressed."""
    return bson.encode(event(_id=token(number), fullDocument={"_id": 1, "bytes": os.urandom(size)}))


def run_of(first: int, count: int, *changes: bytes, **fields: Any) -> Run:
    return make_run(first, count, *changes, hash=_HASH, **fields)


def _fail(_change: Change) -> None:
    raise KeyError("no")


def _never(change: Change) -> None:
    pytest.fail(f"the handler was called with {change}")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(record, "event", "") for record in caplog.records]


def test_a_worker_reads_what_its_message_names(worker: WorkerRig, documents: Collection[Document]) -> None:
    changes = [made(1, 15 * _MEGABYTE), made(2)]
    got = execute(worker, store(worker, *changes))
    assert [bson.encode(each.raw) for each in got] == changes
    handled = worker.rig.document["handled"]
    assert (handled["last"], handled["resumeToken"]) == (2, token(2))
    done = token(2)["_data"]
    assert sum(worker.rig.store.backlog.remove(worker.rig.where, done, done, TERM)) > 0
    assert documents.count_documents({}) == 0, "what is committed takes all of it away"


def test_a_change_that_fits_into_no_document_halts_its_partition_as_every_refused_one(worker: WorkerRig) -> None:
    with pytest.raises(RefusedChangeError):
        execute(worker, store(worker, made(1, 17 * _MEGABYTE)), _never)
    state = worker.rig.document
    assert (state["state"], state["halted"]["resumeToken"]["_data"]) == ("halted", token(1)["_data"])


def _garble(documents: Collection[Document], where: Document) -> None:
    documents.update_one(where, {"$set": {"raw": b"\xff" * 9, "zip": True}})


def _setter(**fields: Any) -> Callable[[Collection[Document], Document], None]:
    def change(documents: Collection[Document], where: Document) -> None:
        documents.update_one(where, {"$set": fields, "$unset": {"zip": 1}})

    return change


_ANOTHER = bson.encode(event(_id=token(7)))
_SPOILT = {
    "not compressed": _garble,
    "no BSON": _setter(raw=b"\xff" * 9),
    "no token": _setter(raw=bson.encode({"operationType": "insert"})),
    "of another change": _setter(raw=_ANOTHER),
    "of another change, which was refused": _setter(
        raw=_ANOTHER, refusal={"reason": "no", "halts": True, "lasts": False}, refused=True
    ),
    "the token too": _setter(raw=_ANOTHER, token=token(7)),
    "a number": _setter(raw=2**40),
}


@pytest.mark.parametrize("spoil", _SPOILT.values(), ids=_SPOILT)
def test_a_change_whose_bytes_are_damaged_halts_its_partition_and_no_change_before_it(
    worker: WorkerRig, documents: Collection[Document], spoil: Callable[[Collection[Document], Document], None]
) -> None:
    changes = [made(1, _KILOBYTE), made(2, _KILOBYTE), made(3, _KILOBYTE)]
    run = store(worker, *changes)
    spoil(documents, {"_id": f"{worker.rig.where}/{token(2)['_data']}"})
    assert [bson.encode(each.raw) for each in execute(worker, run)] == changes[:1]
    handled = worker.rig.document["handled"]
    assert (handled["last"], handled["resumeToken"]) == (1, token(1))
    assert worker.rig.store.claims.commit(worker.rig.where, 1)
    with pytest.raises(RefusedChangeError):
        execute(worker, run_of(2, 2, stored=run.stored[1:]), _never)
    state = worker.rig.document
    assert (state["state"], state["halted"]["resumeToken"]["_data"]) == ("halted", token(2)["_data"])
    assert (state["retry"]["crashes"], state["retry"]["error"] != "") == (0, True)


def test_a_change_waits_uncounted_while_its_bytes_cannot_be_read(
    worker: WorkerRig, documents: Collection[Document], failpoint: Failpoint
) -> None:
    """P14: MongoDB was away between the claim and the reading; the policy of the handler has no part in it."""
    run = store(worker, made())
    away = {"failCommands": ["find"], "namespace": documents.full_name, "closeConnection": True}
    with failpoint(appName=APP_NAME, **away), pytest.raises(Ignore):
        execute(worker, run, _never)
    state = wait_for(lambda: rest(worker))
    assert (state["state"], state["retry"]["count"], state["retry"]["crashes"]) == ("flowing", 0, 0)
    assert state["retry"]["waiting"]["count"] == 1
    worker.rig.spoil(**{"retry.notBefore": None})
    assert len(execute(worker, run)) == 1


def test_a_change_whose_bytes_are_gone_waits_uncounted_until_they_are_back(
    worker: WorkerRig, documents: Collection[Document]
) -> None:
    """P13, P14: whoever has removed them may bring them back."""
    run = store(worker, made())
    saved = list(documents.find())
    documents.delete_many({})
    with pytest.raises(Ignore):
        execute(worker, run, _never)
    state = wait_for(lambda: rest(worker))
    assert (state["state"], state["retry"]["count"], state["retry"]["crashes"]) == ("flowing", 0, 0)
    documents.insert_many(saved)
    worker.rig.spoil(**{"retry.notBefore": None})
    assert len(execute(worker, run)) == 1


def test_a_change_that_halts_is_stored_before(worker: WorkerRig, documents: Collection[Document]) -> None:
    """P13: a command has its bytes whatever becomes of the oplog; unmarked, so that nothing else changes."""
    raw = made(size=_KILOBYTE)
    with pytest.raises(KeyError):
        execute(worker, run_of(1, 1, raw), _fail)
    state = worker.rig.document
    assert (state["state"], state["stored"]) == ("halted", None)
    data = state["halted"]["resumeToken"]["_data"]
    stored = worker.rig.store.backlog.fetch(worker.rig.where, [data])[data]
    assert (stored.raw, stored.hash, stored.refusal, stored.token) == (raw, _HASH, None, None)
    (document,) = documents.find()
    assert document["term"] == TERM


@pytest.mark.parametrize("trouble", [{"errorCode": 13}, {"closeConnection": True}], ids=["refused", "unanswered"])
def test_a_change_halts_all_the_same_where_it_cannot_be_stored(
    worker: WorkerRig,
    documents: Collection[Document],
    failpoint: Failpoint,
    caplog: pytest.LogCaptureFixture,
    trouble: Document,
) -> None:
    with failpoint(failCommands=["insert"], appName=APP_NAME, **trouble), pytest.raises(KeyError):
        execute(worker, run_of(1, 1, made(size=_KILOBYTE)), _fail)
    assert worker.rig.document["state"] == "halted"
    assert documents.count_documents({}) == 0
    assert "halted_change_not_stored" in events(caplog)


def test_a_dead_letter_that_kills_its_workers_stays_a_dead_letter(begin: Begin) -> None:
    """P9: after `max_crashes` deaths its replay has failed without another call; the partition goes on."""
    worker = begin()
    worker.bad = {"a"}
    worker.flow("a")
    worker.ask()
    (request,) = worker.requests
    for starts in range(worker.bridge.options.max_crashes + 1):
        claim = worker.rig.claims.take_for_replay(worker.rig.where, request.letter, owner=f"dead {starts}", term=TERM)
        assert claim is not None
        assert worker.rig.store.replays.start(claim, request.letter, starts) is not None
        worker.rig.lapse()
    worker.bad = set()
    with pytest.raises(HandlerCrashedError):
        worker.replay()
    worker.flow("b")
    (letter,) = worker.find().letters
    assert letter.error.startswith("HandlerCrashedError")
    assert worker.requests == []
    assert worker.got == [("b", 2)]


@pytest.mark.parametrize("error", [AutoReconnect(), SoftTimeLimitExceeded()], ids=["no answer", "soft limit"])
def test_a_start_of_a_replay_in_which_nothing_ran_counts_no_crash(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """P14: the start was recorded, and its answer was lost, or came too late."""
    worker = begin()
    worker.bad = {"a"}
    worker.flow("a")
    worker.ask()
    worker.bad = set()
    start = Replays.start

    def lose(*args: Any) -> None:
        assert start(*args) is not None
        raise error

    with monkeypatch.context() as lost:
        lost.setattr(Replays, "start", lose)
        for starts in range(worker.bridge.options.max_crashes + 1):
            (request,) = worker.requests
            assert (request.starts, request.crashes, request.state) == (starts, 0, REQUESTED)
            with pytest.raises(Ignore):
                worker.replay()
    assert worker.rig.image.claim is None
    worker.replay()
    assert worker.got == [("a", 1)]
    assert not worker.find().letters


@pytest.mark.parametrize("charged", [False, True], ids=["frozen", "its handler kept the process busy"])
def test_a_worker_that_was_frozen_in_a_replay_counts_no_crash(begin: Begin, *, charged: bool) -> None:
    """P14: another worker has started the replay, and counted the crash, before the first one continues."""
    worker = begin()
    worker.bad = {"a"}
    worker.flow("a")
    worker.ask()
    worker.bad = set()

    def freeze(_: Changes) -> None:
        worker.handle = bool
        worker.rig.lapse()
        (request,) = worker.requests
        claim = worker.rig.claims.take_for_replay(worker.rig.where, request.letter, owner="next", term=TERM)
        assert claim is not None
        again = worker.rig.store.replays.start(claim, request.letter, request.starts)
        assert again is not None
        assert again.crashes == 1
        running = execution.current.get()
        assert running is not None
        running._beat.charged = charged

    worker.handle = freeze
    with pytest.raises(Ignore):
        worker.replay()
    wait_for(lambda: worker.requests[0].crashes == charged)


@pytest.mark.parametrize("patience", [5.0, 0.0], ids=["repeated", "deferred"])
@pytest.mark.parametrize(
    ("policy", "name", "signal"),
    [("halt", "halt", change_halted), ("dead_letter", "set_aside", change_dead_lettered)],
    ids=["halt", "dead letter"],
)
def test_an_outcome_whose_answer_was_lost_is_reported(
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    name: str,
    signal: Any,
    patience: float,
) -> None:
    """P9, P16: the repeated write is refused, because the first one has ended the claim."""
    worker = begin(failure_policy=policy)
    worker.bad, worker.patience = {"a"}, patience
    write, sent = getattr(Claims, name), list[Any]()
    lost = [AutoReconnect()]

    def lose(*args: Any, **options: Any) -> Any:
        accepted = write(*args, **options)
        if lost:
            raise lost.pop()
        return accepted

    def note(**found: Any) -> None:
        sent.append(found["key"])

    monkeypatch.setattr(Claims, name, lose)
    signal.connect(note)
    try:
        with pytest.raises(WantedError if patience else Ignore):
            worker.run(1, "a")
        wait_for(lambda: sent)
    finally:
        signal.disconnect(note)
    assert len(sent) == 1
    assert events(caplog).count("change_failed") == 1
    assert "outcome_refused" not in events(caplog)
    image = worker.rig.image
    assert (image.state, image.committed) == (("halted", 0) if policy == "halt" else ("flowing", 1))


def test_a_change_whose_key_was_just_released_is_no_sign_of_another_worker(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P16: a person has released the key between the claim and the write. The change then runs."""
    worker = begin(failure_policy="park_key")
    worker.bad = {"a"}
    worker.flow("a")
    worker.bad = set()
    write = Claims.set_aside

    def release(*args: Any, **options: Any) -> bool:
        worker.rig.spoil(parkedKeys=None)
        return write(*args, **options)

    with monkeypatch.context() as released:
        released.setattr(Claims, "set_aside", release)
        with pytest.raises(Ignore):
            worker.run(2, "a")
    assert "outcome_refused" not in events(caplog)
    worker.flow("a")
    assert worker.got == [("a", 2)]


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]], ids=["the last", "the first of two"])
def test_a_time_limit_after_the_commit_changes_no_outcome(
    begin: Begin, caplog: pytest.LogCaptureFixture, keys: list[str]
) -> None:
    """P16: the callback was interrupted, but the effects and the outcome are one transaction."""
    worker = begin(transactional=True)

    def limit() -> None:
        raise SoftTimeLimitExceeded

    worker.handle = lambda changes: after_commit(limit) if number_of(changes[0]) == 1 else None
    worker.run(1, *keys)
    assert worker.got == [("a", 1)]
    assert not {"change_failed", "outcome_refused", "outcome_not_storable"} & {*events(caplog)}
    worker.rig.claims.commit(worker.rig.where)
    image = worker.rig.image
    assert (image.committed, image.claim, image.crashes) == (1, None, 0)


@pytest.mark.parametrize("policy", ["halt", "dead_letter"])
def test_an_interrupted_commit_is_no_failure(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """P16: the commit has ended the claim, so the failure is refused. But it was not stored before."""
    worker = begin(transactional=True, failure_policy=policy)
    commit = ClientSession.commit_transaction

    def interrupt(session: ClientSession) -> None:
        commit(session)
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as limited:
        limited.setattr(ClientSession, "commit_transaction", interrupt)
        with pytest.raises(Ignore):
            worker.run(1, "a")
    assert not {"change_failed", "outcome_refused"} & {*events(caplog)}
    worker.rig.claims.commit(worker.rig.where)
    image = worker.rig.image
    assert (image.state, image.committed, image.claim, worker.letters) == ("flowing", 1, None, [])


def test_a_shutdown_after_a_commit_counts_no_crash(begin: Begin) -> None:
    """P14: the first change is committed, and the second one has not started."""
    worker = begin(transactional=True)

    def end() -> None:
        raise SystemExit

    worker.handle = lambda changes: after_commit(end) if number_of(changes[0]) == 1 else None
    with pytest.raises(SystemExit):
        worker.run(1, "a", "b")
    image = worker.rig.image
    assert (image.committed, image.claim, image.crashes) == (1, None, 0)


def test_a_change_that_no_thread_can_keep_waits(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9, P14, P17: the process had too many threads, which is no crash. A later message starts the heartbeats."""
    worker, start = begin(), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "mongo_celery-heartbeat":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Ignore):
            worker.run(1, "a")
        image, retry = worker.rig.image, worker.rig.document["retry"]
        assert (image.claim, image.crashes, retry["waiting"]["count"], worker.calls) == (None, 0, 1, [])
        with pytest.raises(Ignore):
            worker.run(1, "a")
        assert worker.rig.document["retry"] == retry, "it waits"
    worker.rig.spoil(**{"retry.notBefore": None})
    heartbeats = worker.bridge.wiring.of_process(WorkerRuntime).heartbeats
    worker.handle = lambda _: wait_for(lambda: heartbeats._thread is not None and heartbeats._thread.is_alive())
    worker.flow("a")
    assert worker.got == [("a", 1)]


@pytest.mark.parametrize("policy", ["none has failed", "halt", "dead_letter"])
def test_an_outcome_without_a_right_is_written_when_the_right_is_granted(
    begin: Begin, failpoint: Failpoint, policy: str
) -> None:
    """P14: whoever takes a right away, or makes the user anew, has no part in the change."""
    worker = begin(failure_policy=policy) if policy in ("halt", "dead_letter") else begin()
    worker.bad = {"a"} if policy in ("halt", "dead_letter") else set()
    with failpoint(failCommands=["update"], appName=APP_NAME, errorCode=13), pytest.raises(Ignore):
        worker.run(1, "a")
    wait_for(lambda: worker.rig.document.get("handled") or worker.rig.document["claim"] is None)
    worker.rig.claims.commit(worker.rig.where)
    image = worker.rig.image
    assert (image.committed, image.state, image.crashes) == (
        (0, "halted", 0) if policy == "halt" else (1, "flowing", 0)
    )
    assert len(worker.letters) == (policy == "dead_letter")


def test_an_objection_to_a_replay_is_no_attempt(begin: Begin) -> None:
    """P14, P16: its handler has not started."""
    worker = begin()
    worker.bad = {"a"}
    worker.flow("a")
    (before,) = worker.find().letters
    worker.ask()
    worker.rig.letters.update_one({}, {"$set": {"replays": Int64(REPLAYS_MAX)}})
    with pytest.raises(CommandRefusedError):
        worker.replay()
    (letter,) = worker.find().letters
    assert letter.attempts == before.attempts == 1
