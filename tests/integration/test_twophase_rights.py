"""The rights of two-phase commit, on a server with access control: the table of `docs/security.md`, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import AccessError, MongoCeleryError, TransactionCanceledError, TransactionStateError
from mongo_celery.twophase.twophase import get_recoveries
from tests.fixtures.rights import UrlOf
from tests.integration.twophase_rig import LONG_AGO, Document, advance

PAGE = Path(__file__).parents[2] / "docs/security.md"
START = 1000

LOG, NOTES = "transactions", "transactionRecoveries"
PLACES = {
    "the transactions' collection": (("own", LOG),),
    "the participants' collections": (("own", "accounts"), ("east", "accounts")),
    "`transactionRecoveries` beside the transactions": (("own", NOTES),),
}
"""What the first column of the table means here: `east` is another cluster by its alias, and another database."""


@dataclass(frozen=True)
class Right:
    cluster: str
    collection: str
    action: str
    is_optional: bool

    def __str__(self) -> str:
        return f"{self.cluster}.{self.collection}-{self.action}"


def of_the_page() -> Iterator[Right]:
    section = PAGE.read_text(encoding="utf-8").partition("Two-phase commit needs these rights")[2]
    table = section.partition("\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| `([\w, ]+)` \| (.+?) \|$", table, re.MULTILINE)
    assert len(rows) == len(PLACES) + 1  # the transactions' collection has an optional right, too
    for place, actions, purpose in rows:
        for cluster, collection in PLACES[place]:
            for action in actions.split(", "):
                yield Right(cluster, collection, action, purpose.startswith("optional"))


RIGHTS = list(of_the_page())
NEEDED = [each for each in RIGHTS if not each.is_optional]


class Guarded:
    """A coordinator whose user has the rights that it is given, and somebody who may do everything."""

    def __init__(self, url_of: UrlOf) -> None:
        self._name = f"r{uuid4().hex[:10]}"
        self._root = MongoClient[Document](url_of("admin"))
        self._mine: list[MongoClient[Document]] = []
        self._root.admin.command("createRole", self._name, privileges=[], roles=[])
        self._root.admin.command("createUser", self._name, pwd=self._name, roles=[self._name])
        self._url = url_of(self._name)
        for cluster in ("own", "east"):
            accounts = [{"_id": name, "balance": START} for name in ("A", "B")]
            self._database(self._root, cluster)["accounts"].insert_many(accounts)

    def _database(self, client: MongoClient[Document], cluster: str) -> Any:
        return client[f"{self._name}_{cluster}"]

    @property
    def log(self) -> Any:
        return self._database(self._root, "own")[LOG]

    def balances(self) -> dict[str, list[int]]:
        return {
            cluster: [each["balance"] for each in self._database(self._root, cluster)["accounts"].find().sort("_id")]
            for cluster in ("own", "east")
        }

    def allow(self, *without: Right, optional: bool = False) -> TwoPhaseCommit:
        """With all rights that are needed, and the optional ones if they are asked for, but for some."""
        given = [each for each in RIGHTS if each not in without and (optional or not each.is_optional)]
        resources = [{"db": f"{self._name}_{each.cluster}", "collection": each.collection} for each in given]
        privileges = [
            {"resource": resource, "actions": [each.action]} for resource, each in zip(resources, given, strict=True)
        ]
        self._root.admin.command("updateRole", self._name, privileges=privileges)
        own, east = MongoClient[Document](self._url), MongoClient[Document](self._url)
        self._mine += [own, east]
        self._east = east
        log = self._database(own, "own")[LOG]
        return TwoPhaseCommit(None, log, application="bank", clients={"east": east}, timeout=20)

    def across(self, bank: TwoPhaseCommit, value: int, *, receives: Document | None = None, **options: Any) -> Any:
        paying, paid = {"$inc": {"balance": -value}}, {"$inc": {"balance": value}}
        east = self._database(self._east, "east")["accounts"]
        parts = [
            Participant(bank.transactions.database["accounts"], "A", paying, require={"balance": {"$gte": value}}),
            Participant(east, "A", paid, require=receives or {}),
        ]
        return bank.begin(parts, **options)

    def overdue(self) -> None:
        self.log.update_many({"state": "pending"}, {"$set": {"deadline": LONG_AGO, "lastModified": LONG_AGO}})

    def close(self) -> None:
        for client in self._mine:
            client.close()
        for cluster in ("own", "east"):
            self._root.drop_database(f"{self._name}_{cluster}")
        self._root.admin.command("dropUser", self._name)
        self._root.admin.command("dropRole", self._name)
        self._root.close()


@pytest.fixture
def guarded(guarded_url: UrlOf) -> Iterator[Guarded]:
    made = Guarded(guarded_url)
    yield made
    made.close()


def work(guarded: Guarded, bank: TwoPhaseCommit) -> None:
    inside = bank.transfer("A", "B", 100)
    bank.compensate(inside)
    with pytest.raises(TransactionCanceledError):
        bank.transfer("A", "B", 10 * START)
    with pytest.raises(TransactionCanceledError):
        guarded.across(bank, 100, run=True, receives={"balance": {"$lt": 0}})
    outside = guarded.across(bank, 100, run=True)
    bank.compensate(outside)
    for state in ("pending", "canceled"):  # its deadline has passed, then somebody cancels
        stored = guarded.across(bank, 100)
        assert advance(bank, stored).state == "pending"
        if state == "canceled":
            assert bank.cancel(stored).state == state
            continue
        guarded.overdue()
        assert [(each.after, each.error) for each in bank.recover()] == [("canceled", None)]
    assert guarded.balances() == {"own": [START, START], "east": [START, START]}


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(each, "event", "") for each in caplog.records}


def test_the_rights_that_are_needed_suffice_and_say_what_else_is_missing(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    bank = guarded.allow()
    work(guarded, bank)
    assert events(caplog) >= {"index_refused", "recovery_unnoted"}

    caplog.clear()
    bank = guarded.allow(optional=True)
    work(guarded, bank)
    assert not events(caplog) & {"index_refused", "recovery_unnoted"}
    assert get_recoveries(bank).last() is not None


@pytest.mark.slow
@pytest.mark.parametrize("missing", RIGHTS, ids=str)
def test_no_right_in_the_table_is_too_much_and_no_optional_one_is_needed(guarded: Guarded, missing: Right) -> None:
    """Something fails without any other one of them, and says that it is a right."""
    bank = guarded.allow(missing, optional=True)
    if missing.is_optional:
        work(guarded, bank)
    else:
        with pytest.raises((MongoCeleryError, OperationFailure, AssertionError), match=r"right|not authorized"):
            work(guarded, bank)


def test_what_may_not_be_written_gives_the_money_back_once_its_deadline_has_passed(guarded: Guarded) -> None:
    """A right that was taken away in the middle. What cannot be written cannot be undone: it stays canceling there."""
    untouched = {"own": [START, START], "east": [START, START]}
    changes = [each for each in NEEDED if (each.cluster, each.collection) == ("east", "accounts")]
    bank = guarded.allow()
    identity = guarded.across(bank, 100)
    advance(bank, identity)
    bank = guarded.allow(*[each for each in changes if each.action == "update"])
    with pytest.raises(TransactionStateError):
        bank.run(identity)
    assert guarded.balances() == {**untouched, "own": [START - 100, START]}
    guarded.overdue()
    (became,) = bank.recover()
    assert (became.after, became.stopped) == ("canceling", True)
    assert guarded.balances() == untouched
    assert [each.after for each in guarded.allow().recover(0)] == ["canceled"]
    assert guarded.balances() == untouched


def test_without_a_right_nothing_is_begun(guarded: Guarded) -> None:
    bank = guarded.allow(*[each for each in NEEDED if (each.cluster, each.collection) == ("east", "accounts")])
    with pytest.raises(AccessError):
        guarded.across(bank, 100, run=True)
    assert {each["state"] for each in guarded.log.find()} == {"initial"}
