"""What a bridge stores is what the models allow; a build with one rule broken is found by what it stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.state.claims import Claim
from mongo_celery.mongo.oplog import operation_time
from tests.chaos import broken
from tests.fixtures.process import wait_for
from tests.fixtures.samples import IDENTITY, mark, token_data
from tests.rig.conformance import Recording, record
from tests.rig.storing import StoringTerm
from tests.rig.term import Document

_MOMENT = 0.01


class Stage:
    def __init__(self, client: MongoClient[Document], database: str) -> None:
        self._client, self._database = client, database
        self._start = operation_time(client)
        self._terms: list[StoringTerm] = []

    def begin(self) -> StoringTerm:
        self._terms.append(StoringTerm(self._client, self._database, mark(0)))
        return self._terms[-1]

    def record(self) -> Recording:
        return record(self._client, self._database, self._start)


@pytest.fixture
def stage(mongo_client: MongoClient[Document], state_database: str) -> Iterator[Stage]:
    made = Stage(mongo_client, state_database)
    yield made
    for term in made._terms:
        term.close()


def _try_claim(term: StoringTerm, owner: str) -> Claim | None:
    given: Any = {"term": term.rig.version, "first": 1, "last": 1, "token": token_data(1)}
    return term.rig.store.claims.take(term.rig.partition_id("record", 0), owner=owner, **given)


def _lapse(term: StoringTerm) -> None:
    over = {"claim.until": {"$subtract": ["$$NOW", 1]}}
    term.rig.partitions.update_many({"claim": {"$ne": None}}, [{"$set": over}])


def _claim_twice(stage: Stage) -> None:
    """Two messages ask for one run."""
    term = stage.begin()
    assert _try_claim(term, "first")
    _try_claim(term, "second")


def _claim_after_a_lapse(stage: Stage) -> None:
    """A worker has died, and another one runs the change."""
    term = stage.begin()
    assert _try_claim(term, "first")
    _lapse(term)
    assert _try_claim(term, "second")


def _succeed_late(stage: Stage) -> None:
    """A worker that was frozen records its success after another one has begun."""
    term = stage.begin()
    frozen = _try_claim(term, "frozen")
    assert frozen is not None
    _lapse(term)
    assert _try_claim(term, "other")
    term.rig.store.claims.handle(frozen, 1, {"_data": token_data(1)})


def _finish_the_second_first(stage: Stage) -> None:
    """Of two partitions the one with the later change is done first, and the watermark is stored."""
    term = stage.begin()
    term.read(1, index=0)
    term.read(2, index=1)
    early, late = sorted(term.dispatch(), key=lambda run: run.partition_id)
    term.run(late)
    term.look()
    term.flush()
    term.run(early)


def _store_changes(stage: Stage) -> None:
    """A partition is halted, and what comes in is stored."""
    term = stage.begin()
    term.read(1, 2, 3)
    term.halt(term.dispatch()[0])
    term.look()
    term.store()
    wait_for(lambda: len(term.stored()) == 3, message="three changes are stored")


def _remove_what_is_done(stage: Stage) -> None:
    """Of three stored changes one is done, and removed."""
    _store_changes(stage)
    term = stage.begin()
    term.read(1, 2, 3)
    term.look()
    term.store()
    term.retry()
    term.work(until=1)
    place = token_data(1)
    list(term.rig.store.backlog.remove(term.rig.partition_id("record", 0), place, place, term.rig.version))


def _acquire_what_is_held(stage: Stage) -> None:
    """A standby asks for the lease while another listener leads, whose clock is right."""
    term = stage.begin()
    until = {"expiresAt": {"$add": ["$$NOW", 60_000]}}
    term.rig.database["leases"].update_one({}, [{"$set": until}])
    term.rig.store.leases.acquire(IDENTITY)


SHOWS: Mapping[str, tuple[Callable[[Stage], None], set[str]]] = {
    "gate removed": (_claim_twice, {"claim"}),
    "fence not raised": (_claim_after_a_lapse, {"claim", "beat"}),
    "commit out of order": (_succeed_late, {"claim", "beat"}),
    "watermark as maximum": (_finish_the_second_first, {"claim", "handle", "commit"}),
    "mark before insert": (_store_changes, {"claim", "halt", "store", "mark"}),
    "removal above committed": (_remove_what_is_done, {"win", "store again", "retry", "handle", "commit", "remove"}),
    "client's clock": (_acquire_what_is_held, {"renew"}),
}
"""For each broken build that is found by what it stores, what shows it, and the steps that a sound one makes then."""


@pytest.mark.parametrize("name", SHOWS)
def test_a_sound_build_stores_what_the_models_allow(stage: Stage, name: str) -> None:
    """P1, P3-P5, P10: nothing that it does is anything else than a step of the models."""
    show, steps = SHOWS[name]
    show(stage)
    recording = stage.record()
    assert not recording.wrong
    assert recording.steps.keys() >= {"acquire", "create", *steps}


@pytest.mark.parametrize("name", SHOWS)
def test_a_broken_build_is_found_by_what_it_stores(stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P3-P5, P10: with one rule broken something is stored that no step of the models explains."""
    monkeypatch.setenv("CHAOS_ROLE", "listener-1")
    monkeypatch.setattr(broken, "_LATE_SECONDS", _MOMENT)
    broken.apply(name, monkeypatch.setattr)
    SHOWS[name][0](stage)
    assert stage.record().wrong
