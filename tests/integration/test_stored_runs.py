"""Runs of stored changes in a worker: their bytes are read under its claim; and what is stored before it halts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

import bson
import pytest
from celery import Celery
from celery.exceptions import Ignore
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery import Bridge, Change
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.window import Refusal
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.bridge.worker.execution import Execution
from mongo_celery.errors import RefusedChangeError
from tests.fixtures.process import wait_for
from tests.fixtures.samples import event
from tests.integration.partition_rig import BRIDGE, SUBSCRIPTION, VERSION, Document, Rig, rig_of, token

Failpoint = Callable[..., AbstractContextManager[None]]

_KILOBYTE, _MEGABYTE = 1 << 10, 1 << 20
_HASH = 2**64 - 5
_APPNAME = "stored_runs"


@dataclass(frozen=True, slots=True)
class Bench:
    """A bridge with one partition, and a worker."""

    rig: Rig
    bridge: Bridge

    @property
    def documents(self) -> Collection[Document]:
        """The stored changes as they are stored."""
        return self.rig.documents.database["backlog"]

    def store(self, *changes: bytes, first: int = 1) -> Run:
        """Store changes, as the listener does; the run that names them."""
        data = [token(first + place)["_data"] for place in range(len(changes))]
        stored = [StoredChange(each, raw, _HASH) for each, raw in zip(data, changes, strict=True)]
        self.rig.store.backlog.insert(self.rig.where, stored, VERSION)
        return run_of(first, len(changes), stored=tuple(data))

    def run(self, run: Run, handle: Callable[[Change], object] = bool) -> list[Change]:
        """Let a worker run a run; the changes that the handler got."""
        got: list[Change] = []

        def call(change: Change, _retries: int) -> None:
            got.append(change)
            handle(change)

        (handler,) = self.bridge.wiring.handlers
        Execution(self.bridge.wiring, handler, run, patience=1).execute(call)
        return got

    def rest(self) -> Document | None:
        """The partition, once nobody has claimed it."""
        state = self.rig.document
        return state if state["claim"] is None else None

    def due_now(self) -> None:
        """Let what is parked be due."""
        self.rig.spoil(**{"retry.notBefore": None})


@pytest.fixture
def bench(mongo_client: MongoClient[Document], mongo_url: str, state_database: str) -> Iterator[Bench]:
    """Give a partition with nothing done, and a worker whose handler may skip nothing."""
    rig = rig_of(mongo_client, state_database)
    url = f"{mongo_url}{'&' if '?' in mongo_url else '?'}appName={_APPNAME}"
    bridge = Bridge(Celery(broker="memory://"), url, name=BRIDGE, database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders", name=SUBSCRIPTION)
    def record(_change: Change) -> None:
        """Is not called."""

    with closing(bridge.client):
        yield Bench(rig, bridge)


def made(number: int = 1, size: int = 200 * _KILOBYTE) -> bytes:
    """A change of so many bytes, which can hardly be compressed."""
    return bson.encode(event(_id=token(number), fullDocument={"_id": 1, "bytes": os.urandom(size)}))


def run_of(first: int, count: int, *changes: bytes, **fields: Any) -> Run:
    """A run of so many changes."""
    return Run(BRIDGE, SUBSCRIPTION, 0, 0, VERSION, first, first + count - 1, changes, hash=_HASH, **fields)


def _fail(_change: Change) -> None:
    raise ValueError("no")


def _never(change: Change) -> None:
    pytest.fail(f"the handler was called with {change}")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, by name."""
    return [getattr(record, "event", "") for record in caplog.records]


# -- reading -----------------------------------------------------------------------------------------


def test_a_worker_reads_what_its_message_names(bench: Bench) -> None:
    """P13: byte for byte, and the position is that of the last change."""
    changes = [made(1, 15 * _MEGABYTE), made(2)]
    got = bench.run(bench.store(*changes))
    assert [bson.encode(each.raw) for each in got] == changes
    handled = bench.rig.document["handled"]
    assert (handled["last"], handled["resumeToken"]) == (2, token(2))
    done = token(2)["_data"]
    assert sum(bench.rig.store.backlog.remove(bench.rig.where, done, done, VERSION)) > 0
    assert bench.documents.count_documents({}) == 0, "what is committed takes all of it away"


def test_a_change_that_fits_into_no_document_halts_its_partition_as_every_refused_one(bench: Bench) -> None:
    """P9: its handler does not get less than was asked for, and its error names it."""
    with pytest.raises(RefusedChangeError):
        bench.run(bench.store(made(1, 17 * _MEGABYTE)), _never)
    state = bench.rig.document
    assert (state["state"], state["halted"]["resumeToken"]["_data"]) == ("halted", token(1)["_data"])
    assert "shop.orders insert 1" in state["retry"]["error"]


def test_a_change_whose_bytes_are_missing_waits_uncounted(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """P12, P14: somebody has removed them; it waits longer each time, and is handled once they are back."""
    run = bench.store(made())
    saved = list(bench.documents.find())
    bench.documents.delete_many({})
    for attempt in range(2):
        with pytest.raises(Ignore):
            bench.run(run, _never)
        state = bench.rig.document
        assert (state["claim"], state["handled"], state["state"]) == (None, None, "flowing")
        retry = state["retry"]
        assert (retry["count"], retry["crashes"], retry["waiting"]["count"]) == (0, 0, attempt + 1)
        assert "missing" in retry["waiting"]["cause"]
        assert retry["notBefore"] is not None, "no hot loop"
        bench.due_now()
    assert events(caplog).count("stored_change_missing") == 2
    bench.documents.insert_many(saved)
    assert len(bench.run(run)) == 1


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
    "empty": _setter(raw=b""),
    "no token": _setter(raw=bson.encode({"operationType": "insert"})),
    "of another change": _setter(raw=_ANOTHER),
    "of another change, which was refused": _setter(
        raw=_ANOTHER, refusal={"reason": "no", "halts": True, "lasts": False}, refused=True
    ),
    "the token too": _setter(raw=_ANOTHER, token=token(7)),
    "a text": _setter(raw="text"),
    "a number": _setter(raw=2**40),
}


