"""Fixtures of the integration rung."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.uri_parser import parse_uri

from mongo_celery import Bridge
from mongo_celery.bridge.listener import chunks
from mongo_celery.bridge.stream import cursor, reader
from tests.fixtures.proxy import Proxy
from tests.integration.locking_rig import NOTES_APP
from tests.rig.commands import CommandRecorder
from tests.rig.fenced import Document, MakeClient
from tests.rig.led import NAME, LedBridge, stored_change
from tests.rig.snapshots import SnapshotWorld, worlds

_AWAIT_SECONDS = 0.1
MakeBridge = Callable[..., Bridge]


@pytest.fixture(autouse=True)
def prompt_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that have nothing say so ten times a second, not once: a reader that stops waits for that."""
    for module in (cursor, reader):
        monkeypatch.setattr(module, "AWAIT_SECONDS", _AWAIT_SECONDS)


@pytest.fixture(autouse=True)
def patient_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the relay of an outbox wait for MongoDB if a busy machine stalls for some seconds."""
    monkeypatch.setattr("mongo_celery.outbox.commands.COMMAND_SECONDS", 60.0)


@pytest.fixture
def target(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("summaries")


@pytest.fixture
def spied(make_client: MakeClient, target: Collection[Document]) -> tuple[Collection[Document], CommandRecorder]:
    commands = CommandRecorder()
    client = make_client(event_listeners=[commands])
    return client[target.database.name][target.name], commands


@pytest.fixture
def sent() -> CommandRecorder:
    """Give what the client of `notes` has sent."""
    return CommandRecorder()


@pytest.fixture
def notes(database: Database[Document], make_client: MakeClient, sent: CommandRecorder) -> Collection[Document]:
    """Give an empty collection, for transactions."""
    database.create_collection("notes")
    return make_client(appName=NOTES_APP, event_listeners=[sent])[database.name]["notes"]


@pytest.fixture
def client(notes: Collection[Document]) -> MongoClient[Document]:
    """Give its client."""
    return notes.database.client


@pytest.fixture
def proxy(mongo_url: str, make_proxy: Callable[[int], Proxy]) -> Proxy:
    """Give a proxy before the session's server."""
    return make_proxy(parse_uri(mongo_url)["nodelist"][0][1])


@pytest.fixture
def make_bridge(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[MakeBridge]:
    """Give a function that makes a bridge with one handler, on the session's set by default. No worker runs."""
    made: list[Bridge] = []

    def make(
        url: str | None = None, *, source: str | None = None, handler: str = "summarise", **options: Any
    ) -> Bridge:
        app = Celery("operations", broker="memory://", set_as_current=False)
        given = {"name": NAME, "database": state_database, "partitions": 3, "autodiscover": False, **options}
        bridge = Bridge(app, url or mongo_url, **given)
        bridge.on_change(source or f"{database.name}.orders", name=handler)(_handle)
        app.finalize()
        made.append(bridge)
        return bridge

    yield make
    for bridge in made:
        bridge.client.close()


def _handle(change: object) -> None:
    del change


@pytest.fixture
def led(make_bridge: MakeBridge) -> LedBridge:
    """Give a bridge that is led."""
    return LedBridge(make_bridge())


@pytest.fixture
def storing(led: LedBridge) -> LedBridge:
    """Give a bridge whose first partition has three stored changes."""
    led.store_changes(*(stored_change(number, fullDocument={"_id": number, "note": "n" * 500}) for number in (1, 2, 3)))
    return led


@pytest.fixture
def world(
    mongo_client: MongoClient[Document],
    mongo_url: str,
    state_database: str,
    database: Database[Document],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SnapshotWorld]:
    """Give a world whose snapshots have chunks of four documents."""
    for name in ("ROWS", "LEAST_ROWS", "MOST_ROWS"):
        monkeypatch.setattr(chunks, name, 4)
    yield from worlds(mongo_client, mongo_url, state_database, database.name)
