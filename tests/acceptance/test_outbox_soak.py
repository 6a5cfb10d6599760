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
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
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


def wrong_in(
    committed: Mapping[str, Sequence[Any]],
    first: Mapping[str, Sequence[Any]],
    ids: Mapping[tuple[str, Any], AbstractSet[str]],
) -> list[str]:
    """
    What the books show.

    Args:
        committed: what was written to each document, in order.
        first: what was published for each, in the order of the first time.
        ids: of the messages for each document and number.
    """
    found = []
    for key in sorted(committed.keys() | first.keys()):
        written, published = list(committed.get(key, ())), list(first.get(key, ()))
        lost, invented = set(written) - set(published), set(published) - set(written)
        found += [f"{key}: {n} is lost" for n in sorted(lost)] + [f"{key}: {n} is invented" for n in sorted(invented)]
        if not lost and not invented and written != published:
            place = next(place for place, n in enumerate(written) if published[place] != n)
            found.append(f"{key}: {written[place]} is overtaken by {published[place]}")
    return found + [f"{key}: {n} has {len(each)} ids" for (key, n), each in sorted(ids.items()) if len(each) > 1]


def test_the_books_show_what_is_lost_invented_overtaken_or_renamed() -> None:
    """A checker that has never failed has not been tested."""
    written = {"a": ["1", "2", "3"], "b": ["1"]}
    once = {("a", "1"): {"x"}, ("a", "2"): {"y"}}
    assert wrong_in(written, written, once) == []
    assert wrong_in(written, {"a": ["1", "3"]}, {}) == ["a: 2 is lost", "b: 1 is lost"]
    assert wrong_in(written, {**written, "b": ["1", "7"], "c": ["1"]}, {}) == ["b: 7 is invented", "c: 1 is invented"]
    assert wrong_in(written, {**written, "a": ["1", "3", "2"]}, {}) == ["a: 2 is overtaken by 3"]
    assert wrong_in(written, written, {**once, ("b", "1"): {"x", "z"}}) == ["b: 1 has 2 ids"]


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
        print(soak.text.splitlines()[-1], f"seconds {time.monotonic() - began:.0f}", f"entries {total}")  # noqa: T201
        print({name: happened.count(name) for name in kinds}, f"duplicates {tap.duplicates}")  # noqa: T201

        assert wrong_in(committed, tap.first(), tap.ids) == []
        assert total >= ENTRIES
        assert shop.outbox.runtime.dead_letters.count() == 0
