"""Three members, and primaries that die with writes that nobody else has: what a majority does not have, is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from celery.signals import after_task_publish
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery import Outbox, select_for_update, transactional
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.outbox.claims import FREE
from mongo_celery.outbox.pending import FIELD
from tests.acceptance.outbox_project import EFFECT, configured
from tests.acceptance.outbox_rig import OPTIONS, Shop, Tap
from tests.fixtures.election import Elections
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import Processes, wait_for
from tests.rig.changes import token
from tests.rig.partition import make_partition

Document = dict[str, Any]
_WRITES = 150
"""Of each writer: more than it can write until an election begins."""


@pytest.fixture
def elections(three_members: MongoReplicaSet) -> Elections:
    return Elections(three_members)


@pytest.fixture
def client(three_members: MongoReplicaSet, make_client: MakeClient) -> MongoClient[Document]:
    return make_client(three_members.url)


@pytest.fixture
def shop(
    processes: Processes, three_members: MongoReplicaSet, client: MongoClient[Document], redis_url: str
) -> Iterator[Shop]:
    """Give the outbox project on that set; a claim lasts longer than a slow majority write takes."""
    with Shop(processes, client, three_members.url, redis_url, claim_ttl=4.0) as made:
        yield made


@pytest.mark.slow
def test_outbox_writers_and_relays_bear_elections_that_take_writes_back(
    shop: Shop, elections: Elections, redis_url: str
) -> None:
    """Two processes write, dispatch and sweep; what reached the broker is what is committed, in order."""
    keys = ["a", "b", "c"]
    shop.items.insert_many([{"_id": key, "ns": []} for key in keys])
    with Tap(redis_url) as tap:
        for turn in (1, 2):
            before = len(tap.published)
            writers = [shop.program("load", f"{turn}.{name}", _WRITES, *keys) for name in ("first", "second")]
            wait_for(lambda before=before: len(tap.published) > before + 30)  # type: ignore[misc]
            elections.under_load(shop.data.name)
            assert [writer.wait() for writer in writers] == [0, 0], "\n".join(writer.text for writer in writers)
        shop.sweep_all()

        assert {key: len(ns) for key, ns in shop.committed().items()} == dict.fromkeys(keys, 4 * _WRITES)
        shop.agree(tap)


def test_an_election_that_takes_a_position_back_costs_one_start(
    three_members: MongoReplicaSet, elections: Elections, make_client: MakeClient, state_database: str
) -> None:
    """
    P5, P6: a position that an execution has written inline, and that no majority has yet: nobody rests on it.

    No look sees it, and no claim behind it is granted; when it was taken back, its change can be claimed again.
    """
    rig = make_partition(make_client(three_members.url), state_database, ttl=10.0)  # the time of a call is waited for
    claim = rig.claim()
    with elections.held_back() as primary, MongoClient[Document](primary.url) as direct:
        assert rig.claims.finish(claim, 1, token(1)), "it does not wait for a majority"
        assert [found["committed"] for found in direct[state_database]["partitions"].find()] == [1], "on this primary"
        assert rig.image.committed == 0, "by what a majority has"
        with pytest.raises(PyMongoError):
            rig.try_claim(2)
    assert rig.image.committed == 0
    rig.lapse()
    again = rig.claim()
    assert again.fencing_token > claim.fencing_token
    assert not rig.claims.finish(claim, 1, token(1))
    assert rig.claims.finish(again, 1, token(1))
    wait_for(lambda: rig.image.committed == 1)


def test_an_election_that_takes_removals_back_costs_duplicates(
    shop: Shop, elections: Elections, redis_url: str
) -> None:
    """Removals do not wait for a majority: the entries are there again, and are sent again with the same ids."""
    published: list[str] = []
    with Tap(redis_url) as tap, ExitStack() as held:

        def cut_off(headers: Document, **_arguments: Any) -> None:
            published.append(headers["id"])
            if len(published) == 3:
                held.enter_context(elections.held_back())

        after_task_publish.connect(cut_off, sender=EFFECT)
        held.callback(after_task_publish.disconnect, cut_off, sender=EFFECT)
        shop.insert("key", 1, 2, 3)
        wait_for(lambda: len(published) == 3 and shop.pending() == 0, message="removed, on this primary")
        held.close()
        assert shop.pending() == 3
        ids = [entry["id"] for entry in shop.items.find_one({"_id": "key"})[FIELD]["events"]]  # type: ignore[index]
        assert ids == published

        shop.sweep_all()
        wait_for(lambda: len(tap.published) == 6, message="the second time")
        assert tap.published == [("key", n) for n in (1, 2, 3)] * 2


def test_nothing_is_published_of_a_write_that_an_election_takes_back(
    shop: Shop, elections: Elections, three_members: MongoReplicaSet, make_client: MakeClient, redis_url: str
) -> None:
    """Its writer waits for a majority, and so does a relay that takes it once the writer's claim has lapsed."""
    ours = make_client(three_members.url, retryWrites=False)
    outbox = Outbox(configured(redis_url), ours[shop.data.name]["items"], database=shop.state.name, **OPTIONS)
    with Tap(redis_url) as tap, ThreadPoolExecutor(2) as pool:
        shop.insert("there", 1)
        shop.sweep_all()
        wait_for(lambda: tap.first() == {"there": [1]})
        assert outbox.runtime.relay.deliver("there").left == 0, "and the index is known to be there"
        with elections.held_back() as primary, MongoClient[Document](primary.url) as direct:
            items = direct[shop.data.name]["items"]
            tasks = [shop.effect("lost", 1)]
            writing = pool.submit(outbox.insert_one, {"_id": "lost", "ns": [1]}, tasks=tasks)
            lapsed = wait_for(
                lambda: items.find_one({"_id": "lost", "$expr": FREE}), message="the writer's claim lapsed"
            )
            relaying = pool.submit(outbox.runtime.relay.deliver, "lost")
            wait_for(lambda: _owner(items) != lapsed[FIELD]["claim"]["owner"], message="a relay's claim")
            assert not writing.done()
            assert "lost" not in tap.first()
        with pytest.raises(ConnectionFailure):
            writing.result(30)
        with suppress(ConnectionFailure):  # or its time was up before
            assert relaying.result(30).dispatched == 0

        shop.insert("after", 1)
        shop.sweep_all()
        wait_for(lambda: "after" in tap.first())
        assert tap.first() == shop.committed() == {"there": [1], "after": [1]}
    outbox.runtime.publisher.close()


