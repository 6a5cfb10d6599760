"""`celery -A app transactions`: what it lists, and what it says where MongoDB refuses it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from pymongo.database import Database

from tests.acceptance.test_cli import APP, NOWHERE, one_sentence
from tests.fixtures.forked import run_celery
from tests.fixtures.rights import UrlOf, with_a_wrong_password
from tests.rig.project import Done

NAMES = f"transactions_cli_{uuid4().hex[:10]}"


def transactions(mongo_url: str, *arguments: str, names: str = NAMES, text: str = "") -> Done:
    environment = {"PROJECT_MONGO": mongo_url, "PROJECT_NAMES": names, "PROJECT_BROKER": "memory://"}
    return run_celery("-A", APP, "transactions", *arguments, environment=environment, text=text)


@pytest.mark.parametrize("command", [["list"], ["list", "1"], ["recover"], ["cancel", "1", "--yes"]], ids=" ".join)
def test_a_missing_right_names_the_transactions_and_the_cure(guarded_url: UrlOf, command: list[str]) -> None:
    """Not the bridge's state."""
    done = transactions(guarded_url("bridge"), *command)
    one_sentence(done, f"{NAMES}_data.transfers", "find")


def test_a_refused_login_is_no_missing_right(guarded_url: UrlOf) -> None:
    """The cure is in the URL."""
    one_sentence(transactions(with_a_wrong_password(guarded_url("bridge")), "list"), "authSource")


def test_a_server_that_is_away_is_told_with_its_address() -> None:
    """In the driver's words, without the password."""
    done = transactions(f"mongodb://hush:secret@{NOWHERE}/?serverSelectionTimeoutMS=500", "list")
    one_sentence(done, NOWHERE)
    assert "secret" not in done.stderr


def test_what_recovery_would_take_is_listed_by_a_trial(database: Database[dict[str, Any]], mongo_url: str) -> None:
    """The trial changes nothing, and the list shows each unfinished transaction."""
    stored = {"source": "A", "destination": "B", "value": 1, "lastModified": datetime.now(UTC) - timedelta(hours=1)}
    collection = database.client[f"{database.name}_data"]["transfers"]
    collection.insert_many(
        [{"_id": state, "state": state, **stored} for state in ("done", "canceled", "pending", "initial")]
    )

    def typed(*arguments: str) -> Done:
        return transactions(mongo_url, *arguments, names=database.name)

    listed_ids = {json.loads(each)["_id"] for each in typed("list", "--json").stdout.splitlines()}
    assert listed_ids == {"initial", "pending"}
    [found] = json.loads(typed("recover", "--dry-run", "--json").stdout)["transactions"]
    assert found["_id"] == "pending"
    assert sorted(each["state"] for each in collection.find()) == ["canceled", "done", "initial", "pending"]
    database.client.drop_database(collection.database)
