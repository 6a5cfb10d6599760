"""What a body sends is taken for its box: by all of Celery's ways, and by none that must go out at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery._state import _task_stack  # type: ignore[attr-defined]
from celery.canvas import Signature

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox.capture import capture_sends, install
from mongo_celery.outbox.collection import TransactionBuffer


def _add(a: int, b: int) -> int:
    return a + b


def _total(values: list[int]) -> int:
    return sum(values)


class Taken:
    """Keeps what is taken."""

    gives_results = True

    def __init__(self) -> None:
        self.signatures: list[Signature] = []

    def take(self, signature: Signature) -> None:
        self.signatures.append(signature)

    @property
    def names(self) -> list[str | None]:
        return [signature.task for signature in self.signatures]


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose broker is in memory."""
    made = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.task(name="add", shared=False)(_add)
    made.task(name="total", shared=False, expires=60, serializer="pickle")(_total)
    made.finalize()
    install(made)
    install(made)
    sent(made)
    yield made
    made.close()


def sent(app: Celery) -> list[Any]:
    """Take the arguments of what was published."""
    found = []
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        while len(queue):
            found.append(queue.get_nowait().payload[0])
    return found


def test_a_taker_that_is_left_in_another_context_takes_no_more(app: Celery) -> None:
    """Its own context cannot be reached from there; what is around it there takes again."""
    outer, inner = Taken(), Taken()
    block, add = capture_sends(app, inner), app.tasks["add"]
    with capture_sends(app, outer):
        block.__enter__()
        add.delay(1, 2)
        copy_context().run(block.__exit__, None, None, None)
        add.delay(3, 4)
    add.delay(5, 6)
    assert ([each.args for each in inner.signatures], [each.args for each in outer.signatures]) == ([(1, 2)], [(3, 4)])
    assert sent(app) == [[5, 6]]


def test_all_ways_to_send_are_taken_with_their_ids_and_options(app: Celery) -> None:
    """Tasks, signatures, names, chains and groups; the broker is not asked, which nobody listens at."""
    app.conf.update(broker_url="redis://127.0.0.1:9/0")
    add, taken = app.tasks["add"], Taken()
    with capture_sends(app, taken):
        one = add.delay(1, 2)
        slowly: Any = {"countdown": 60, "queue": "slow", "headers": {"x": "y"}, "expires": None}
        two = add.apply_async((3, 4), **slowly)
        three = app.send_task("elsewhere.ship", args=[5], kwargs={"fast": True}, task_id="given")
        add.s(1, 1).set(priority=3).apply_async()
        chain(add.s(1, 2), add.s(3)).delay()
        group(add.s(0, each) for each in range(2)).delay()
        total = app.tasks["total"].delay([1])

    assert taken.names == ["add", "add", "elsewhere.ship", "add", "add", "add", "add", "total"]
    first, second, third, fourth, fifth, *_, last = taken.signatures
    assert (first.args, first.id) == ((1, 2), one.id)
    assert (second.id, second.options["countdown"], second.options["queue"]) == (two.id, 60, "slow")
    assert second.options["headers"] == {"x": "y"}
    assert not {"options", "self", "producer", "task_type"} & set(second.options)
    assert "expires" in second.options
    assert (third.id, three.id, third.args, third.kwargs) == ("given", "given", (5,), {"fast": True})
    assert fourth.options["priority"] == 3
    assert [step["task"] for step in fifth.options["chain"]] == ["add"]
    assert (last.id, last.options["expires"], last.options["serializer"]) == (total.id, 60, "pickle")
    assert len({signature.id for signature in taken.signatures}) == 8


def test_a_block_ends_and_blocks_are_nested(app: Celery) -> None:
    outer, inner = Taken(), Taken()
    add = app.tasks["add"]
    with capture_sends(app, outer):
        with capture_sends(app, inner):
            add.delay(1, 1)
        with capture_sends(app, None):
            add.delay(2, 2)
        add.delay(3, 3)
    add.delay(4, 4)

    assert sent(app) == [[2, 2], [4, 4]]
    assert [signature.args for signature in inner.signatures] == [(1, 1)]
    assert [signature.args for signature in outer.signatures] == [(3, 3)]


def test_another_apps_tasks_are_not_taken(app: Celery) -> None:
    taken = Taken()
    with capture_sends(Celery("other", set_as_current=False), taken):
        app.tasks["add"].delay(1, 1)
    assert (sent(app), taken.signatures) == ([[1, 1]], [])


def test_a_thread_publishes_at_once_and_asyncio_does_not(app: Celery) -> None:
    """A thread has a context of its own; a task of asyncio, and a thread that copies the context, have the body's."""
    add, taken = app.tasks["add"], Taken()

    async def body() -> None:
        await asyncio.gather(asyncio.create_task(asyncio.to_thread(add.delay, 1, 1)))
        await asyncio.create_task(asyncio.sleep(0))

    with capture_sends(app, taken):
        thread = threading.Thread(target=contextvars.Context().run, args=(add.delay, 2, 2))
        thread.start()
        thread.join()
        asyncio.run(body())

    assert sent(app) == [[2, 2]]
    assert [signature.args for signature in taken.signatures] == [(1, 1)]


def test_what_outlives_its_block_is_refused(app: Celery) -> None:
    """It would be lost in silence, or be sent without the commit that it belongs to."""
    box = TransactionBuffer({}, lambda *_: [], None)
    with capture_sends(app, box):
        copied = contextvars.copy_context()
        box.close()

    with pytest.raises(OutboxRefusedError, match=r"add .* after the end"):
        copied.run(app.tasks["add"].delay, 1, 1)


def test_a_chord_and_what_names_its_own_broker_are_refused(app: Celery) -> None:
    add, total, taken = app.tasks["add"], app.tasks["total"], Taken()
    send: Any = app.send_task
    with capture_sends(app, taken):
        with pytest.raises(OutboxRefusedError, match="start the chord"):
            chord([add.s(1, 1), add.s(2, 2)], total.s()).delay()
        with pytest.raises(OutboxRefusedError, match="after the commit"):
            send("add", (1, 1), connection=object())
    assert "add" not in taken.names


@contextmanager
def running(task: Any, id: str) -> Iterator[None]:  # noqa: A002
    """Inside a run of a task, as a worker begins one."""
    task.push_request(id=id, called_directly=False, root_id=id, children=[])
    _task_stack.push(task)
    try:
        yield
    finally:
        _task_stack.pop()
        task.pop_request()


def test_the_running_task_going_on_is_sent_at_once(app: Celery) -> None:
    """What `retry` and `replace` raise aborts the transaction: in its box they would be lost."""
    add, taken = app.tasks["add"], Taken()
    with running(app.tasks["total"], "mine"), capture_sends(app, taken):
        for goes_on in (
            add.s(1, 1).set(task_id="mine"),
            chain(add.s(1, 1), add.s(2).set(task_id="mine")),
        ):
            goes_on.apply_async()
        assert (sent(app), taken.signatures) == ([[1, 1], [1, 1]], [])
        result = add.delay(5, 5)
        trail: Any = app.tasks["total"].request.children

    assert [signature.args for signature in taken.signatures] == [(5, 5)]
    assert trail[-1].id == result.id
