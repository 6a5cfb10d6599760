"""Runs of several changes on a real replica set: what is recorded when, and which change is charged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery.exceptions import Ignore, Retry
from pymongo import MongoClient
from pymongo.errors import AutoReconnect

from mongo_celery import Changes
from mongo_celery.bridge.worker import execution
from mongo_celery.bridge.worker.envelope import Carrier
from tests.fixtures.process import wait_for
from tests.rig.changes import Document, hash_of, number_of, token
from tests.rig.worker import Begin, WantedError, fail_at, worker_with

INLINE = {"carrier": Carrier("a-message-that-nothing-follows")}


@pytest.fixture
def begin(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[Begin]:
    """Give what makes a partition with nothing done and a worker, whose handler gets one change a call; once a test."""
    with worker_with(mongo_client, mongo_url, state_database, failure_policy="dead_letter") as begin:
        yield begin


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is recorded between any two changes, as if each of them took long."""
    monkeypatch.setattr(execution, "_PROGRESS_SECONDS", -1.0)


# -- progress -----------------------------------------------------------------------------------------


def test_a_long_run_records_how_far_it_is_while_its_claim_goes_on(begin: Begin) -> None:
    """By time alone: quick changes in front of and behind one that takes long share a write."""
    runs = begin()
    seen: list[tuple[int, int]] = []

    def handle(changes: Changes) -> None:
        image = runs.rig.image
        assert image.claim is not None
        seen.append((image.committed, image.claim["first"]))
        if number_of(changes[0]) == 3:
            began = time.monotonic()
            wait_for(lambda: time.monotonic() - began >= execution._PROGRESS_SECONDS)

    runs.handle = handle
    runs.run(1, *"abcdef")
    assert seen[:3] == [(0, 1)] * 3
    assert seen[3:] == [(3, 4)] * 3
    assert runs.calls == [[number] for number in range(1, 7)]
    assert len(runs.tokens) == 1
    image = runs.rig.image
    assert (image.committed, image.data, image.claim, image.handled) == (6, token(6)["_data"], None, None)
    assert not runs.rig.claims.commit(runs.rig.where, 1), "its commit message finds its work done"


@pytest.mark.parametrize("options", [{}, INLINE], ids=["chain", "inline"])
def test_a_crash_charges_the_change_that_was_under_way_and_repeats_nothing_that_is_recorded(
    begin: Begin, always: None, options: dict[str, Any]
) -> None:
    """P2, P6: the process ends in the middle of a run; what a new one claims begins there."""
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


# -- a change that fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [1, 4, 8])
@pytest.mark.parametrize("options", [{}, INLINE], ids=["chain", "inline"])
def test_a_change_that_fails_at_any_place_of_a_run_is_started_once(
    begin: Begin, place: int, options: dict[str, Any]
) -> None:
    """P2, P6: its letter is written under the same claim, behind what is done; the rest comes with the next run."""
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


def test_an_outage_at_a_later_place_counts_nothing(begin: Begin) -> None:
    """P12: what is done is recorded, and the change waits."""
    runs = begin()

    def handle(changes: Changes) -> None:
        if number_of(changes[0]) == 3:
            raise AutoReconnect("no primary")

    runs.handle = handle
    with pytest.raises(Ignore):
        runs.run(1, *"abc")
    image = runs.rig.image
    assert (image.committed, image.retries, image.crashes) == (2, 0, 0)
    assert image.waiting is not None
    assert image.waiting["count"] == 1


# -- who decides --------------------------------------------------------------------------------------


def test_a_newer_execution_ends_a_run_that_was_recorded_before(begin: Begin, always: None) -> None:
    """P3: its next record is refused, and nothing more of it is begun."""
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


def test_a_run_begins_no_change_when_its_seconds_are_over(begin: Begin) -> None:
    """The rest is sent anew, with the whole time for each."""
    runs = begin(run_seconds=0.000001)
    runs.run(1, *"abcd")
    assert runs.calls == [[1]]
    assert runs.rig.document["handled"]["last"] == 1