@pytest.mark.parametrize("spoil", _SPOILT.values(), ids=_SPOILT)
def test_a_change_whose_bytes_are_damaged_halts_its_partition_and_no_change_before_it(
    bench: Bench, spoil: Callable[[Collection[Document], Document], None]
) -> None:
    """P12: no handler gets a short event, whatever the policy; and it halts as the first of a run of its own."""
    changes = [made(1, _KILOBYTE), made(2, _KILOBYTE), made(3, _KILOBYTE)]
    run = bench.store(*changes)
    spoil(bench.documents, {"_id": f"{bench.rig.where}/{token(2)['_data']}"})
    assert [bson.encode(each.raw) for each in bench.run(run)] == changes[:1]
    handled = bench.rig.document["handled"]
    assert (handled["last"], handled["resumeToken"]) == (1, token(1))
    assert bench.rig.store.claims.commit(bench.rig.where, 1)
    with pytest.raises(RefusedChangeError):
        bench.run(run_of(2, 2, stored=run.stored[1:]), _never)
    state = bench.rig.document
    assert (state["state"], state["halted"]["resumeToken"]["_data"]) == ("halted", token(2)["_data"])
    assert (state["retry"]["crashes"], state["retry"]["error"] != "") == (0, True)


def test_a_change_waits_uncounted_while_its_bytes_cannot_be_read(bench: Bench, failpoint: Failpoint) -> None:
    """P14: MongoDB was away between the claim and the reading; the policy of the handler has no part in it."""
    run = bench.store(made())
    away = {"failCommands": ["find"], "namespace": bench.documents.full_name, "closeConnection": True}
    with failpoint(appName=_APPNAME, **away), pytest.raises(Ignore):
        bench.run(run, _never)
    state = wait_for(bench.rest)
    assert (state["state"], state["retry"]["count"], state["retry"]["crashes"]) == ("flowing", 0, 0)
    assert state["retry"]["waiting"]["count"] == 1
    assert "missing" not in state["retry"]["waiting"]["cause"]
    bench.due_now()
    assert len(bench.run(run)) == 1


def test_what_a_later_term_has_stored_is_not_renewed_by_an_older_one(bench: Bench) -> None:
    """P6: a listener that wakes up late changes nothing that its successor refers to."""
    backlog, where = bench.rig.store.backlog, bench.rig.where
    refused = StoredChange(token(1)["_data"], made(), _HASH, Refusal.because("no"), token(1))
    backlog.insert(where, [refused], VERSION + 1)
    with pytest.raises(OperationFailure):
        backlog.insert(where, [StoredChange(refused.data, made(), _HASH)], VERSION)
    assert backlog.fetch(where, [refused.data])[refused.data].raw == refused.raw


# -- what halts --------------------------------------------------------------------------------------


def test_a_change_that_halts_is_stored_before(bench: Bench) -> None:
    """P13: a command has its bytes whatever becomes of the oplog; unmarked, so that nothing else changes."""
    raw = made(size=_KILOBYTE)
    with pytest.raises(ValueError, match="no"):
        bench.run(run_of(1, 1, raw), _fail)
    state = bench.rig.document
    assert (state["state"], state["spilled"]) == ("halted", None)
    data = state["halted"]["resumeToken"]["_data"]
    stored = bench.rig.store.backlog.fetch(bench.rig.where, [data])[data]
    assert (stored.raw, stored.hash, stored.refusal, stored.token) == (raw, _HASH, None, None)
    (document,) = bench.documents.find()
    assert document["term"] == VERSION


def test_an_undeliverable_change_is_not_stored_again_when_it_halts(bench: Bench) -> None:
    """P13: the listener has stored it before it sent it, and says more of its reason."""
    refusal = Refusal.because("unreadable", halts=True)
    with pytest.raises(RefusedChangeError):
        bench.run(run_of(1, 1, b"\xff" * 9, refusal=refusal, token=token(1)), _never)
    assert (bench.rig.document["state"], bench.documents.count_documents({})) == ("halted", 0)


def test_what_is_stored_is_not_stored_again_when_it_halts(bench: Bench, failpoint: Failpoint) -> None:
    """It was there a moment ago."""
    run = bench.store(made())
    with failpoint(failCommands=["insert"], appName=_APPNAME, errorCode=13), pytest.raises(ValueError, match="no"):
        bench.run(run, _fail)
    assert bench.rig.document["state"] == "halted"
    assert bench.documents.count_documents({}) == 1


@pytest.mark.parametrize("trouble", [{"errorCode": 13}, {"closeConnection": True}], ids=["refused", "unanswered"])
def test_a_change_halts_all_the_same_where_it_cannot_be_stored(
    bench: Bench, failpoint: Failpoint, caplog: pytest.LogCaptureFixture, trouble: Document
) -> None:
    """P12: the halt is what must not be lost; the log says that the bytes are not there."""
    with failpoint(failCommands=["insert"], appName=_APPNAME, **trouble), pytest.raises(ValueError, match="no"):
        bench.run(run_of(1, 1, made(size=_KILOBYTE)), _fail)
    assert bench.rig.document["state"] == "halted"
    assert bench.documents.count_documents({}) == 0
    assert "halted_change_not_stored" in events(caplog)
