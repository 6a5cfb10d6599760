"""Who holds a document: the open transactions that an error names, and the end of those whose client is gone."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from bson.datetime_ms import DatetimeMS
from prometheus_client import CollectorRegistry
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.cli import locks as commands
from mongo_celery.embedded.processes import ChildProcess
from mongo_celery.errors import DocumentLockedError, TransactionTimeoutError
from mongo_celery.locking import freeing, holders, select_for_update, set_automatic_freeing, transactional
from mongo_celery.locking.freeing import end, ended_count
from mongo_celery.locking.holders import OpenTransaction, open_transactions
from mongo_celery.locking.prometheus import LockCollector
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import STATE, UrlOf
from tests.integration.locking_rig import Document, Sent, Tasks, Threads, held, hold_for_ever

MakeClient = Callable[..., MongoClient[Document]]

SHORT = 0.5
"""Instead of the ten seconds after which a holder counts as dead."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "DEAD_SECONDS", SHORT)
    monkeypatch.setattr(freeing, "_LOOK_SECONDS", SHORT / 2)
    monkeypatch.setattr(freeing, "FIRST_LOOK_SECONDS", 0.0)


@pytest.fixture
def things(database: Database[Document], make_client: MakeClient) -> Collection[Document]:
    """By a client of its own: what another test was told a moment ago is told again."""
    database["things"].insert_one({"_id": 1})
    return make_client()[database.name]["things"]


def holder_of(processes: Processes, things: Collection[Document], url: str) -> ChildProcess:
    """A process that holds the document; its appName is the database's."""
    name = things.database.name
    program = ("-m", "tests.integration.locking_rig", f"{url}&appName={name}", name, hold_for_ever.__name__, "0")
    child = processes.python("holder", *program)
    wait_for(lambda: things.database["meetings"].find_one({"mark": "held"}), message="a holder")
    return child


@pytest.fixture(params=[Threads, Tasks])
def way(request: pytest.FixtureRequest, mongo_url: str) -> Iterator[Threads | Tasks]:
    """How the one locks who is refused; what is shown of threads is true of asyncio."""
    with closing(request.param(mongo_url)) as made:
        yield made


def refused(things: Collection[Document]) -> DocumentLockedError:
    """What somebody is told who does not wait."""
    with pytest.raises(DocumentLockedError) as caught:
        transactional(things.database.client)(select_for_update)(things, {"_id": 1}, nowait=True)
    return caught.value


def candidates_of(error: DocumentLockedError) -> tuple[OpenTransaction, ...]:
    found: tuple[OpenTransaction, ...] = error.candidates  # type: ignore[attr-defined]
    return found


def named(client: MongoClient[Document], application: str) -> list[OpenTransaction]:
    """Those of a client; other tests may have left transactions on this server, dead ones, too."""
    return [each for each in open_transactions(client) if each.application == application]


def test_the_error_names_who_may_hold_it(
    things: Collection[Document], make_client: MakeClient, way: Threads | Tasks
) -> None:
    """The client's appName and address, and for how long; it survives pickling, as Celery's pool needs it."""
    other = make_client(appName="box office 7")[things.database.name][things.name]
    with held(other, 1):
        with pytest.raises(DocumentLockedError) as caught:
            way.lock("select_for_update", things, {"_id": 1}, nowait=True)
        [seen] = named(things.database.client, "box office 7")
    error = caught.value
    found = next(each for each in candidates_of(error) if each.application == "box office 7")
    assert found.client is not None
    assert f"box office 7 at {found.client}, open for 0 s, idle for 0 s of that" in str(error)
    assert (found.running, found.own, found.is_dead, seen.connected) == (False, True, False, True)
    assert candidates_of(pickle.loads(pickle.dumps(error))) == candidates_of(error)
    assert found.id not in {each.id for each in open_transactions(things.database.client)}, "it has ended since"


def test_who_has_only_read_is_named_as_well(things: Collection[Document], make_client: MakeClient) -> None:
    """The server does not tell reading from writing: in a transaction both take the same locks."""
    reader = make_client(appName="reader")
    with reader.start_session() as session, session.start_transaction():
        reader[things.database.name][things.name].find_one({"_id": 1}, session=session)
        [found] = reader.admin.aggregate(
            [{"$currentOp": {"idleSessions": True}}, {"$match": {"appName": "reader", "type": "idleSession"}}]
        )
        assert found["locks"]["Global"] == "w"
        assert len(named(things.database.client, "reader")) == 1


