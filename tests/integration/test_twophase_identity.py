"""What two-phase commit takes for an id, an update and a rule: values as the server has them, and never a query."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Decimal128, Regex
from bson.binary import UuidRepresentation
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from tests.integration.twophase_rig import Tutorial, balances, make_accounts, markers

Document = dict[str, Any]
TIME = datetime(2020, 1, 1, 12, 0, 0, 123456)  # noqa: DTZ001 - as somebody without time zones writes it
UUID_ID = UUID("12345678123456781234567812345678")


@pytest.fixture
def bank(database: Database[Document]) -> TwoPhaseCommit:
    """Give a coordinator over two accounts with 1000 each."""
    make_accounts(database, A=1000, B=1000)
    return TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")


def adding(database: Database[Document], identity: Any, value: int = 1, **options: Any) -> Participant:
    return Participant(database["stock"], identity, {"$inc": {"n": value}}, **options)


@pytest.mark.parametrize(
    "identity",
    [
        {"$eq": "A"},
        {"$gte": "A", "$lt": "B"},
        {"$ne": None},
        re.compile("A"),
        Regex("A"),
        ["A"],
        ("A",),
        2**70,
        object(),
    ],
)
def test_what_can_be_no_id_is_refused_before_anything_is_written(
    bank: TwoPhaseCommit, database: Database[Document], identity: Any
) -> None:
    """Untrusted JSON may reach `transfer`: it must not choose documents by a condition."""
    begins: list[Callable[[], Any]] = [
        lambda: bank.transfer(identity, "B", 100),
        lambda: bank.transfer("A", identity, 100),
        lambda: bank.transfer("A", "B", 100, id=identity),
        lambda: bank.begin([adding(database, identity)]),
    ]
    for begin in begins:
        with pytest.raises(ConfigurationError, match=r"_id|stored"):
            begin()
    assert balances(database) == {"A": 1000, "B": 1000}
    assert database["transactions"].count_documents({}) == 0


def test_a_condition_finds_no_transaction(bank: TwoPhaseCommit, database: Database[Document]) -> None:
    """Nor does one that other code has stored as a participant's id find a participant."""
    bank.transfer("A", "B", 100, run=False)
    for act in (bank.run, bank.cancel, bank.compensate, bank.read):
        with pytest.raises(TransactionStateError, match="no transaction"):
            act({"$ne": None})
    database["transactions"].insert_one(
        {"_id": 1, "source": {"$eq": "A"}, "destination": "B", "value": 100, "state": "pending"}
    )

    assert [(each.id, each.after) for each in bank.recover(0)] == [(1, "canceled")]
    assert balances(database) == {"A": 1000, "B": 1000}


def test_ids_that_only_python_takes_for_equal_are_two_documents(
    bank: TwoPhaseCommit, database: Database[Document]
) -> None:
    database["accounts"].insert_many([{"_id": each, "balance": 10, "pendingTransactions": []} for each in (1, True)])

    bank.transfer(1, True, 4)

    assert [each["balance"] for each in database["accounts"].find({"_id": {"$in": [1, True]}}).sort("_id", 1)] == [
        6,
        14,
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TIME, TIME.replace(microsecond=123000, tzinfo=UTC)),
        (b"k", Binary(b"k", 0)),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_ids_that_are_written_differently_and_are_the_same_in_bson_take_part_once(
    bank: TwoPhaseCommit, database: Database[Document], one: Any, other: Any
) -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        bank.begin([adding(database, one), adding(database, other)])
    with pytest.raises(ConfigurationError, match="two documents"):
        bank.transfer(one, other, 1)


@pytest.mark.parametrize("other", [Decimal128("1"), 1.0])
def test_one_document_under_two_ids_that_the_server_takes_for_equal_is_found_in_time(
    bank: TwoPhaseCommit, database: Database[Document], other: Any
) -> None:
    """Money would vanish: the second change would count as done already."""
    database["accounts"].insert_one({"_id": 1, "balance": 10, "pendingTransactions": []})

    with pytest.raises(TransactionCanceledError, match="same document"):
        bank.transfer(1, other, 4)
    assert balances(database) == {"A": 1000, "B": 1000, 1: 10}
    assert markers(database) == []


