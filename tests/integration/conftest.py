"""Fixtures of the integration rung."""

from __future__ import annotations

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from tests.integration.fenced_rig import Commands, Document, MakeClient


@pytest.fixture
def target(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("summaries")


@pytest.fixture
def spied(make_client: MakeClient, target: Collection[Document]) -> tuple[Collection[Document], Commands]:
    commands = Commands(target.database.client)
    client = make_client(event_listeners=[commands])
    return client[target.database.name][target.name], commands
