"""What a body sends is taken for its box: by all of Celery's ways, and by none that must go out at once."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery._state import _task_stack  # type: ignore[attr-defined]
from celery.canvas import Signature

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.transaction.scopes import outside_transactions
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
        self.ids: set[Any] = set()

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


def test_all_ways_to_send_are_taken_with_their_ids_and_options(app: Celery) -> None:
    """Tasks, signatures, names, chains and groups. Nobody asks the broker, at which nobody listens."""
    app.conf.update(broker_url="redis://127.0.0.1:9/0")
    add, taken = app.tasks["add"], Taken()
    with capture_sends(app, taken):
        one = add.delay(1, 2)
        slowly: Any = {"countdown": 60, "queue": "slow", "headers": {"x": "y"}, "expires": None}
        two = add.apply_async((3, 4), **slowly)
        three = app.send_task("elsewhere.ship", args=[5], kwargs={"fast": True}, task_id="given")
        chain(add.s(1, 2), add.s(3)).delay()
        group(add.s(0, each) for each in range(2)).delay()
        total = app.tasks["total"].delay([1])
        with pytest.raises(OutboxRefusedError):
            chord([add.s(1, 1), add.s(2, 2)], app.tasks["total"].s()).delay()
        send: Any = app.send_task
        with pytest.raises(OutboxRefusedError):
            send("add", (1, 1), connection=object())

    assert taken.names == ["add", "add", "elsewhere.ship", "add", "add", "add", "total"]
    first, second, third, fourth, *_, last = taken.signatures
    assert (first.args, first.id) == ((1, 2), one.id)
    assert {**second.options, "task_id": two.id, **slowly} == second.options
    assert not {"options", "self", "producer", "task_type"} & set(second.options)
    assert (third.id, three.id, third.args, third.kwargs) == ("given", "given", (5,), {"fast": True})
    assert [step["task"] for step in fourth.options["chain"]] == ["add"]
    assert (last.id, last.options["expires"], last.options["serializer"]) == (total.id, 60, "pickle")


def test_a_block_ends_and_blocks_are_nested(app: Celery) -> None:
    outer, inner = Taken(), Taken()
    add = app.tasks["add"]
    with capture_sends(app, outer):
        with capture_sends(app, inner):
            add.delay(1, 1)
        with outside_transactions():
            add.delay(2, 2)
        add.delay(3, 3)
    with capture_sends(Celery("other", set_as_current=False), outer):
        add.delay(4, 4)
    assert sent(app) == [[2, 2], [4, 4]]
    assert [[each.args for each in taken.signatures] for taken in (inner, outer)] == [[(1, 1)], [(3, 3)]]


def test_what_outlives_its_block_is_refused(app: Celery) -> None:
    """It would be lost in silence, or be sent without the commit that it belongs to."""
    box = TransactionBuffer({}, lambda *_: [], None)
    with capture_sends(app, box):
        copied = contextvars.copy_context()
        box.close()

    with pytest.raises(OutboxRefusedError, match="add"):
        copied.run(app.tasks["add"].delay, 1, 1)


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
