"""A `mongodb+srv://` URL while its name server does not answer: an outage like any other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import dns.asyncresolver
import dns.rcode
import pytest
from celery import Celery
from pymongo import AsyncMongoClient, MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from mongo_celery import Bridge, Change
from mongo_celery.bridge.event_loop import EVENT_LOOP
from mongo_celery.bridge.stream.verdicts import judge_stream_error
from mongo_celery.bridge.worker.attribution import infrastructure_cause
from mongo_celery.errors import ConfigurationError, ServerUnavailableError
from mongo_celery.mongo.driver_internals import replace_connections
from mongo_celery.mongo.verdicts import Verdict, is_transient
from mongo_celery.testing import BridgeRunner
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.name_server import DOMAIN, NameServer
from tests.fixtures.process import wait_for
from tests.rig.listener import listening

Document = dict[str, Any]
APP = "named"


def bridge_on(url: str, database: Database[Document]) -> Bridge:
    app = Celery("shop", broker="memory://", set_as_current=False)
    bridge = Bridge(app, f"{url}&appName={APP}", name="shop", database=f"{database.name}_state", autodiscover=False)

    @bridge.on_change(f"{database.name}.orders")
    def handle(_: Change) -> None: ...

    app.finalize()
    return bridge


@pytest.fixture
def state(database: Database[Document]) -> Any:
    """Give the state of the bridge of this test."""
    yield (found := database.client[f"{database.name}_state"])
    database.client.drop_database(found)


def test_a_listener_waits_for_the_name_server_at_its_start_and_at_each_new_stream(
    srv_url: str,
    name_server: NameServer,
    database: Database[Document],
    state: Database[Document],
    failpoint: Failpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P15, P17: the reader opens a client for each stream, which asks the name server again."""
    bridge = bridge_on(srv_url, database)

    def logged(event: str) -> bool:
        return event in [vars(each).get("event") for each in caplog.records]

    def sent() -> int:
        with bridge.app.connection() as connection:
            channel: Any = connection.default_channel
            return sum(channel._size(queue) for queue in bridge.wiring.queue_names)

    name_server.rcode = dns.rcode.SERVFAIL
    with listening(bridge):
        wait_for(lambda: logged("server_awaited"))
        name_server.rcode = dns.rcode.NOERROR
        wait_for(lambda: (state["leases"].find_one() or {}).get("listenerId"))
        database["orders"].insert_one({"_id": 1})
        wait_for(sent)
        name_server.rcode = dns.rcode.SERVFAIL
        with failpoint(failCommands=["getMore"], appName=APP, closeConnection=True, mode={"times": 1}):
            wait_for(lambda: "ConfigurationError" in [vars(each).get("error") for each in caplog.records])
        name_server.rcode = dns.rcode.NOERROR
        term = (state["leases"].find_one() or {})["term"]
        database["orders"].insert_many([{"_id": number} for number in range(2, 22)])
        wait_for(lambda: sent() > 1)
        assert (state["leases"].find_one() or {})["term"] == term
    bridge.client.close()


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN, dns.rcode.REFUSED])
def test_an_error_of_the_name_server_is_an_outage(
    rcode: dns.rcode.Rcode, srv_url: str, name_server: NameServer, database: Database[Document]
) -> None:
    """P9, P14: for handlers, streams, states and commands alike."""
    bridge = bridge_on(srv_url, database)
    name_server.rcode = rcode
    with pytest.raises(PyMongoError) as caught:
        MongoClient(srv_url)
    with pytest.raises(PyMongoError) as awaited:
        EVENT_LOOP.get().run(lambda: bridge.async_client.admin.command("ping"))
    for error in (caught.value, awaited.value):
        assert is_transient(error)
        assert infrastructure_cause(error)
        assert {judge_stream_error(error, opening=opening) for opening in (True, False)} == {Verdict.TRANSIENT}
    with pytest.raises(ServerUnavailableError):
        bridge.wiring.reach()
    name_server.rcode = dns.rcode.NOERROR
    with closing(bridge.wiring.reach()):
        assert not EVENT_LOOP.get().run(lambda: _end(bridge))


async def _end(bridge: Bridge) -> None:
    await bridge.async_client.admin.command("ping")
    await bridge.async_client.close()


@pytest.mark.parametrize("url", ["mongodb+srv://127.0.0.1/", f"mongodb+srv://{DOMAIN}:27017/", "mongodb+srv://a..b.c/"])
def test_a_wrong_url_is_refused(url: str, name_server: NameServer, database: Database[Document]) -> None:
    """P9: no name server can correct it."""
    del name_server
    bridge = bridge_on(f"{url}?tls=false", database)
    with pytest.raises(ConfigurationError):
        bridge.wiring.reach()


def test_a_transactional_coroutine_runs_with_the_first_use_of_its_client(
    srv_url: str, name_server: NameServer, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """P1, P14: PyMongo asks the name server when an asyncio client is first used. Until then the change waits."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    bridge = Bridge(app, f"{srv_url}&appName={APP}", name="shop", autodiscover=False)

    @bridge.on_change(f"{database.name}.orders", transactional=True)
    async def together(change: Change) -> None:
        copies = bridge.async_client[database.name]["copies"]
        await copies.insert_one({"_id": change.document_key["_id"]}, session=change.session)

    def has_failed() -> bool:
        return "claim_failed" in [vars(each).get("event") for each in caplog.records]

    resolver = dns.asyncresolver.get_default_resolver()
    resolver.port = 1  # nothing answers there

    def repair() -> None:
        wait_for(has_failed)
        resolver.port = name_server.port

    with BridgeRunner(bridge) as runner, ThreadPoolExecutor(1) as threads:
        database["orders"].insert_one({"_id": 1})
        repaired = threads.submit(repair)
        runner.deliver()
        repaired.result()
    assert database["copies"].find_one() == {"_id": 1}
    EVENT_LOOP.get().run(bridge.async_client.close)


def test_connections_of_an_unresolved_client_are_not_replaced(srv_url: str) -> None:
    """P17: whoever renews connections has no other error to handle."""

    async def replace() -> None:
        replace_connections(AsyncMongoClient(srv_url))

    EVENT_LOOP.get().run(replace)
