"""
The outbox's soak: everything at once, and then the books are compared.

`MONGO_CELERY_SOAK_ENTRIES` says how many entries, `MONGO_CELERY_SOAK_SEED` with which seed: an evening's examination is
100000. The same seed gives the same kinds of writes, not the same run.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.acceptance.crowd import Crowd
from tests.acceptance.outbox_rig import Shop, Tap
from tests.fixtures.mongo import MakeReplicaSet
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis

ENTRIES = int(os.environ.get("MONGO_CELERY_SOAK_ENTRIES", "6000"))
SEED = int(os.environ.get("MONGO_CELERY_SOAK_SEED", "14"))
KEYS = [f"key{number}" for number in range(60)]
PROGRAMS = ("write", "sweep", "write", "sweep", "write")
SHARES = {"nothing": 85, "kill": 6, "freeze": 2, "thaw": 3, "freeze_broker": 1, "cut_broker": 1, "mend": 2, "depose": 1}
"""How often something happens, of a hundred looks."""


@pytest.mark.slow
def test_nothing_is_lost_invented_overtaken_or_renamed_under_kills_freezes_cuts_and_stepdowns(
    processes: Processes, make_replica_set: MakeReplicaSet, make_redis: MakeRedis, make_proxy: Callable[[int], Proxy]
) -> None:
    """Each number reaches the broker, in the order of its document, under one id, and no field is left behind."""
    replica_set, broker, chance, happened = make_replica_set(), make_redis(), random.Random(SEED), Counter[str]()
    proxy = make_proxy(broker.port)

    def cut_broker() -> None:
        proxy.reset()
        proxy.refuse()

    def mend() -> None:
        broker.resume()
        proxy.pass_through()

    with (
        MongoClient[dict[str, Any]](replica_set.url) as client,
        Shop(processes, client, replica_set.url, proxy.redis_url) as shop,
        Tap(broker.url) as tap,
    ):
        shop.items.insert_many([{"_id": key, "ns": []} for key in KEYS])
        crowd = Crowd(
            lambda number: shop.program(
                PROGRAMS[number % len(PROGRAMS)], SEED * 1000 + number, *KEYS, module="tests.acceptance.outbox_soak"
            ),
            len(PROGRAMS),
            chance,
        )
        kinds: dict[str, Callable[[], object]] = {
            "nothing": crowd.fill,
            "kill": crowd.kill,
            "freeze": crowd.freeze,
            "thaw": crowd.thaw,
            "freeze_broker": broker.pause,
            "cut_broker": cut_broker,
            "mend": mend,
            "depose": lambda: client.admin.command("replSetStepDown", 1, force=True),
        }

        def befall() -> bool:
            (kind,) = chance.choices(list(SHARES), list(SHARES.values()))
            with suppress(PyMongoError):  # no primary may answer now
                happened[kind] += 1
                kinds[kind]()
                return sum(map(len, shop.committed().values())) >= ENTRIES
            return False

        wait_for(befall, 60 + ENTRIES / 20, lambda: f"{len(tap.published)} published, {happened}")
        crowd.end(kill=True)
        mend()
        client.admin.command("killAllSessions", [])  # who died in a transaction holds its documents for a minute
        shop.sweep_all()
        committed = shop.committed()
        total = sum(map(len, committed.values()))
        wait_for(lambda: len(tap.published) - tap.duplicates >= total, 60, lambda: f"{tap.duplicates} duplicates")
        published = tap.first()
        print(f"{total} entries, {tap.duplicates} duplicates, {happened}")  # noqa: T201

        wrong = {key: (ns, published.get(key)) for key, ns in committed.items() if published.get(key) != ns}
        assert (wrong, published.keys() - committed.keys()) == ({}, set()), "lost, invented or overtaken"
        assert {each: ids for each, ids in tap.ids.items() if len(ids) > 1} == {}, "renamed"
        assert shop.outbox.runtime.dead_letters.count() == 0