def test_one_document_under_two_spellings_of_a_collation_is_found_in_time(database: Database[Document]) -> None:
    database.create_collection("accounts", collation={"locale": "en", "strength": 2})
    make_accounts(database, A=1000)

    with pytest.raises(TransactionCanceledError, match="same document"):
        TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents").transfer("A", "a", 100)
    assert balances(database) == {"A": 1000}


def test_one_document_through_two_clients_of_one_server_is_found_in_time(
    database: Database[Document], make_client: Callable[..., MongoClient[Document]]
) -> None:
    other = make_client()
    aliased = TwoPhaseCommit(
        None, database["transactions"], application="bank", clients={"warehouse": other}, protocol="documents"
    )
    database["stock"].insert_one({"_id": "x", "n": 0})

    with pytest.raises(TransactionCanceledError, match="same document"):
        aliased.run(aliased.begin([adding(database, "x"), adding(other[database.name], "x", 10)]))
    assert (database["stock"].find_one() or {})["n"] == 0


def test_without_markers_one_document_may_take_part_twice(database: Database[Document]) -> None:
    """In a MongoDB transaction both changes are made once, also where only the server knows that they meet."""
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    database["stock"].insert_one({"_id": 1, "n": 0})
    bank.run(bank.begin([adding(database, 1), adding(database, 1.0, 10)]))
    assert [each["n"] for each in database["stock"].find()] == [11]


def test_one_document_that_was_changed_already_is_left_to_people(
    bank: TwoPhaseCommit, database: Database[Document]
) -> None:
    """Other code began it: which of the two changes it has made cannot be known, so neither is undone."""
    database["accounts"].insert_one({"_id": 1, "balance": 10, "pendingTransactions": []})
    database["transactions"].insert_one({"_id": "t", "source": 1, "destination": 1.0, "value": 4, "state": "pending"})
    Tutorial(database).apply("t", 1, -4)

    report = bank.recover(0)
    assert [each.after for each in report] == ["pending"]
    assert "manually" in (report[0].error or "")
    assert (database["accounts"].find_one({"_id": 1}) or {})["balance"] == 6


@pytest.mark.parametrize("path", ["items.$.left", "items.$[x].left", "$", "items.$"])
@pytest.mark.parametrize("where", ["apply", "revert"])
def test_a_position_that_a_filter_has_met_is_refused(
    bank: TwoPhaseCommit, database: Database[Document], path: str, where: str
) -> None:
    """In an undo it would be the position of the marker, and another element would be changed."""
    changes = {"apply": {"$inc": {"n": 1}}, "revert": {"$inc": {"n": -1}}, where: {"$inc": {path: 1}}}
    with pytest.raises(ConfigurationError, match="number"):
        bank.begin([Participant(database["stock"], 1, **changes)])


def test_all_elements_of_an_array_may_be_changed(bank: TwoPhaseCommit, database: Database[Document]) -> None:
    database["stock"].insert_one({"_id": 1, "items": [{"n": 1}, {"n": 2}]})
    bank.run(bank.begin([Participant(database["stock"], 1, {"$inc": {"items.$[].n": 5}})]))
    assert (database["stock"].find_one() or {})["items"] == [{"n": 6}, {"n": 7}]


@pytest.mark.parametrize("operator", ["$decrement", "$setOnInsert", "$inCrement"])
@pytest.mark.parametrize("where", ["apply", "revert"])
def test_an_operator_that_does_nothing_here_is_refused(
    bank: TwoPhaseCommit, database: Database[Document], operator: str, where: str
) -> None:
    changes = {"apply": {"$inc": {"n": 1}}, "revert": {"$inc": {"n": -1}}, where: {operator: {"n": 1}}}
    with pytest.raises(ConfigurationError, match=re.escape(operator)):
        bank.begin([Participant(database["stock"], 1, **changes)])