def _owner(items: Collection[Document]) -> Any:
    document = items.find_one({"_id": "lost"})
    assert document is not None
    return document[FIELD]["claim"]["owner"]


def test_locked_transactions_bear_elections_that_take_commits_back(
    client: MongoClient[Document], elections: Elections
) -> None:
    """A commit whose reply is lost is asked for again; if it was taken back, the body runs again."""
    data = client["elections"]
    data["counters"].insert_one({"_id": 1, "n": 0})
    data.create_collection("ledger")
    stop = threading.Event()

    @transactional(client)
    def count(name: str, *, session: ClientSession) -> None:
        found = select_for_update(data["counters"], {"_id": 1}, session=session)
        data["ledger"].insert_one({"_id": name, "n": found["n"]}, session=session)
        data["counters"].update_one({"_id": 1}, {"$set": {"n": found["n"] + 1}}, session=session)

    def work(name: str) -> int:
        number = 0
        while not stop.is_set():
            count(f"{name}.{number}")
            number += 1
        return number

    with ThreadPoolExecutor(3) as pool:
        counted = [pool.submit(work, name) for name in "abc"]
        try:
            for more in (1, 2):
                wait_for(lambda more=more: data["ledger"].count_documents({}) > 20 * more)  # type: ignore[misc]
                elections.under_load("elections")
        finally:
            stop.set()
        total = sum(each.result(60) for each in counted)

    assert [each["n"] for each in data["ledger"].find().sort("n", 1)] == list(range(total))
    assert data["counters"].count_documents({"_id": 1, "n": total}) == 1
