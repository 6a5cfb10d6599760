"""Eight processes that race for documents, a holder in another thread, and a spy on what a client sends."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pymongo import AsyncMongoClient, MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

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


class Sent(CommandListener):
    """The commands that a client has sent."""

    def __init__(self) -> None:
        self.commands: list[Document] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.commands.append(dict(event.command))

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass

    def named(self, name: str) -> list[Document]:
        return [command for command in self.commands if name in command]


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


def meet(collection: Collection[Document], mark: object, party: int) -> None:
    """Return when so many processes have come here; what makes a race certain."""
    collection.insert_one({"mark": mark})
    deadline = time.monotonic() + _ANSWER_SECONDS_MAX
    while collection.count_documents({"mark": mark}) < party:
        assert time.monotonic() < deadline, f"not all {party} came to {mark}"
        threading.Event().wait(_POLL_SECONDS)


def count_without_lock(database: Database[Document], _actor: int) -> None:
    """Read, and write one more, when all have read."""
    document = database["counters"].find_one({"_id": 1})
    assert document is not None
    meet(database["meetings"], "read", ACTORS)
    database["counters"].update_one({"_id": 1}, {"$set": {"count": document["count"] + 1}})


def count_with_lock(database: Database[Document], _actor: int) -> None:
    """Lock, and write one more than was read, many times."""

    @transactional(database.client)
    def count(*, session: ClientSession) -> None:
        document = select_for_update(database["counters"], {"_id": 1}, session=session)
        database["counters"].update_one({"_id": 1}, {"$set": {"count": document["count"] + 1}}, session=session)

    for _ in range(INCREMENTS):
        count()


def leave_without_lock(database: Database[Document], actor: int) -> None:
    """Go off duty if somebody else stays, in a transaction, when all have looked."""

    @transactional(database.client)
    def leave(*, session: ClientSession) -> None:
        on_duty = list(database["doctors"].find({"on_duty": True}, session=session))
        meet(database["meetings"], "looked", ACTORS)
        if len(on_duty) > 1:
            database["doctors"].update_one({"_id": actor}, {"$set": {"on_duty": False}}, session=session)

    leave()


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


def hold_for_ever(database: Database[Document], _actor: int) -> None:
    """Lock a document and stay."""
    with held(database["things"], 1):
        database["meetings"].insert_one({"mark": "held"})
        threading.Event().wait()


WORKS: dict[str, Work] = {
    work.__name__: work
    for work in (
        count_without_lock,
        count_with_lock,
        leave_without_lock,
        leave_with_lock,
        transfer_in_opposite_order,
        take_places,
        hold_for_ever,
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
    """Serve orders; or, with a work instead of a collection of orders, do that once."""
    url, database, name, actor = sys.argv[1:]
    with MongoClient[Document](url) as client:
        if name in WORKS:
            WORKS[name](client[database], int(actor))
        else:
            _serve(client[database][name], int(actor))


if __name__ == "__main__":
    main()
