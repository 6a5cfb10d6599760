"""A state of an older schema is brought up to date by the steps that belong to it; a newer one is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.database import Database

from mongo_celery.bridge.state.leases import Leases
from mongo_celery.bridge.state.schema import SCHEMA, check_schema, migrate
from mongo_celery.errors import DeploymentError

Document = dict[str, Any]
FIXTURE = Path(__file__).parents[1] / "fixtures/state_of_an_older_schema.json"
OLDER = SCHEMA - 1


@pytest.fixture
def state(mongo_client: MongoClient[Document], state_database: str) -> Database[Document]:
    """Give a state as an older version would have left it."""
    database = mongo_client[state_database]
    for name, documents in json_util.loads(FIXTURE.read_text()).items():
        database[name].insert_many(documents)
    database["leases"].update_one({}, {"$set": {"schemaVersion": OLDER}})
    return database


def rename_numbers(state: Database[Document], bridge: str, session: ClientSession) -> None:
    """A step from the version before: one word for the number of a term."""
    state["leases"].update_one({"_id": bridge}, {"$rename": {"version": "term"}}, session=session)
    state["partitions"].update_many({"bridge": bridge}, {"$rename": {"epoch": "term"}}, session=session)


def test_an_older_state_is_brought_up_to_date_once(state: Database[Document]) -> None:
    """And then it can be read and led."""
    leases = Leases(state["leases"], "shop", 10.0)
    with pytest.raises(DeploymentError):
        leases.read()
    with pytest.raises(DeploymentError, match="Stop the older listener"):
        check_schema(state["leases"].find_one({"_id": "shop"}) or {}, {OLDER: rename_numbers})
    calls: list[int] = []

    def step(*given: Any) -> None:
        calls.append(1)
        rename_numbers(*given)

    for _ in range(2):
        migrate(state, "shop", {OLDER: step})

    assert calls == [1]
    assert (leases.read() or {})["schemaVersion"] == SCHEMA
    assert [each["term"] for each in state["partitions"].find({"bridge": "shop"})] == [7, 7]
    assert [each.get("epoch") for each in state["partitions"].find({"bridge": "other"})] == [3], "of another bridge"
    term = leases.acquire({"app": "shop"})
    assert term is not None
    assert term.number > 7


@pytest.mark.parametrize(
    "lease",
    [
        [{"$set": {"expiresAt": {"$add": ["$$NOW", 3_600_000]}}}],
        [{"$set": {"schemaVersion": SCHEMA + 1}}],
        [{"$unset": "schemaVersion"}],
    ],
    ids=["another listener leads", "newer", "unknown"],
)
def test_a_state_that_is_not_for_its_steps_stays_as_it_is(state: Database[Document], lease: Any) -> None:
    """P9: nothing is changed."""
    state["leases"].update_one({"_id": "shop"}, lease)
    before = _all(state)
    migrate(state, "shop", {OLDER: rename_numbers})
    assert _all(state) == before


def test_a_step_that_fails_has_changed_nothing(state: Database[Document]) -> None:
    """It is taken again by the next listener."""

    def fail(given: Database[Document], bridge: str, session: ClientSession) -> None:
        rename_numbers(given, bridge, session)
        raise KeyError("partition")

    before = _all(state)
    with pytest.raises(KeyError):
        migrate(state, "shop", {OLDER: fail})
    assert _all(state) == before


def _all(state: Database[Document]) -> dict[str, list[Document]]:
    return {name: list(state[name].find(sort=[("_id", 1)])) for name in ("leases", "partitions")}
