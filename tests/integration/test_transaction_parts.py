"""
`transactional` inside `transactional`, in threads, and left elsewhere: whose transaction it is, and what becomes of it.

Twins for asyncio are in `test_transaction_tasks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.errors import (
    ConfigurationError,
    DocumentLockedError,
    TopologyError,
    TransactionError,
)
from mongo_celery.locking import after_commit, current, select_for_update, transactional
from tests.integration.locking_rig import Document, held
from tests.rig.commands import CommandRecorder

Client = MongoClient[Document]
MakeClient = Callable[..., Client]
Failpoint = Callable[..., AbstractContextManager[None]]
Write = Callable[..., None]

APP = "transaction-parts"
CONFLICT = {
    "failCommands": ["insert"],
    "appName": APP,
    "errorCode": 112,
    "errorLabels": ["TransientTransactionError"],
}
SHORT = 1.5
GENEROUS = 30.0


@pytest.fixture
def sent() -> CommandRecorder:
    """Give what the client of `notes` has sent."""
    return CommandRecorder()


@pytest.fixture
def notes(database: Database[Document], make_client: MakeClient, sent: CommandRecorder) -> Collection[Document]:
    """Give an empty collection."""
    database.create_collection("notes")
    return make_client(appName=APP, event_listeners=[sent])[database.name]["notes"]


@pytest.fixture
def client(notes: Collection[Document]) -> Client:
    """Give its client."""
    return notes.database.client


@pytest.fixture
def write(notes: Collection[Document], client: Client) -> Write:
    """Give a decorated function that writes a note, and then raises what it is told to."""

    @transactional(client)
    def write(text: str, error: BaseException | None = None, *, session: ClientSession) -> None:
        notes.insert_one({"text": text}, session=session)
        if error is not None:
            raise error

    return write


def texts(notes: Collection[Document]) -> list[Any]:
    """What is committed."""
    return [note["text"] for note in notes.find().sort("_id", 1)]


def as_block_or_function(client: Client, body: Callable[[ClientSession], Any], *, as_block: bool) -> None:
    if not as_block:
        transactional(client).run(body)
        return
    with transactional(client) as session:
        body(session)


# -- joining ---------------------------------------------------------------------------------------


def test_a_conflict_in_a_part_repeats_the_whole(
    notes: Collection[Document], client: Client, write: Write, failpoint: Failpoint
) -> None:
    """Also where the body catches it: the server has aborted the transaction by then."""
    runs: list[int] = []

    def body(_: ClientSession, catch: type[Exception]) -> None:
        runs.append(1)
        with suppress(catch):
            write("inner")

    for catch in (KeyError, OperationFailure):
        runs.clear()
        with failpoint(mode={"times": 1}, **CONFLICT):
            transactional(client).run(lambda session, catch=catch: body(session, catch))  # type: ignore[misc]
        assert len(runs) == 2
    assert texts(notes) == ["inner", "inner"]


def test_another_client_of_the_cluster_joins_nothing(
    notes: Collection[Document], client: Client, make_client: MakeClient
) -> None:
    """It is refused, however its address is written, unless it asks for a transaction of its own."""
    client.admin.command("ping")
    member = f"localhost:{client.address[1] if client.address else 0}"
    for other in (make_client(), make_client(f"mongodb://{member}"), make_client(member, directConnection=True)):
        with transactional(client) as outer, suppress(ZeroDivisionError):
            with pytest.raises(ConfigurationError, match=r"session\.client"), transactional(other):
                raise AssertionError
            with pytest.raises(ConfigurationError, match=r"session\.client"):
                transactional(other, durable=True).run(print)
            with transactional(other, independent=True) as inner:
                assert (current(client), current(other)) == (outer, inner)
                notes.insert_one({"text": "outer"}, session=outer)
                other[notes.database.name]["notes"].insert_one({"text": "inner"}, session=inner)
                raise ZeroDivisionError
    assert texts(notes) == ["outer"] * 3


def test_a_client_of_another_cluster_is_in_no_transaction(
    client: Client, standalone_url: str, make_client: MakeClient
) -> None:
    """Its transactions are its own, both ways."""
    elsewhere = make_client(standalone_url)
    with transactional(client):
        assert current(elsewhere) is None
        with pytest.raises(TopologyError):
            transactional(elsewhere, durable=True).run(lambda session: elsewhere.x.x.find_one({}, session=session))
    with transactional(elsewhere):
        assert current(client) is None


def test_the_current_session_is_known_inside_only(client: Client) -> None:
    """For code that is handed none."""
    assert current(client) is None
    with transactional(client) as session:
        assert current(client) is session
        session.abort_transaction()
        assert current(client) is None
    assert current(client) is None


# -- parts that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("as_block", [False, True])
def test_a_part_that_fails_makes_the_whole_rollback_only_though_its_error_is_caught(
    notes: Collection[Document], client: Client, write: Write, sent: CommandRecorder, as_block: bool
) -> None:
    """Its partial writes would be committed; what is written after it goes to nowhere either."""

    def body(session: ClientSession) -> str:
        with suppress(ZeroDivisionError):
            write("partial", ZeroDivisionError("by nought"))
        notes.insert_one({"text": "after"}, session=session)
        after_commit(lambda: pytest.fail("it is not committed"))
        return "done"

    with pytest.raises(TransactionError, match=r"independent=True.*ZeroDivisionError: by nought") as caught:
        as_block_or_function(client, body, as_block=as_block)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert texts(notes) == []
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)


def test_a_lock_that_a_part_gave_up_ends_the_whole_with_its_own_error(
    notes: Collection[Document], client: Client, write: Write
) -> None:
    """Whatever the part has made of it."""
    notes.insert_one({"_id": 1, "text": "held"})

    @transactional(client)
    def lock(*, session: ClientSession) -> None:
        try:
            select_for_update(notes, {"_id": 1}, session=session, nowait=True)
        except DocumentLockedError:
            raise LookupError("busy") from None

    def body(_: ClientSession) -> None:
        with suppress(LookupError):
            lock()

    with held(notes, 1), pytest.raises(DocumentLockedError):
        transactional(client, timeout=GENEROUS).run(body)
    write("afterwards")
    assert texts(notes) == ["held", "afterwards"]


def test_a_part_that_ends_the_transaction_is_told_so(notes: Collection[Document], client: Client) -> None:
    """After an abort PyMongo would send what follows outside of any transaction, to stay for ever."""

    @transactional(client)
    def give_up(*, session: ClientSession) -> None:
        session.abort_transaction()

    def body(session: ClientSession) -> None:
        notes.insert_one({"text": "before"}, session=session)
        give_up()
        notes.insert_one({"text": "after"}, session=session)

    with pytest.raises(TransactionError, match=r"independent=True"):
        transactional(client).run(body)
    assert texts(notes) == []


def test_the_next_attempt_is_not_rollback_only(
    notes: Collection[Document], client: Client, write: Write, failpoint: Failpoint
) -> None:
    """What a part of it failed with belongs to the attempt."""
    runs: list[int] = []

    def body(session: ClientSession) -> None:
        runs.append(1)
        if len(runs) == 1:
            with suppress(ZeroDivisionError):
                write("partial", ZeroDivisionError())
            with failpoint(mode={"times": 1}, **CONFLICT):
                notes.insert_one({"text": "refused"}, session=session)
        write("second")

    transactional(client).run(body)
    assert (len(runs), texts(notes)) == (2, ["second"])


# -- own and durable -------------------------------------------------------------------------------


def test_one_of_its_own_is_committed_for_itself(
    notes: Collection[Document], client: Client, sent: CommandRecorder
) -> None:
    """Its failure leaves the outer one alone; its success stays, whatever becomes of the outer one."""
    own = transactional(client, independent=True)
    noted: list[str] = []

    def note(text: str, *, error: Exception | None = None, session: ClientSession) -> None:
        notes.insert_one({"text": text}, session=session)
        after_commit(lambda: noted.append(text))
        if error is not None:
            raise error

    def body(session: ClientSession) -> None:
        with suppress(ZeroDivisionError):
            own(note)("refused", error=ZeroDivisionError())
        own(note)("kept")
        own(note)("kept, too", session=session)
        with own as inner:
            assert inner is not session
            assert current(client) is inner
            transactional(client)(note)("joined with it")
        assert current(client) is session
        notes.insert_one({"text": "outer"}, session=session)
        assert noted == ["kept", "kept, too", "joined with it"]
        raise LookupError

    with pytest.raises(LookupError):
        transactional(client).run(body)
    assert texts(notes) == ["kept", "kept, too", "joined with it"]
    assert len(sent.named("commitTransaction")) == 3


def test_a_durable_one_refuses_to_join(notes: Collection[Document], client: Client, write: Write) -> None:
    """As Django's: what it has written is committed when it returns."""
    durable = transactional(client, durable=True)
    durable.run(lambda session: write("outermost", session=session))
    with transactional(client) as session:
        with pytest.raises(ConfigurationError, match=r"durable=True"):
            durable.run(lambda _: pytest.fail("not run"))
        with pytest.raises(ConfigurationError, match=r"durable=True"):
            durable.run(lambda _: pytest.fail("not run"), session=session)
        with pytest.raises(ConfigurationError, match=r"durable=True"), durable:
            pytest.fail("not run")
        write("committed")
    with client.start_session() as foreign, foreign.start_transaction(), pytest.raises(ConfigurationError):
        durable.run(lambda _: pytest.fail("not run"), session=foreign)
    assert texts(notes) == ["outermost", "committed"]


