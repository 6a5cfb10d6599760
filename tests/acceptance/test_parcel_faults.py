"""An `OutboxCollection` under faults, with real processes: killed anywhere, and paused and woken up late."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient

from mongo_celery import OutboxCollection, transactional
from tests.acceptance.outbox_rig import OPTIONS, Shop, Tap, said
from tests.acceptance.parcel_project import PARCELS
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

REPLACED = 120


class ParcelShop(Shop):
    """The project with parcels; this process writes transactions, and sweeps them."""

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.boxes = OutboxCollection(
            self.app,
            self.database[PARCELS],
            database=f"{self.name}_state",
            foreign_tasks=True,
            **{**OPTIONS, "sweep_every": None, "at_once": False},
        )
        self._transaction = transactional(client)

    def program(self, *arguments: object, **options: Any) -> ProjectProcess:
        """Start one of the project's programs; does not wait."""
        environment = {**self._environment, "OUTBOX_OPTIONS": json.dumps({**OPTIONS, **options})}
        module = "tests.acceptance.parcel_project"
        return self._processes.python(str(arguments[0]), "-m", module, *map(str, arguments), environment=environment)

    def add(self, key: str, *ns: object, session: Any = None) -> bool:
        """Add numbers by a transaction of this process."""
        del session

        def body(session: Any) -> bool:
            push = {"$push": {"ns": {"$each": list(ns)}}}
            done = self.items.update_one({"_id": key}, push, session=session)
            if done.matched_count:
                self.boxes.add([self.effect(key, n) for n in ns], key=key, session=session)
            return bool(done.matched_count)

        return bool(self._transaction.run(body))

    def pending(self) -> int:
        """How many entries wait."""
        return self.boxes.status().pending

    def sweep(self) -> int:
        """Sweep once in this process; how many entries were dispatched."""
        return self.boxes.sweep(older_than=0.01).dispatched

    def free_documents_of_the_dead(self) -> None:
        """End transactions of which nothing has been heard for a second: the server would take a minute."""
        admin = self.items.database.client.admin
        idle = {"transaction.timeInactiveMicros": {"$gt": 1_000_000}}
        stages: list[Document] = [{"$currentOp": {"allUsers": True, "idleSessions": True}}, {"$match": idle}]
        for found in admin.aggregate(stages):
            admin.command("killAllSessionsByPattern", [{"lsid": found["lsid"]}])

    def empty(self) -> None:
        """Sweep in this process until nothing waits."""

        def is_empty() -> bool:
            self.sweep()
            return not self.pending()

        wait_for(is_empty, message=lambda: f"{self.boxes.status()}")


@pytest.fixture
def shop(
    processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str
) -> Iterator[ParcelShop]:
    """Give the project on the session's servers."""
    with ParcelShop(processes, mongo_client, mongo_url, redis_url) as made:
        yield made
        made.boxes.backing.close()


def test_a_writer_that_is_killed_at_any_point_loses_and_invents_nothing(
    shop: ParcelShop, mongo_client: MongoClient[Document], redis_url: str
) -> None:
    """Before and after each command of the transaction and each message of its delivery, until one writer lives."""
    with Tap(redis_url) as tap:
        writers = shop.program("die-writing", "both")
        assert writers.wait() == 0, writers.text
        deaths = said(writers)
        mongo_client.admin.command("killAllSessions", [])  # who died in a transaction holds its documents for a minute
        for _, at, _ in deaths:  # behind what may be pending there
            shop.add(f"both {at}", 3)
        shop.empty()
        shop.agree(tap)

    points = [point for _, _, point in deaths]
    assert points.count("before publish") == points.count("after publish") == 2
    assert points[-1] == "after delete", "the removal is the last"
    written = [shop.committed().get(f"both {at}", []) for at, _ in enumerate(points, 1)]
    assert written[0] == [], "killed before the command"
    assert written[-1] == [1, 2, 3], "killed after the removal"


def test_relays_that_are_killed_or_sleep_cost_duplicates_and_never_change_the_order(
    shop: ParcelShop, redis_url: str
) -> None:
    """Stopped anywhere between claim and removal; others deliver and write; some are killed, the others wake up."""
    killed = [f"killed{number}" for number in range(10)]
    keys = [f"key{number}" for number in range(10)]
    shop.items.insert_many([{"_id": key, "ns": []} for key in (*keys, *killed)])
    for key in (*keys, *killed):
        shop.add(key, 1)
        shop.add(key, 2, 3)
    with Tap(redis_url) as tap:
        victims = shop.program("be-zombies", *killed)
        zombies = shop.program("be-zombies", *keys)
        for each in (victims, zombies):
            each.wait_for_output("stopped 10 of 10")
        victims.kill()
        shop.empty()
        for key in (*keys, *killed):
            shop.add(key, 4, 5)
        assert shop.sweep()
        before = tap.duplicates
        zombies.send_group(signal.SIGCONT)
        assert zombies.wait() == 0, zombies.text
        shop.empty()
        shop.agree(tap)

    stops = {point for _, _, point in said(zombies)}
    assert stops == {f"{when} {what}" for when in ("before", "after") for what in ("update", "publish", "delete")}
    assert tap.duplicates > before, "one that had passed its last look at the clock has published again"


@pytest.mark.slow
def test_everything_is_done_once_and_in_order_under_random_kills(shop: ParcelShop, redis_url: str) -> None:
    """Writers and sweepers die all the time, on four documents; then the books are compared."""
    keys = ["a", "b", "c", "d"]
    shop.items.insert_many([{"_id": key, "ns": []} for key in keys])
    with Tap(redis_url) as tap:
        soak = shop.program("soak", 1, REPLACED, *keys)

        def ended() -> bool:
            shop.free_documents_of_the_dead()
            return not soak.running

        wait_for(ended, 280)
        assert soak.wait() == 0, soak.text
        deaths = int(soak.wait_for_output(r"deaths (\d+)").group(1))
        shop.empty()
        shop.agree(tap)

    assert deaths > REPLACED
    assert set(shop.committed()) == set(keys)
    assert len(tap.published) > REPLACED / 4
