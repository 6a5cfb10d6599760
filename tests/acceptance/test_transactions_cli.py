"""`celery -A app transactions`: what it removes, and what it says where MongoDB refuses it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pymongo.database import Database

from tests.acceptance.test_cli import NOWHERE, Done, one_sentence, run
from tests.fixtures.rights import UrlOf, with_a_wrong_password

APP = "tests.acceptance.transactions_cli_project"
NAMES = f"transactions_cli_{uuid4().hex[:10]}"


def transactions(mongo_url: str, *arguments: str, names: str = NAMES, text: str = "") -> Done:
    environment = {"PROJECT_MONGO": mongo_url, "PROJECT_NAMES": names}
    return run("-A", APP, "transactions", *arguments, environment=environment, text=text)


@pytest.mark.parametrize("command", [["list"], ["show", "1"], ["recover"], ["cancel", "1", "--yes"]], ids=" ".join)
def test_a_missing_right_names_the_transactions_and_the_cure(guarded_url: UrlOf, command: list[str]) -> None:
    """Not the bridge's state, which this app does not have."""
    done = transactions(guarded_url("bridge"), *command)
    one_sentence(done, "lacks a right", f"{NAMES}.transfers", "grant find")
    assert "state database" not in done.stderr


def test_a_refused_login_is_no_missing_right(guarded_url: UrlOf) -> None:
    """The cure is in the URL."""
    one_sentence(transactions(with_a_wrong_password(guarded_url("bridge")), "list"), "refused the login", "authSource")


def test_a_server_that_is_away_is_told_with_its_address() -> None:
    """In the driver's words, without the password."""
    done = transactions(f"mongodb://hush:secret@{NOWHERE}/?serverSelectionTimeoutMS=500", "list")
    one_sentence(done, "no answer", NOWHERE)
    assert "secret" not in done.stderr


def test_what_is_final_is_removed_once_somebody_says_yes(database: Database[dict[str, Any]], mongo_url: str) -> None:
    """And not by a trial; what recovery would take is listed by one, too."""
    stored = {"source": "A", "destination": "B", "value": 1, "lastModified": datetime(2020, 1, 1, tzinfo=UTC)}
    collection = database["transfers"]
    collection.insert_many(
        [{"_id": state, "state": state, **stored} for state in ("done", "canceled", "pending", "initial")]
    )

    def typed(*arguments: str, text: str = "") -> Done:
        return transactions(mongo_url, *arguments, names=database.name, text=text)

    listed = typed("list", "--state", "initial")
    assert "nobody has begun it" in listed.stdout
    tried = typed("purge", "--older-than", "3600", "--dry-run", "--json")
    found = json.loads(tried.stdout)
    assert [found[name] for name in ("done", "canceled", "initial", "kept", "dry_run")] == [1, 1, 1, 0, True]
    refused = typed("purge", "--older-than", "3600", text="n\n")
    assert refused.returncode == 1
    assert "Would remove 1 transaction done, 1 canceled, 1 never begun.\n" in refused.stderr
    one_sentence(typed("purge", "--older-than", "5", "--yes"), "less than the deadline of 600 s")
    [found] = json.loads(typed("recover", "--dry-run", "--json").stdout)["transactions"]
    assert found["_id"] == "pending"
    assert collection.count_documents({}) == 4

    removed = typed("purge", "--older-than", "3600", "--yes")
    assert removed.stdout == "Removed 1 transaction done, 1 canceled, 1 never begun.\n"
    assert [each["_id"] for each in collection.find()] == ["pending"]
