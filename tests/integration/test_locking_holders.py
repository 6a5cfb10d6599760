"""Who holds a document: the open transactions that an error names, and the end of those whose client is gone."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.embedded.crew import ChildProcess
from mongo_celery.errors import DocumentLockedError
from mongo_celery.locking import holders, select_for_update, transactional
from mongo_celery.locking.holders import OpenTransaction, end, ended_count, open_transactions
from mongo_celery.locking.prometheus import LockCollector
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import STATE, UrlOf
from tests.integration.locking_rig import Document, held, hold_for_ever

MakeClient = Callable[..., MongoClient[Document]]

SHORT = 0.5
"""Instead of the ten seconds after which a holder counts as dead."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "DEAD_SECONDS", SHORT)
    monkeypatch.setattr(holders, "_LOOK_SECONDS", SHORT)


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    database["things"].insert_one({"_id": 1})
    return database["things"]


def holder_of(processes: Processes, things: Collection[Document], url: str) -> ChildProcess:
    """A process that holds the document; its appName is the database's."""
    name = things.database.name
    program = ("-m", "tests.integration.locking_rig", f"{url}&appName={name}", name, hold_for_ever.__name__, "0")
    child = processes.python("holder", *program)
    wait_for(lambda: things.database["meetings"].find_one({"mark": "held"}), message="a holder")
    return child


def refused(things: Collection[Document]) -> DocumentLockedError:
    """What somebody is told who does not wait."""
    with pytest.raises(DocumentLockedError) as caught:
        transactional(things.database.client)(select_for_update)(things, {"_id": 1}, nowait=True)
    return caught.value


def candidates_of(error: DocumentLockedError) -> tuple[OpenTransaction, ...]:
    found: tuple[OpenTransaction, ...] = error.candidates  # type: ignore[attr-defined]
    return found


def test_the_error_names_who_may_hold_it(things: Collection[Document], make_client: MakeClient) -> None:
    """The client's appName and address, and for how long; it survives pickling, as Celery's pool needs it."""
    other = make_client(appName="box office 7")[things.database.name][things.name]
    with held(other, 1):
        error = refused(things)
    found = next(each for each in candidates_of(error) if each.application == "box office 7")
    assert found.client is not None
    assert f"box office 7 at {found.client}, open for 0 s" in str(error)
    assert (found.connected, found.wrote, found.own, found.is_dead) == (True, True, True, False)
    assert candidates_of(pickle.loads(pickle.dumps(error))) == candidates_of(error)
    assert found.id not in {each.id for each in open_transactions(things.database.client)}, "it has ended since"


def test_a_dead_holder_is_ended_by_who_waits(
    processes: Processes,
    things: Collection[Document],
    mongo_url: str,
    caplog: pytest.LogCaptureFixture,
    soon: None,
) -> None:
    """Not before its connection is gone, long before the server would do it; counted, and logged with its address."""
    del soon
    holder = holder_of(processes, things, mongo_url)
    client, name = things.database.client, things.database.name
    # Other tests may have left dead ones on this server.
    [silent] = [each for each in open_transactions(client) if each.application == name and each.wrote]
    assert silent.connected
    assert not silent.is_dead
    with pytest.raises(DocumentLockedError):
        transactional(client)(select_for_update)(things, {"_id": 1}, wait=4 * SHORT)
    holder.kill()

    def gone() -> bool:
        found = [each for each in candidates_of(refused(things)) if each.application == name]
        return "its connection is gone" in str(found[0]) if found else False

    wait_for(gone, message="a connection that is gone")
    before = ended_count()
    with caplog.at_level(logging.WARNING, "mongo_celery.locking"):
        found = transactional(client)(select_for_update)(things, {"_id": 1}, application="next")
    assert found["_lock"]["application"] == "next"
    assert ended_count() > before
    ended = [each.getMessage() for each in caplog.records if each.__dict__.get("event") == "dead_holder_ended"]
    assert [str(silent.client) in each for each in ended if name in each] == [True]


def test_a_holder_that_lives_and_is_ended_repeats_its_body(things: Collection[Document]) -> None:
    """So ending one is always safe: nothing of the attempt that was ended is kept."""
    attempts: list[int] = []

    @transactional(things.database.client)
    def count(*, session: ClientSession) -> None:
        attempts.append(1)
        select_for_update(things, {"_id": 1}, session=session)
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        if len(attempts) == 1:
            mine = [each for each in open_transactions(things.database.client) if each.wrote]
            end(things.database.client, mine)
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

    count()
    document = things.find_one({"_id": 1})
    assert document is not None
    assert (document["n"], len(attempts)) == (2, 2)


# -- metrics ---------------------------------------------------------------------------------------


def test_open_transactions_are_counted_for_prometheus(things: Collection[Document], make_client: MakeClient) -> None:
    """By state; a cluster that does not answer has no numbers."""
    away: MongoClient[Document] = make_client("mongodb://127.0.0.1:1/")
    registry = CollectorRegistry()
    registry.register(LockCollector({"shop": lambda: things.database.client}))
    with held(things, 1):
        found = registry.get_sample_value("mongo_celery_locks_open", {"cluster": "shop", "state": "silent"})
    assert found is not None
    assert found >= 1
    assert registry.get_sample_value("mongo_celery_locks_ended_total") == ended_count()

    silent = [each for each in LockCollector({"away": away}, answer_seconds=0.2).collect() if each.samples]
    assert [(each.name, each.samples[0].value) for each in silent[:1]] == [("mongo_celery_locks_up", 0)]
    assert [each.name for each in silent[1:]] == ["mongo_celery_locks_ended"]


# -- rights ----------------------------------------------------------------------------------------


@contextmanager
def held_by(guarded_url: UrlOf, user: str, make_client: MakeClient) -> Iterator[Collection[Document]]:
    """A document that a user holds, as that one sees it."""
    held_by_user = make_client(guarded_url(user), appName=f"of {user}")[STATE]["locked"]
    held_by_user.replace_one({"_id": 1}, {}, upsert=True)
    session = held_by_user.database.client.start_session()
    with session:
        session.start_transaction()
        select_for_update(held_by_user, {"_id": 1}, session=session)
        yield held_by_user


def named(client: MongoClient[Document], user: str) -> list[OpenTransaction]:
    return [each for each in open_transactions(client) if each.application == f"of {user}"]


def test_a_user_without_any_right_sees_and_ends_its_own(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """`$currentOp` and `killSessions` ask for no right on what is one's own."""
    waiter = make_client(guarded_url("bridge"))
    with held_by(guarded_url, "bridge", make_client):
        [found] = named(waiter, "bridge")
        assert found.own
        assert found.connected, "one's own connections are seen, too: else every silent holder would count as dead"
        assert end(waiter, [found]) == []
        assert named(waiter, "bridge") == []


def test_the_transactions_of_others_need_rights(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """Who has none does not see them, and cannot end them; who has them does both."""
    waiter, admin = make_client(guarded_url("bridge")), make_client(guarded_url("admin"))
    with held_by(guarded_url, "without_stream", make_client) as locked:
        assert named(waiter, "without_stream") == []
        [found] = named(admin, "without_stream")
        assert not found.own
        assert found.connected
        assert end(waiter, [found]) == [found]
        mine = waiter[STATE]["locked"]
        assert "Open transactions" not in str(refused(mine))
        assert end(admin, [found]) == []
        assert named(admin, "without_stream") == []
        assert transactional(waiter)(select_for_update)(mine, {"_id": 1}, nowait=True)
        assert locked.find_one({"_id": 1}) is not None