def test_the_end_of_the_time_names_who_may_hold_what_was_waited_for(
    things: Collection[Document], make_client: MakeClient, way: Threads | Tasks
) -> None:
    """Asked when the time is used up, and the transaction aborted; in asyncio, at the conflicts right before."""
    holder = make_client(appName="slow holder")[things.database.name][things.name]
    with held(holder, 1), pytest.raises(TransactionTimeoutError, match=r"may hold it: .*slow holder at ") as caught:
        way.lock("select_for_update", things, {"_id": 1}, timeout=SHORT)
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]


def test_the_error_asks_for_no_connections(things: Collection[Document], make_client: MakeClient) -> None:
    """A busy server has thousands; and what was answered a moment ago is not asked again."""
    sent = Sent()
    spied = make_client(event_listeners=[sent])[things.database.name][things.name]
    with held(things, 1):
        for _ in range(3):
            refused(spied)
    stages = [each["pipeline"][0]["$currentOp"] for each in sent.named("aggregate")]
    assert stages[0] == {"idleSessions": True, "idleConnections": False, "allUsers": True}


def test_an_operation_that_python_cannot_read_is_nobodys_concern(things: Collection[Document]) -> None:
    """It runs beside the holder, and has a date beyond the year 9999, as programs in Java use it for `never`."""
    never = {"$set": {"until": DatetimeMS(10**15)}}
    waits: list[Document] = [
        {"$currentOp": {}},
        {"$match": {"ns": things.full_name, "op": "update", "active": True}},
        {"$project": {"op": 1}},
    ]
    with ThreadPoolExecutor(1) as pool, held(things, 1):
        writing = pool.submit(things.update_one, {"_id": 1}, never)
        wait_for(lambda: list(things.database.client.admin.aggregate(waits)), message="a writer that waits")
        assert candidates_of(refused(things))
    assert writing.result().modified_count == 1


def test_a_holder_that_is_heard_of_is_not_silent(things: Collection[Document]) -> None:
    """However long no operation ran in all: silent is what has not moved between two looks."""
    client = things.database.client
    with client.start_session() as session, session.start_transaction():
        things.update_one({"_id": 1}, {"$set": {"n": 1}}, session=session)
        own = session.session_id["id"].as_uuid()

        def look() -> OpenTransaction:
            return next(each for each in open_transactions(client) if each.id == own)

        assert look().silent_seconds == 0, "nobody has looked before"
        wait_for(lambda: look().silent_seconds >= SHORT, message="silence")
        things.update_one({"_id": 1}, {"$set": {"n": 2}}, session=session)
        found = look()
        assert found.silent_seconds == 0
        assert found.idle_seconds >= SHORT


def test_a_dead_holder_is_ended_by_who_waits(
    processes: Processes,
    things: Collection[Document],
    mongo_url: str,
    caplog: pytest.LogCaptureFixture,
    soon: None,
    way: Threads | Tasks,
) -> None:
    """Not before its connections are gone, long before the server would do it; counted, and logged with its address."""
    del soon
    holder = holder_of(processes, things, mongo_url)
    client, name = things.database.client, things.database.name
    wait = {"wait": 2 * SHORT}
    with pytest.raises(DocumentLockedError):
        way.lock("select_for_update", things, {"_id": 1}, **wait)
    wait_for(lambda: named(client, name)[0].silent_seconds >= SHORT, message="silence")
    [idle] = named(client, name)
    assert (idle.state, idle.connected) == ("idle", True)
    holder.kill()
    wait_for(lambda: named(client, name)[0].state == "dead", message="a connection that is gone")
    assert "no connection of its client is left" in str(named(client, name)[0])

    set_automatic_freeing(False)
    try:
        with pytest.raises(DocumentLockedError):
            way.lock("select_for_update", things, {"_id": 1}, **wait)
    finally:
        set_automatic_freeing(True)
    before = ended_count()
    with caplog.at_level(logging.WARNING, "mongo_celery.locking"):
        found = way.lock("select_for_update", things, {"_id": 1}, application="next")
    assert found["_lock"]["application"] == "next"
    assert ended_count() > before
    ended = [each.getMessage() for each in caplog.records if each.__dict__.get("event") == "dead_holder_ended"]
    assert [str(idle.client) in each for each in ended if name in each] == [True]


