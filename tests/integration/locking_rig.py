"""Eight processes that race for documents, a holder in another thread, and a spy on what a client sends."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery import locking
from mongo_celery.locking import asynchronous, select_for_update, select_many_for_update, transactional
from tests.fixtures.process import Processes, wait_for

Document = dict[str, Any]
Work = Callable[[Database[Document], int], object]

ACTORS = 8
INCREMENTS = 25
TRANSFERS = 10
PLACES = 5
_ANSWER_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.01


class Threads:
    """The locks for threads, each call in a transaction of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = MongoClient[Document](url, **options)
        self._client.admin.command("ping")  # which commands are right, a client knows once it is connected

    def lock(self, name: str, *args: Any, timeout: float = _ANSWER_SECONDS_MAX, **options: Any) -> Any:
        """What the function of this name gives; collections are those of any client."""
        call = transactional(self._client, timeout=timeout)(getattr(locking, name))
        return call(*(_of_client(self._client, each) for each in args), **options)

    def close(self) -> None:
        self._client.close()


class Tasks:
    """The same by the locks for asyncio, on an event loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.Runner()
        self._client = AsyncMongoClient[Document](url, **options)
        self._loop.run(self._client.admin.command("ping"))

    def lock(self, name: str, *args: Any, timeout: float = _ANSWER_SECONDS_MAX, **options: Any) -> Any:
        """As of `Threads`."""
        call = transactional(self._client, timeout=timeout)(getattr(asynchronous, name))
        return self._loop.run(call(*(_of_client(self._client, each) for each in args), **options))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()


def _of_client(client: Any, given: Any) -> Any:
    """A collection, or pairs of one and something else, of this client instead of another."""
    if isinstance(given, list):
        return [(_of_client(client, each), *others) for each, *others in given]
    if not isinstance(given, Collection):
        return given
    return client[given.database.name].get_collection(given.name, codec_options=given.codec_options)


@contextmanager
def held(collection: Collection[Document], *document_ids: object) -> Iterator[None]:
    """Lock documents for as long as the block lasts, in a transaction that nothing inside can join."""
    with collection.database.client.start_session() as session, session.start_transaction():
        for document_id in document_ids:
            select_for_update(collection, {"_id": document_id}, session=session)
        yield


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[Any]:
    """Run work in a thread beside the block; what it raises is raised when its result is asked for."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


def count_with_lock(database: Database[Document], _actor: int) -> None:
    """Lock, and write one more than was read, many times."""

    @transactional(database.client)
    def count(*, session: ClientSession) -> None:
        document = select_for_update(database["counters"], {"_id": 1}, session=session)
        database["counters"].update_one({"_id": 1}, {"$set": {"count": document["count"] + 1}}, session=session)

    for _ in range(INCREMENTS):
        count()


def leave_with_lock(database: Database[Document], actor: int) -> None:
    """Go off duty if somebody else stays; who is on duty is locked."""

    @transactional(database.client)
    def leave(*, session: ClientSession) -> None:
        on_duty = select_many_for_update(database["doctors"], {"on_duty": True}, session=session)
        if len(on_duty) > 1:
            database["doctors"].update_one({"_id": actor}, {"$set": {"on_duty": False}}, session=session)

    leave()


def transfer_in_opposite_order(database: Database[Document], actor: int) -> None:
    """Move one from an account to another; every second process locks them the other way round."""
    order = [1, 2] if actor % 2 else [2, 1]

    @transactional(database.client)
    def transfer(*, session: ClientSession) -> None:
        source, target = [
            select_for_update(database["accounts"], {"_id": each}, session=session)["_id"] for each in order
        ]
        database["accounts"].update_one({"_id": source}, {"$inc": {"balance": -1}}, session=session)
        database["accounts"].update_one({"_id": target}, {"$inc": {"balance": 1}}, session=session)

    for _ in range(TRANSFERS):
        transfer()


def take_places(database: Database[Document], actor: int) -> int:
    """Take the free places that are seen, two at a time, in an order of one's own; how many were got."""

    @transactional(database.client)
    def take(*, session: ClientSession) -> int:
        direction = 1 if actor % 2 else -1
        free = select_many_for_update(
            database["places"], {"taken_by": None}, session=session, sort=[("row", direction)], limit=2
        )
        ids = [place["_id"] for place in free]
        update = {"$set": {"taken_by": actor}, "$inc": {"sales": 1}}
        database["places"].update_many({"_id": {"$in": ids}}, update, session=session)
        return len(free)

    return sum(iter(take, 0))


WORKS: dict[str, Work] = {
    work.__name__: work
    for work in (
        count_with_lock,
        leave_with_lock,
        transfer_in_opposite_order,
        take_places,
    )
}


class Crew:
    """Processes that do the same work at the same time, as often as they are asked."""

    def __init__(self, processes: Processes, url: str, orders: Collection[Document]) -> None:
        self._orders = orders
        self._round = 0
        program = ("-m", "tests.integration.locking_rig", url, orders.database.name, orders.name)
        self._actors = [processes.python(f"actor-{number}", *program, str(number)) for number in range(ACTORS)]

    def do(self, work: Work, database: Database[Document]) -> list[Any]:
        """What each has answered; fails with the traceback of one that could not."""
        self._round += 1
        order = {"_id": self._round, "work": work.__name__, "database": database.name, "answers": []}
        self._orders.insert_one(order)

        def answered() -> list[Document] | None:
            assert all(actor.running for actor in self._actors), "an actor has ended"
            found = self._orders.find_one({"_id": self._round})
            assert found is not None
            return found["answers"] if len(found["answers"]) == ACTORS else None

        answers = wait_for(answered, _ANSWER_SECONDS_MAX, "an answer of each actor")
        failures = [answer["failure"] for answer in answers if answer["failure"]]
        assert not failures, "\n".join(failures)
        return [answer["result"] for answer in answers]


def _serve(orders: Collection[Document], actor: int) -> None:
    number = 1
    while True:
        order = orders.find_one({"_id": number})
        if order is None:
            threading.Event().wait(_POLL_SECONDS)
            continue
        answer: Document = {"result": None, "failure": None}
        try:
            answer["result"] = WORKS[order["work"]](orders.database.client[order["database"]], actor)
        except Exception:  # noqa: BLE001 - the test shows it
            answer["failure"] = traceback.format_exc()
        orders.update_one({"_id": number}, {"$push": {"answers": answer}})
        number += 1


def main() -> None:
    url, database, name, actor = sys.argv[1:]
    with MongoClient[Document](url) as client:
        _serve(client[database][name], int(actor))


if __name__ == "__main__":
    main()
