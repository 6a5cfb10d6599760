"""Each process has its own client: what a callable gives is asked for anew after a fork."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Outbox
from mongo_celery.forking import PerProcess
from tests.fixtures.forking import holds_after_a_fork


def fresh() -> Collection[Any]:
    return MongoClient("mongodb://localhost:1", connect=False)["shop"]["orders"]


def test_threads_that_ask_at_once_get_the_same() -> None:
    """Each loses by a second client: its sockets, and in a pool of threads there may be a hundred."""
    together, asked = threading.Barrier(8), []

    def source() -> Collection[Any]:
        asked.append(threading.get_ident())
        return fresh()

    ours = Outbox(Celery("shop", broker="memory://"), source, name="orders")

    def ask(_number: int) -> Collection[Any]:
        together.wait()
        return ours.collection

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, range(8)))
    assert len(asked) == len({id(each) for each in got}) == 1


def test_a_fork_amid_the_making_hinders_no_child() -> None:
    """The thread that makes the parent's, and holds what keeps others from it, does not exist in the child."""
    begun, go_on = threading.Event(), threading.Event()

    def source() -> Collection[Any]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait()
        return fresh()

    ours = Outbox(Celery("shop", broker="memory://"), source, name="orders")
    maker = threading.Thread(target=lambda: ours.collection)
    maker.start()
    begun.wait()
    try:
        assert holds_after_a_fork(lambda: ours.collection is not None)
    finally:
        go_on.set()
        maker.join()


def test_a_child_does_not_take_what_its_parent_has_made() -> None:
    """What is taken is closed, and the parent's connections are not the child's to close."""
    value = PerProcess(object)
    parents = value.get()
    assert holds_after_a_fork(lambda: value.take() is None and value.get() is not parents)
    assert value.get() is parents
    assert value.take() is parents
    assert value.take() is None
    assert value.get() is not parents