@pytest.mark.parametrize(
    "rule",
    [
        {"sku": {"$regex": "^L"}},
        {"sku": {"$regex": "^l", "$options": "i"}},
        {"sku": {"$regex": "^L", "$nin": ["Lamp"]}},
        {"sku": {"$numberInt": "5"}},
        {"sku": {"$oid": "zz"}},
        {"$and": [{"sku": {"$date": 5}}]},
    ],
)
def test_a_rule_that_would_be_another_one_after_it_was_stored_is_refused(
    bank: TwoPhaseCommit, database: Database[Document], rule: Document
) -> None:
    """A rule that is silently weakened lets through what it was to keep out."""
    for participant in (adding(database, 1, require=rule), adding(database, 1, revert_require=rule)):
        with pytest.raises(ConfigurationError, match=r"\$and"):
            bank.begin([participant])
    for update in ({"$set": rule}, {"$set": {"rule": {"$regex": "^L"}}}):  # a value that is set stays what it is
        with pytest.raises(ConfigurationError, match=r"\$and"):
            bank.begin([Participant(database["stock"], 1, {"$inc": {"n": 1}}, update)])


@pytest.mark.parametrize(
    "rule",
    [
        {"sku": re.compile("^l", re.IGNORECASE)},
        {"$and": [{"sku": re.compile("^L")}, {"sku": {"$nin": ["Desk"]}}]},
        {"at": TIME},
        {"sku": {"$in": ("Lamp", "Desk")}},
        {"u": Binary.from_uuid(UUID_ID)},
        {"n": {"$lt": 2**40}, "nothing": None},
    ],
)
def test_a_rule_that_survives_is_kept(bank: TwoPhaseCommit, database: Database[Document], rule: Document) -> None:
    database["stock"].insert_one({"_id": 1, "n": 0, "sku": "Lamp", "at": TIME, "u": Binary.from_uuid(UUID_ID)})
    assert bank.run(bank.begin([adding(database, 1, require=rule)])).state == "done"


@pytest.mark.parametrize(
    "options",
    [
        {"apply": {"$inc": {"n": 2**70}}},
        {"apply": {"$inc": {"n": -(2**63)}}},
        {"apply": {"$inc": {"n": "text"}}},
        {"apply": {"$set": {"u": UUID_ID}}, "revert": {"$unset": {"u": ""}}},
        {"apply": {"$inc": {"n": 1}}, "require": {"u": UUID_ID}},
        {"apply": {"$inc": {"n": 1}}, "revert_require": {"u": object()}},
    ],
)
def test_what_bson_cannot_hold_is_refused_at_the_beginning(
    bank: TwoPhaseCommit, database: Database[Document], options: Any
) -> None:
    """Stored, it would stay pending for ever. A native UUID needs a client that says how to encode it."""
    with pytest.raises(ConfigurationError):
        bank.begin([Participant(database["stock"], 1, **options)])
    with pytest.raises(ConfigurationError):
        bank.transfer("A", "B", 2**70)
    assert database["transactions"].count_documents({}) == 0


@pytest.mark.parametrize("kind", [UuidRepresentation.STANDARD, UuidRepresentation.JAVA_LEGACY])
def test_uuids_are_sent_as_the_given_collection_encodes_them(database: Database[Document], kind: int) -> None:
    """Whatever the transactions' own collection does with them."""
    own = TwoPhaseCommit(None, database["transactions"], application="bank")
    options = database.codec_options.with_options(uuid_representation=kind)
    stock = database["stock"].with_options(codec_options=options)
    stock.insert_one({"_id": UUID_ID, "u": None, "v": UUID_ID})
    change = {"$set": {"u": UUID_ID}}

    own.run(own.begin([Participant(stock, UUID_ID, change, {"$set": {"u": None}}, require={"v": UUID_ID})]))

    assert (stock.find_one() or {})["u"] == UUID_ID


@pytest.mark.parametrize("kind", [UuidRepresentation.STANDARD, UuidRepresentation.JAVA_LEGACY])
def test_a_transaction_whose_id_is_a_uuid_is_recovered_like_the_others(database: Database[Document], kind: int) -> None:
    """Its client reads it as Python's own; it must not keep recovery from all that is left behind."""
    make_accounts(database, A=1000, B=1000)
    options = database.codec_options.with_options(uuid_representation=kind)
    own = TwoPhaseCommit(
        None, database["transactions"].with_options(codec_options=options), application="bank", protocol="documents"
    )
    left = [own.transfer("A", "B", 1, id=identity) for identity in (UUID_ID, "plain")]
    database["transactions"].update_many({}, {"$set": {"state": "pending"}})

    assert {each.after for each in own.recover(older_than=0)} == {"done"}
    assert [own.read(each).state for each in left] == ["done", "done"]