def test_a_holder_is_not_lost_while_its_client_may_have_another_connection(
    processes: Processes, things: Collection[Document], mongo_url: str, make_client: MakeClient
) -> None:
    """One from the same address with the same appName: a pool that has closed its idle ones, or another process."""
    client, name = things.database.client, things.database.name
    beside_it = make_client(appName=name)
    beside_it.admin.command("ping")
    holder = holder_of(processes, things, mongo_url)
    [found] = named(client, name)
    holder.kill()

    def connections() -> list[Document]:
        everything: list[Document] = [
            {"$currentOp": {"idleConnections": True}},
            {"$match": {"client": found.client, "type": "op"}},
            {"$project": {"client": 1}},
        ]
        return list(client.admin.aggregate(everything))

    wait_for(lambda: not connections(), message="a connection that is gone")
    assert named(client, name)[0].connected is True
    beside_it.close()
    wait_for(lambda: named(client, name)[0].connected is False, message="a client that is gone")
    assert end(client, named(client, name)) == []


def test_a_holder_that_lives_and_is_ended_repeats_its_body(things: Collection[Document]) -> None:
    """As a function of `transactional`: nothing of the attempt that was ended is kept."""
    attempts: list[int] = []

    @transactional(things.database.client)
    def count(*, session: ClientSession) -> None:
        attempts.append(1)
        select_for_update(things, {"_id": 1}, session=session)
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)
        if len(attempts) == 1:
            own = session.session_id["id"].as_uuid()
            mine = [each for each in open_transactions(things.database.client) if each.id == own]
            end(things.database.client, mine)
        things.update_one({"_id": 1}, {"$inc": {"n": 1}}, session=session)

    count()
    document = things.find_one({"_id": 1})
    assert document is not None
    assert (document["n"], len(attempts)) == (2, 2)


def test_who_was_to_be_ended_as_dead_and_is_heard_of_again_is_left_alone(
    things: Collection[Document], make_client: MakeClient
) -> None:
    """A person may take minutes to answer; by its id it is ended all the same."""
    client, name = things.database.client, things.database.name
    other = make_client(appName=name)
    with other.start_session() as session:
        session.start_transaction()
        select_for_update(other[name]["things"], {"_id": 1}, session=session)
        chosen = [(client, each) for each in named(client, name)]

        def ended(*, dead: bool) -> str:
            return str(commands._end([client], chosen, dead=dead).fields["transactions"][0]["result"])

        assert ended(dead=True) == "alive"
        assert ended(dead=False) == "freed"
        assert ended(dead=False) == "gone"


# -- metrics ---------------------------------------------------------------------------------------


def test_open_transactions_are_counted_for_prometheus(things: Collection[Document], make_client: MakeClient) -> None:
    """By state; a cluster that does not answer has no numbers."""
    away: MongoClient[Document] = make_client("mongodb://127.0.0.1:1/")
    registry = CollectorRegistry()
    registry.register(LockCollector({"shop": lambda: things.database.client}))
    with held(things, 1):
        found = registry.get_sample_value("mongo_celery_locks_open", {"cluster": "shop", "state": "idle"})
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


def test_a_user_without_any_right_sees_and_ends_its_own(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """`$currentOp` and `killSessions` ask for no right on what is one's own."""
    waiter = make_client(guarded_url("bridge"))
    with held_by(guarded_url, "bridge", make_client):
        [found] = named(waiter, "of bridge")
        assert found.own
        assert found.connected, "one's own connections are seen, too: else every silent holder would count as dead"
        assert end(waiter, [found]) == []
        assert named(waiter, "of bridge") == []


def test_the_transactions_of_others_need_rights(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """Who has none does not see them, and cannot end them; who has them does both."""
    waiter, admin = make_client(guarded_url("bridge")), make_client(guarded_url("admin"))
    with held_by(guarded_url, "without_stream", make_client) as locked:
        assert named(waiter, "of without_stream") == []
        [found] = named(admin, "of without_stream")
        assert not found.own
        assert found.connected
        assert end(waiter, [found]) == [found]
        mine = waiter[STATE]["locked"]
        assert "Open transactions" not in str(refused(mine))
        assert end(admin, [found]) == []
        assert named(admin, "of without_stream") == []
        assert transactional(waiter)(select_for_update)(mine, {"_id": 1}, nowait=True)
        assert locked.find_one({"_id": 1}) is not None
