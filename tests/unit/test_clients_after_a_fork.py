"""Each process has its own client: what a callable gives is asked for anew after a fork."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection

from mongo_celery import Outbox, TwoPhaseCommit
from mongo_celery.forking import PerProcess
from tests.fixtures.forking import holds_after_a_fork

URL = "mongodb://localhost:1"

Opened = Callable[[], Collection[Any]]


def fresh(name: str = "orders") -> Collection[Any]:
    """A callable as the documentation recommends it: it makes a client."""
    return MongoClient(URL, connect=False)["shop"][name]


def outbox(source: Any = fresh) -> Outbox:
    return Outbox(Celery("shop", broker="memory://"), source, name="orders")


def coordinator(source: Any = fresh) -> TwoPhaseCommit:
    return TwoPhaseCommit(
        None, source, application="bank", accounts=lambda: fresh("accounts"), clients={"other": other_cluster}
    )


def other_cluster() -> MongoClient[Any]:
    return MongoClient(URL, connect=False)


@pytest.mark.parametrize("which", ["collection", "plain", "latest"])
def test_each_view_of_an_outbox_has_the_childs_client(which: str) -> None:
    """A client from before the fork shares its sockets, and its locks may be held for ever."""
    runtime = outbox().runtime
    parents = getattr(runtime, which)

    def is_the_childs() -> bool:
        client = getattr(runtime, which).database.client
        return client is runtime.collection.database.client and client is not parents.database.client

    assert holds_after_a_fork(is_the_childs)


@pytest.mark.parametrize("make", [outbox, coordinator])
def test_a_collection_that_was_given_stays_what_it_is(make: Callable[[Any], Any]) -> None:
    """It is the user's, whom the driver warns."""
    given = fresh()
    made = make(given)
    opened: Opened = (lambda: made.collection) if isinstance(made, Outbox) else (lambda: made.transactions)
    assert opened().database.client is given.database.client
    assert holds_after_a_fork(lambda: opened().database.client is given.database.client)


def test_another_cluster_is_asked_for_once_a_process() -> None:
    """What makes a client makes one, and a child's participants are recognised by the child's client."""
    made: list[MongoClient[Any]] = []

    def other() -> MongoClient[Any]:
        made.append(other_cluster())
        return made[-1]

    bank = TwoPhaseCommit(None, fresh, application="bank", clients={"other": other})
    with pytest.raises(Exception, match="could not find the client"):
        bank._clusters.find_alias(other_cluster())
    assert bank._clusters.find_alias(made[0]) == "other"

    def is_the_childs() -> bool:
        with pytest.raises(Exception, match="could not find the client"):
            bank._clusters.find_alias(made[0])
        return bank._clusters.find_alias(made[-1]) == "other" and len(made) == 2

    assert holds_after_a_fork(is_the_childs)
    assert len(made) == 1


def test_threads_that_ask_at_once_get_the_same() -> None:
    """Each loses by a second client: its sockets, and in a pool of threads there may be a hundred."""
    together, asked = threading.Barrier(8), []

    def source() -> Collection[Any]:
        asked.append(threading.get_ident())
        return fresh()

    ours, got = outbox(source), []

    def ask() -> None:
        together.wait()
        got.append(ours.collection)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert len({id(each) for each in got}) == 1


def test_a_fork_amid_the_making_hinders_no_child() -> None:
    """The thread that makes the parent's, and holds what keeps others from it, does not exist in the child."""
    begun, go_on = threading.Event(), threading.Event()

    def source() -> Collection[Any]:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            go_on.wait()
        return fresh()

    ours = outbox(source)
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


def test_what_could_not_be_made_is_tried_again() -> None:
    """A server that is down when the first one asks may be up when the next one does."""
    errors = [ConnectionError("down")]

    def make() -> str:
        if errors:
            raise errors.pop()
        return "up"

    value = PerProcess(make)
    with pytest.raises(ConnectionError):
        value.get()
    assert value.get() == "up"
