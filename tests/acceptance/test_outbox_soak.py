"""
The outbox's soak: everything at once, and then the books are compared.

`MONGO_CELERY_SOAK_ENTRIES` says how many entries, `MONGO_CELERY_SOAK_SEED` with which seed: an evening's examination is
100000. The same seed gives the same kinds of writes, not the same run.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.acceptance.outbox_rig import Shop, Tap
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis

Document = dict[str, Any]

SOAK = "tests.acceptance.outbox_soak"
ENTRIES = int(os.environ.get("MONGO_CELERY_SOAK_ENTRIES", "6000"))
SEED = int(os.environ.get("MONGO_CELERY_SOAK_SEED", "14"))
DOCUMENTS = 60
_QUIET_SECONDS = (1.0, 4.0)
_FAULT_SECONDS = (0.5, 7.0)


@contextmanager
def faults(chance: random.Random, kinds: Mapping[str, Callable[[threading.Event, float], None]]) -> Iterator[list[str]]:
    """Meanwhile something happens to the servers, one after the other; the list says what. In the end all is healed."""
    happened: list[str] = []
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(chance.uniform(*_QUIET_SECONDS)):
            name = chance.choice(list(kinds))
            kinds[name](ended, chance.uniform(*_FAULT_SECONDS))
            happened.append(name)

    thread = threading.Thread(target=run, name="faults", daemon=True)
    thread.start()
    try:
        yield happened
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_nothing_is_lost_invented_overtaken_or_renamed_under_kills_freezes_cuts_and_stepdowns(
    processes: Processes, make_replica_set: MakeReplicaSet, make_redis: MakeRedis, make_proxy: Callable[[int], Proxy]
) -> None:
    """Each number reaches the broker, in the order of its document, under one id, and no field is left behind."""
    replica_set, broker = make_replica_set(), make_redis()
    proxy = make_proxy(broker.port)

    def freeze_broker(ended: threading.Event, seconds: float) -> None:
        broker.pause()
        ended.wait(seconds)
        broker.resume()

    def cut_broker(ended: threading.Event, seconds: float) -> None:
        proxy.reset()
        proxy.refuse()
        ended.wait(seconds)
        proxy.pass_through()

    def swallow_broker(ended: threading.Event, seconds: float) -> None:
        proxy.black_hole()
        ended.wait(seconds)
        proxy.reset()
        proxy.pass_through()

    def step_down(_ended: threading.Event, _seconds: float) -> None:
        with MongoClient[Document](replica_set.url) as client:
            try:
                client.admin.command("replSetStepDown", 1, force=True)
            except PyMongoError:
                return
            wait_for(lambda: client.admin.command("hello").get("isWritablePrimary"))

    kinds = {each.__name__: each for each in (freeze_broker, cut_broker, swallow_broker, step_down)}
    with (
        MongoClient[Document](replica_set.url) as client,
        Shop(processes, client, replica_set.url, proxy.redis_url) as shop,
        Tap(broker.url) as tap,
    ):
        keys = [f"key{number}" for number in range(DOCUMENTS)]
        shop.items.insert_many([{"_id": key, "ns": []} for key in keys])
        began = time.monotonic()
        with faults(random.Random(SEED), kinds) as happened:
            soak = shop.program(SEED, ENTRIES, *keys, module=SOAK)
            wait_for(lambda: not soak.running, 60 + ENTRIES / 20, lambda: f"{len(tap.published)} published")
        assert soak.wait() == 0, soak.text
        client.admin.command("killAllSessions", [])  # who died in a transaction holds its documents for a minute
        shop.sweep_all(60 + ENTRIES / 100)
        committed = shop.committed()
        total = sum(map(len, committed.values()))
        wait_for(lambda: len(tap.published) - tap.duplicates >= total, 60, lambda: f"{tap.duplicates} duplicates")
        published = tap.first()
        print(soak.text.splitlines()[-1], f"seconds {time.monotonic() - began:.0f}", f"entries {total}")  # noqa: T201
        print({name: happened.count(name) for name in kinds}, f"duplicates {tap.duplicates}")  # noqa: T201

        wrong = {key: (ns, published.get(key)) for key, ns in committed.items() if published.get(key) != ns}
        assert (wrong, published.keys() - committed.keys()) == ({}, set()), "lost, invented or overtaken"
        assert {each: ids for each, ids in tap.ids.items() if len(ids) > 1} == {}, "renamed"
        assert total >= ENTRIES
        assert shop.outbox.runtime.dead_letters.count() == 0
