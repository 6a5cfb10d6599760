"""The rights of two-phase commit, on a server with access control: the table of `docs/production.md`, row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import AccessError, MongoCeleryError, TransactionCanceledError, TransactionStateError
from tests.fixtures.rights import PASSWORD, UrlOf

Document = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs/production.md"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
START = 1000

LOG, RECEIPTS, NOTES = "transactions", "transactionReceipts", "transactionRecoveries"
PLACES = {
    "the transactions' collection": (("own", LOG),),
    "the participants' collections": (("own", "accounts"), ("east", "accounts")),
    "`transactionReceipts` in each remote cluster, in the database of its first participant": (("east", RECEIPTS),),
    "`transactionRecoveries` beside the transactions": (("own", NOTES),),
    "the transactions' collection, and `transactionReceipts`": (("own", LOG), ("east", RECEIPTS)),
}
"""What the first column of the table means here: `east` is another cluster by its alias, and another database."""


@dataclass(frozen=True)
class Right:
    """One action on one collection."""

    cluster: str
    collection: str
    action: str
    is_optional: bool

    def __str__(self) -> str:
        return f"{self.cluster}.{self.collection}-{self.action}"


def of_the_page() -> Iterator[Right]:
    table = PAGE.read_text(encoding="utf-8").partition("Two-phase commit needs rights of its own")[2]
    rows = re.findall(r"^\| (.+?) \| `([\w, ]+)` \| (.+?) \|$", table.partition("\n\nProved")[0], re.MULTILINE)
    assert len(rows) == len(PLACES) + 1
    for place, actions, purpose in rows:
        for cluster, collection in PLACES[place]:
            for action in actions.split(", "):
                yield Right(cluster, collection, action, purpose.startswith("optional"))


RIGHTS = list(of_the_page())
NEEDED = [each for each in RIGHTS if not each.is_optional]
OPTIONAL = [each for each in RIGHTS if each.is_optional]


class Guarded:
    """A coordinator whose user has the rights that it is given, and somebody who may do everything."""

    def __init__(self, url_of: UrlOf) -> None:
        self._name = f"r{uuid4().hex[:10]}"
        self._root = MongoClient[Document](url_of("admin"))
        self._mine: list[MongoClient[Document]] = []
        self._root.admin.command("createRole", self._name, privileges=[], roles=[])
        self._root.admin.command("createUser", self._name, pwd=PASSWORD, roles=[self._name])
        self._url = url_of(self._name)
        for cluster in ("own", "east"):
            accounts = [{"_id": name, "balance": START} for name in ("A", "B")]
            self._database(self._root, cluster)["accounts"].insert_many(accounts)
            # Before anything is done: else it would be made by whoever comes first, in a transaction or not.
            self._database(self._root, cluster).create_collection(RECEIPTS)

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
        privileges = [
            {
                "resource": {"db": f"{self._name}_{each.cluster}", "collection": each.collection},
                "actions": [each.action],
            }
            for each in given
        ]
        self._root.admin.command("updateRole", self._name, privileges=privileges)
        own, east = MongoClient[Document](self._url), MongoClient[Document](self._url)
        self._mine += [own, east]
        self._east = east
        return TwoPhaseCommit(
            None, self._database(own, "own")[LOG], application="bank", clients={"east": east}, timeout=20
        )

    def across(self, bank: TwoPhaseCommit, value: int, *, receives: Document | None = None, **options: Any) -> Any:
        paying, paid = {"$inc": {"balance": -value}}, {"$inc": {"balance": value}}
        east = self._database(self._east, "east")["accounts"]
        parts = [
            Participant(bank.accounts, "A", paying, require={"balance": {"$gte": value}}),
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
    """All that a coordinator does, forward, backward and by recovery; nothing is moved in the end."""
    inside = bank.transfer("A", "B", 100)
    bank.compensate(inside)
    with pytest.raises(TransactionCanceledError, match="does not meet"):
        bank.transfer("A", "B", 10 * START)
    with pytest.raises(TransactionCanceledError, match="does not meet"):
        guarded.across(bank, 100, run=True, receives={"balance": {"$lt": 0}})
    outside = guarded.across(bank, 100, run=True)
    assert bank.flush()
    bank.compensate(outside)
    for state in ("pending", "canceled"):  # its deadline has passed, then somebody cancels
        stored = guarded.across(bank, 100)
        begun = bank.step(stored, None)
        assert begun is not None
        assert begun.state == "pending"
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
    """Without the optional ones: no index, no note of a recovery, and nothing can be purged."""
    bank = guarded.allow()
    work(guarded, bank)
    assert events(caplog) >= {"transaction_indexes_missing", "recovery_unnoted"}
    guarded.log.update_many({}, {"$set": {"lastModified": LONG_AGO}})
    with pytest.raises(AccessError, match="Missing is remove"):
        bank.purge(3600)

    caplog.clear()
    bank = guarded.allow(optional=True)
    work(guarded, bank)
    assert not events(caplog) & {"transaction_indexes_missing", "recovery_unnoted"}
    assert bank.recoveries.last() is not None
    assert bank.purge(3600).done > 0


@pytest.mark.slow
@pytest.mark.parametrize("missing", NEEDED, ids=str)
def test_no_right_in_the_table_is_too_much(guarded: Guarded, missing: Right) -> None:
    """Something fails without any one of them, and says that it is a right."""
    bank = guarded.allow(missing)
    with pytest.raises((MongoCeleryError, OperationFailure, AssertionError), match=r"right|not authorized"):
        work(guarded, bank)


@pytest.mark.slow
@pytest.mark.parametrize("missing", OPTIONAL, ids=str)
def test_no_optional_right_is_needed(guarded: Guarded, missing: Right) -> None:
    work(guarded, guarded.allow(missing, optional=True))


def test_what_may_not_be_written_gives_the_money_back_once_its_deadline_has_passed(guarded: Guarded) -> None:
    """Where the receipts there may be written; else nobody can ask what has been decided, and who has paid waits."""
    paying = {"own": [START - 100, START], "east": [START, START]}
    untouched = {"own": [START, START], "east": [START, START]}
    participants = [each for each in NEEDED if (each.cluster, each.collection) == ("east", "accounts")]
    receipts = [each for each in NEEDED if (each.cluster, each.collection) == ("east", RECEIPTS)]
    for missing, after in ((participants, "canceled"), ([*participants, *receipts], "pending")):
        bank = guarded.allow(*missing)
        with pytest.raises(TransactionStateError, match="cannot be written"):
            guarded.across(bank, 100, run=True)
        assert guarded.balances() == paying
        guarded.overdue()
        (became,) = bank.recover()
        assert became.after == after, became
        assert guarded.balances() == (untouched if after == "canceled" else paying)
    assert "allow find, insert and update on the receipts" in (became.error or "")
    assert became.stopped

    guarded.overdue()
    assert [each.after for each in guarded.allow(*participants).recover()] == ["canceled"]
    assert guarded.balances() == untouched
