"""`transactional` on functions and Celery tasks: signatures, joining, refusals, and what runs after the commit."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError, TransactionTimeoutError
from mongo_celery.locking import after_commit, select_for_update, transactional
from mongo_celery.mongo.transaction import ending
from tests.integration.locking_rig import Notes, as_block_or_function, held, texts


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give a Celery app that runs tasks where they are called, retries included."""
    with Celery("transactions", broker="memory://", set_as_current=False) as made:
        made.conf.update(task_always_eager=True)
        yield made


def writer(notes: Notes) -> Callable[..., Any]:
    """A decorated function that writes a note."""

    @transactional(notes.database.client)
    def write(text: str, times: int = 1, *, session: ClientSession) -> str:
        """Write it."""
        for _ in range(times):
            notes.insert_one({"text": text}, session=session)
        return text.upper()

    return write


def test_a_decorated_function_keeps_its_name_and_shows_no_session(notes: Notes) -> None:
    write = writer(notes)
    assert (write.__name__, write.__doc__) == ("write", "Write it.")
    assert list(inspect.signature(write).parameters) == ["text", "times"]
    assert inspect.getfullargspec(write).kwonlyargs == []
    assert inspect.signature(write).parameters["times"].annotation is int, "text is evaluated: FastAPI cannot do it"

    @transactional(lambda: pytest.fail("no client is needed"))
    async def later(*, session: Any) -> None:
        """Do it."""

    assert (later.__name__, later.__doc__, asyncio.iscoroutinefunction(later)) == ("later", "Do it.", True)
    assert write("a", times=2) == "A"
    assert texts(notes) == ["a", "a"]
    assert transactional(lambda: notes.database.client)(lambda **given: sorted(given))(other=1) == ["other", "session"]


def test_a_session_without_a_transaction_is_used_for_one(notes: Notes) -> None:
    """For causal consistency with what the caller did before."""
    with notes.database.client.start_session() as session:
        assert writer(notes)("a", session=session) == "A"
        assert not session.in_transaction
        assert not session.has_ended


async def _async_generator(*, session: Any) -> AsyncIterator[Any]:
    yield session


def _task(*, session: Any) -> None: ...


REFUSED: list[Any] = [
    *(_async_generator, lambda *, session: (yield session), lambda text: text, lambda session, /: session),
    *(ClientSession, 5),
]


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_run_in_a_transaction_is_refused(function: Any, app: Celery) -> None:
    """P9: when it is decorated. `autoretry_for` of a task inside would take the transient errors first."""
    decorate = transactional(lambda: pytest.fail("no client is needed"))
    with pytest.raises(ConfigurationError):
        decorate(function)
    with pytest.raises(ConfigurationError):
        decorate(app.task(shared=False, autoretry_for=(Exception,))(_task))


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_options_that_cannot_work_are_refused(timeout: Any) -> None:
    """P9: no attempt could begin. `@transactional` without its call is the usual slip for a client."""
    with pytest.raises(ConfigurationError):
        transactional(lambda: pytest.fail("no client is needed"), timeout=timeout)
    with pytest.raises(ConfigurationError):
        transactional("mongodb://localhost")  # type: ignore[arg-type]


def test_a_task_is_called_without_a_session(notes: Notes, app: Celery) -> None:
    """Celery checks a call against the signature; bound tasks get themselves first."""

    @app.task(shared=False)
    @transactional(notes.database.client)
    def plain(text: str, *, session: ClientSession) -> str:
        notes.insert_one({"text": text}, session=session)
        return text

    @app.task(shared=False, bind=True)
    @transactional(notes.database.client)
    def bound(self: Any, text: str, *, session: ClientSession) -> str:
        notes.insert_one({"text": f"{self.name.rpartition('.')[2]} {text}"}, session=session)
        return text

    assert plain.delay("a").get() == "a"
    assert bound.apply_async(args=("b",)).get() == "b"
    assert texts(notes) == ["a", "bound b"]
    with pytest.raises(TypeError):
        plain.delay()


def test_a_callback_is_dropped_when_the_transaction_is_not_committed(notes: Notes) -> None:
    """By an error, by the end of the time, and by a body that ends the transaction itself."""
    called: list[int] = []
    notes.insert_one({"_id": 1, "text": "held"})

    def register(session: ClientSession, then: Callable[[ClientSession], object]) -> None:
        after_commit(lambda: called.append(1), session)
        notes.insert_one({"text": "a"}, session=session)
        then(session)

    client = notes.database.client
    with held(notes, 1), pytest.raises(TransactionTimeoutError):
        transactional(client, timeout=0.1).run(
            lambda session: register(session, lambda _: select_for_update(notes, {"_id": 1}, session=session))
        )
    for as_block in (False, True):
        with pytest.raises(ZeroDivisionError):
            as_block_or_function(client, lambda session: register(session, lambda _: 1 // 0), as_block=as_block)
        as_block_or_function(
            client, lambda session: register(session, lambda _: session.abort_transaction()), as_block=as_block
        )
    assert called == []
    assert texts(notes) == ["held"]


def test_a_callback_that_fails_is_logged_and_stops_nothing(notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    called: list[int] = []

    @transactional(notes.database.client)
    def body(*, session: ClientSession) -> str:
        after_commit(lambda: 1 // 0, session)
        after_commit(lambda: called.append(1), session)
        return "done"

    with caplog.at_level(logging.ERROR, "mongo_celery.locking"):
        assert body() == "done"
    assert called == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_session_that_transactional_does_not_run_takes_no_callback(notes: Notes) -> None:
    """Neither the driver's own transactions, nor a session that `transactional` has finished with."""
    with notes.database.client.start_session() as session:
        with session.start_transaction():
            assert not after_commit(lambda: pytest.fail("never called"), session)
        writer(notes)("a", session=session)
        assert not after_commit(lambda: pytest.fail("never called"), session)


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    """Full jitter; also after so many attempts that the power would be too large for a number."""
    early = [ending._PAUSES.nth(0) for _ in range(50)]
    assert max(early) <= 0.005
    late = [ending._PAUSES.nth(10_000) for _ in range(200)]
    assert 0.25 < max(late) <= 0.5
    assert min(late) < 0.25
    assert len(set(late)) > 100
