"""A slow handler has its own workers, or its share of those that it has in common with others, and no more."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from tests.acceptance.chain_rig import QUIET
from tests.acceptance.scene import OPTIONS
from tests.fixtures.forked import run_celery
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

_APP = "tests.acceptance.isolation.group_project"
_RUNS = 4  # of the slow handler, while the other one is counted
_TIMES_AS_MANY = 2
"""Beside each other in one queue both handlers finish about as many; a busy machine leaves little of its other slot."""


class Shop:
    """The project's databases, processes and commands; the slow handler is in the given group."""

    def __init__(
        self, processes: Processes, client: MongoClient[Document], mongo_url: str, broker_url: str, group: str = ""
    ) -> None:
        self.names = f"groups_{uuid4().hex[:10]}"
        self.group = group
        self._client = client
        self._data = client[f"{self.names}_data"]
        self._state = client[f"{self.names}_state"]
        self._processes = processes
        self._environment = {
            "PROJECT_MONGO": mongo_url,
            "PROJECT_BROKER": broker_url,
            "PROJECT_NAMES": self.names,
        }

    def close(self) -> None:
        """End the processes, and drop the databases."""
        self._processes.__exit__()
        empty(self._client, self._data)
        empty(self._client, self._state)

    def listener(self, name: str = "listener", **options: Any) -> ProjectProcess:
        """Start a listener, and wait until it leads."""
        started = self._start("listener", name=name, **options)
        started.wait_for_output("reading from")
        return started

    def worker(self, *arguments: str, name: str = "worker", concurrency: int = 2, **options: Any) -> ProjectProcess:
        """Start a worker, and wait until it consumes."""
        own = ("-c", str(concurrency), "-n", f"{name}@%h", *QUIET, *arguments)
        started = self._start("worker", *own, name=name, **options)
        started.wait_for_output(r" ready\.")
        return started

    def queues(self, *arguments: str) -> str:
        """What `changes queues` prints."""
        done = run_celery("-A", _APP, "changes", "queues", *arguments, environment=self._variables({}))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, quick: int = 0, slow: int = 0) -> None:
        """Write so many changes for each handler."""
        for name, count in (("quick", quick), ("slow", slow)):
            if count:
                self._data[name].insert_many([{} for _ in range(count)])

    def done(self, handler: str) -> int:
        """How many changes of a handler are committed."""
        found = self._state["partitions"].find({"_id": {"$regex": f"^shop/{handler}/"}}, {"committed": 1})
        return sum(int(each["committed"]) for each in found)

    def outstanding(self) -> int:
        """How many runs are out, by the listener's report."""
        lease = self._state["leases"].find_one({"_id": "shop"}) or {}
        return int((lease.get("report") or {}).get("outstanding", 0))

    def wait_done(self, handler: str, count: int) -> None:
        """Wait until so many changes of a handler are committed."""
        wait_for(lambda: self.done(handler) >= count, message=lambda: f"{count} of {handler}: {self.done(handler)}")

    def rate(self, handler: str, runs: int) -> float:
        """Commits of a handler in a second, over so many runs."""
        before, began = self.done(handler), time.monotonic()
        self.wait_done(handler, before + runs)
        return (self.done(handler) - before) / (time.monotonic() - began)

    def quick_while_slow(self, runs: int) -> int:
        """How many quick changes are committed while the slow handler finishes so many more."""
        until, before = self.done("slow") + runs, self.done("quick")
        self.wait_done("slow", until)
        return self.done("quick") - before

    def _start(self, *arguments: str, name: str, **options: Any) -> ProjectProcess:
        variables = self._variables(options)
        return self._processes.celery(_APP, *arguments, "-l", "INFO", name=name, environment=variables)

    def _variables(self, options: Document) -> dict[str, str]:
        group = options.pop("group", self.group)
        return {**self._environment, "PROJECT_GROUP": group, "PROJECT_OPTIONS": json.dumps({**OPTIONS, **options})}


@pytest.fixture
def shop(mongo_client: MongoClient[Document], mongo_url: str, redis_url: str, processes: Processes) -> Iterator[Shop]:
    """Give both handlers, in no group as long as none is given."""
    made = Shop(processes, mongo_client, mongo_url, redis_url)
    yield made
    made.close()


def test_a_noop_keeps_its_share_of_workers_beside_a_slow_handler(shop: Shop) -> None:
    """P12: one of two slots is enough for many runs of it in a second."""
    shop.write(quick=2000, slow=40)
    shop.worker()
    shop.listener()
    shop.wait_done("slow", 8)  # four were sent before it was known that they are slow
    assert shop.quick_while_slow(_RUNS) >= _TIMES_AS_MANY * _RUNS


@pytest.mark.slow
def test_a_slow_handler_has_workers_of_its_own(shop: Shop) -> None:
    """P12: neither worker takes what is the other's, and the quick handler does not wait for the slow one."""
    shop.group = "slow"
    shop.write(quick=2000, slow=40)
    own = shop.worker("-Q", shop.queues("--group", "slow"), name="own", concurrency=1)
    rest = shop.worker("-Q", "shop.0,shop.1", name="rest", concurrency=1)
    shop.listener()
    shop.wait_done("slow", 1)
    assert shop.quick_while_slow(_RUNS) >= _TIMES_AS_MANY * _RUNS
    assert "group_project.quick" not in own.text.partition("ready.")[2]
    assert "group_project.slow" not in rest.text.partition("ready.")[2]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "least"), [("slow", 0.7), ("", 0.3)], ids=["its own workers", "common workers"])
def test_a_noop_keeps_its_throughput(shop: Shop, group: str, least: float) -> None:
    """P12: 0.9 of it, and about half of it, are measured on a quiet machine; what is alone and beside alternates."""
    shop.group = group
    shop.write(quick=20_000)
    if group:
        shop.worker("-Q", shop.queues("--group", group), name="own", concurrency=1)
        shop.worker("-Q", shop.queues("--without-group"), name="rest", concurrency=1)
    else:
        shop.worker()
    shop.listener()
    shop.wait_done("quick", 100)
    alone, beside = [], []
    for _ in range(4):
        alone.append(shop.rate("quick", 400))
        before = shop.done("slow")
        shop.write(slow=16)
        shop.wait_done("slow", before + 6)
        began = time.monotonic()
        beside.append(shop.quick_while_slow(_RUNS) / (time.monotonic() - began))
        shop.wait_done("slow", before + 16)
    assert median(beside) >= least * median(alone), (alone, beside)


@pytest.mark.slow
def test_a_deploy_with_other_queues_leaves_nothing_behind(shop: Shop) -> None:
    """P1: what lies in queues that the new workers do not consume is dispatched again; a plain worker consumes all."""
    shop.write(quick=100, slow=4)
    old = shop.listener("old", partitions=8, queues=8)
    wait_for(lambda: shop.outstanding() > 8, message="runs of both are out, in all queues")
    shop.listener("new", partitions=8, queues=2, group="slow")
    shop.worker(partitions=8, queues=2, group="slow")
    shop.wait_done("quick", 100)
    shop.wait_done("slow", 4)
    assert old.running
