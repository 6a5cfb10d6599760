"""Fixtures of the integration rung."""

from __future__ import annotations

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.stream import cursor, reader
from tests.integration.fenced_rig import Commands, Document, MakeClient

_AWAIT_SECONDS = 0.1


@pytest.fixture(autouse=True)
def prompt_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that have nothing say so ten times a second, not once: a reader that stops waits for that."""
    for module in (cursor, reader):
        monkeypatch.setattr(module, "AWAIT_SECONDS", _AWAIT_SECONDS)


@pytest.fixture
def target(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("summaries")


@pytest.fixture
def spied(make_client: MakeClient, target: Collection[Document]) -> tuple[Collection[Document], Commands]:
    commands = Commands(target.database.client)
    client = make_client(event_listeners=[commands])
    return client[target.database.name][target.name], commands
