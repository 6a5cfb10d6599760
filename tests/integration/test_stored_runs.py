"""Runs of stored changes in a worker: their bytes are read under its claim; and what is stored before it halts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import bson
import pytest
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Change, Changes
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.errors import RefusedChangeError
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event
from tests.rig.changes import TERM, Document, make_run, token
from tests.rig.worker import APP_NAME, WorkerRig, worker_on

Failpoint = Callable[..., AbstractContextManager[None]]

_KILOBYTE, _MEGABYTE = 1 << 10, 1 << 20
_HASH = 2**64 - 5


@pytest.fixture
def worker(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[WorkerRig]:
    with worker_on(mongo_client, mongo_url, state_database) as made:
        made.patience = 1.0
        yield made


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
