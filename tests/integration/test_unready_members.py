"""A member of a set that is neither primary nor secondary, as one is for a moment behind a start or an election."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import ConfigurationError, PyMongoError

from mongo_celery import Bridge, Change, transactional
from mongo_celery.bridge.worker.attribution import conflict_cause, infrastructure_cause
from mongo_celery.embedded.mongodb import MongoServer
from mongo_celery.mongo.opening import open_session
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for

Document = dict[str, Any]


@pytest.fixture(scope="module")
def recovering() -> Iterator[MongoServer]:
    """Give a member that is no member of a set yet; `end_recovery` makes it a primary."""
    with MongoServer(replica_set="shop") as server:
        yield server


def end_recovery(server: MongoServer) -> None:
    with MongoClient[Document](server.url) as client:
        members = [{"_id": 0, "host": server.address}]
        client.admin.command("replSetInitiate", {"_id": "shop", "members": members})
        wait_for(lambda: client.admin.command("hello")["isWritablePrimary"], message="a primary")


def test_connections_of_a_member_that_recovered_are_made_anew(recovering: MongoServer) -> None:
    """
    Keep the promise that a fault that has ended leaves nothing blocked, with direct connections.

    PyMongo asks such a member once for each connection: those that were opened before refuse sessions permanently.
    """
    app = Celery("shop", broker="memory://")
    bridge, handled = Bridge(app, recovering.url, name="shop"), list[bool]()

    @bridge.on_change("shop.orders", transactional=True)
    def handle(change: Change) -> None:
        handled.append(change.session is not None)

    with (
        MongoClient[Document](recovering.url) as reading,
        MongoClient[Document](recovering.url) as writing,
        MongoClient[Document](recovering.url) as block,
        asyncio.Runner() as loop,
    ):
        slow = AsyncMongoClient[Document](recovering.url)
        for client in (reading, writing, block):
            client.admin.command("ping")
        with bridge.wiring.elsewhere(recovering.url, lambda _options, handler: handler):
            bridge.client.admin.command("ping")  # it has a client of its own for each cluster
        loop.run(slow.admin.command("ping"))

        end_recovery(recovering)

        with pytest.raises(ConfigurationError) as caught, open_session(reading) as session:
            reading.shop.orders.find_one(session=session)
        # PyMongo calls it a mistake of the configuration. It is an outage, and counted against nobody.
        assert infrastructure_cause(caught.value)
        assert not conflict_cause(caught.value)
        assert is_transient(caught.value)
        with open_session(reading) as session:
            assert reading.shop.orders.find_one(session=session) is None
        with pytest.raises(PyMongoError), transactional(block) as session:
            block.shop.counts.insert_one({}, session=session)
        with transactional(block) as session:
            block.shop.counts.insert_one({}, session=session)
        transactional(writing).run(lambda session: writing.shop.counts.insert_one({}, session=session))
        loop.run(transactional(slow).arun(lambda session: slow.shop.counts.insert_one({}, session=session)))
        assert reading.shop.counts.count_documents({}) == 3
        with BridgeRunner(bridge, url=recovering.url) as runner:
            reading.shop.orders.insert_one({"_id": 1})
            runner.deliver()
        assert handled[-1:] == [True]
        loop.run(slow.close())


def test_other_mistakes_of_a_configuration_are_the_callers_own() -> None:
    with pytest.raises(ConfigurationError) as caught:
        MongoClient("mongodb://127.0.0.1:1/?compressors=zlib&retryWrites=true&authMechanism=MONGODB-OIDC")

    assert not infrastructure_cause(caught.value)
    assert not is_transient(caught.value)
