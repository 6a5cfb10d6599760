"""What `celery -A app transactions` says where MongoDB refuses it."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.acceptance.test_cli import NOWHERE, Done, one_sentence, run
from tests.fixtures.rights import UrlOf, with_a_wrong_password

APP = "tests.acceptance.transactions_cli_project"
NAMES = f"transactions_cli_{uuid4().hex[:10]}"


def transactions(mongo_url: str, *arguments: str) -> Done:
    return run("-A", APP, "transactions", *arguments, environment={"PROJECT_MONGO": mongo_url, "PROJECT_NAMES": NAMES})


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