def test_own_and_durable_exclude_each_other(client: Client) -> None:
    """One may stand inside, the other must not."""
    with pytest.raises(ConfigurationError, match="exclude each other"):
        transactional(client, independent=True, durable=True)


# -- callbacks -------------------------------------------------------------------------------------


def test_a_callback_without_a_session_waits_for_the_transaction_around(
    notes: Collection[Document], client: Client, write: Write
) -> None:
    """Of the part it is the whole's; outside of any there is nothing to wait for."""
    seen: list[Any] = []

    @transactional(client)
    def outer(*, fail: bool, session: ClientSession) -> None:
        transactional(client).run(lambda _: after_commit(lambda: seen.append(texts(notes))))
        write("a", session=session)
        if fail:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outer(fail=True)
    outer(fail=False)
    assert seen == [["a"]]
    assert after_commit(lambda: seen.append("at once"))
    assert seen == [["a"], "at once"]


def test_a_coroutine_function_is_no_callback_where_nobody_awaits(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be thrown away; also where only its result says what it is."""

    async def callback() -> None: ...

    with transactional(client), pytest.raises(ConfigurationError, match="coroutine"):
        after_commit(callback)
    with pytest.raises(ConfigurationError, match="coroutine"):
        after_commit(lambda: [callback()][0])
    with transactional(client):
        after_commit(lambda: [callback()][0])
    assert "has returned a coroutine" in caplog.text


def test_a_soft_time_limit_in_a_callback_passes_when_all_have_run(notes: Collection[Document], write: Write) -> None:
    """The task is to end by it; it is committed."""
    called: list[str] = []

    def stop() -> None:
        raise SoftTimeLimitExceeded

    def body(session: ClientSession) -> None:
        write("a", session=session)
        after_commit(stop)
        after_commit(lambda: called.append("the other"))

    with pytest.raises(SoftTimeLimitExceeded):
        transactional(notes.database.client).run(body)
    assert (texts(notes), called) == (["a"], ["the other"])


def test_a_body_that_returns_a_coroutine_is_refused(notes: Collection[Document], client: Client) -> None:
    """It would run after the commit, and outside of the transaction."""

    async def coroutine(session: ClientSession) -> None:
        notes.insert_one({"text": "outside"}, session=session)

    body: Callable[[ClientSession], Any] = coroutine

    with pytest.raises(ConfigurationError, match="coroutine"):
        transactional(client).run(body)
    with pytest.raises(ConfigurationError, match="coroutine"):
        transactional(client).run(lambda _: transactional(client).run(body))
    assert texts(notes) == []


# -- threads ---------------------------------------------------------------------------------------


def test_a_block_may_be_left_by_another_thread(notes: Collection[Document], client: Client, write: Write) -> None:
    """As frameworks run the halves of a dependency; whoever is handed its session joins it, in whatever thread."""

    @contextmanager
    def dependency() -> Iterator[ClientSession]:
        with transactional(client) as session:
            yield session

    for error in (None, ZeroDivisionError()):
        with ThreadPoolExecutor(1) as entering, ThreadPoolExecutor(1) as using, ThreadPoolExecutor(1) as leaving:
            block = dependency()
            session = entering.submit(block.__enter__).result(GENEROUS)
            using.submit(write, f"before {error!r}", session=session).result(GENEROUS)
            left = leaving.submit(block.__exit__, type(error) if error else None, error, None)
            assert not left.result(GENEROUS)  # nothing is swallowed
            entering.submit(write, f"alone {error!r}").result(GENEROUS)  # joins nothing, and has no limit left over
    expected = ["before None", "alone None", "alone ZeroDivisionError()"]
    assert texts(notes) == expected


def test_an_object_serves_one_block_at_a_time(notes: Collection[Document], client: Client, write: Write) -> None:
    """Inside, in other threads and after a failure to begin; functions that it decorates are not concerned."""
    shared = transactional(client, durable=True)
    with transactional(client), pytest.raises(ConfigurationError, match="durable"), shared:
        pytest.fail("not run")
    with shared as session:
        notes.insert_one({"text": "first"}, session=session)
        with pytest.raises(ConfigurationError, match=r"with transactional\(client\)"), shared:
            pytest.fail("not run")
        with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigurationError, match=r"with transactional\(client\)"):
            pool.submit(shared.__enter__).result(GENEROUS)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(shared.run, lambda session: write("function", session=session)).result(GENEROUS)
    with suppress(ZeroDivisionError), shared:
        raise ZeroDivisionError
    with shared:
        write("last")
    assert texts(notes) == ["first", "function", "last"]


def test_a_generator_that_is_thrown_away_aborts(notes: Collection[Document], client: Client) -> None:
    """Python closes it, and the block with it."""

    def work() -> Iterator[None]:
        with transactional(client) as session:
            notes.insert_one({"text": "left"}, session=session)
            yield

    generator = work()
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert texts(notes) == []
    assert current(client) is None
