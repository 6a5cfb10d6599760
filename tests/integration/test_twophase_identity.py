"""What two-phase commit takes for an id, an amount, an update and a rule; and what it refuses, with nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from bson import Binary, Decimal128, Regex
from bson.binary import UuidRepresentation
from pymongo.collection import Collection

from mongo_celery import Participant, TwoPhaseCommit
from mongo_celery.errors import ConfigurationError, TransactionCanceledError, TransactionStateError
from tests.fixtures.mongo import MakeClient
from tests.integration.twophase_rig import Db, Document, Tutorial, balances, make_accounts, markers

TIME = datetime(2020, 1, 1, 12, 0, 0, 123456)  # noqa: DTZ001 - as somebody without time zones writes it
UUID_ID = UUID("12345678123456781234567812345678")


@pytest.fixture
def bank(database: Db) -> TwoPhaseCommit:
    make_accounts(database, A=1000, B=1000)
    return TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")


def adding(database: Db, identity: Any, value: int = 1, **options: Any) -> Participant:
    return Participant(database["stock"], identity, {"$inc": {"n": value}}, **options)


def is_refused(call: Callable[[], object]) -> bool:
    with suppress(ConfigurationError):
        call()
        return False
    return True


# Untrusted JSON may reach `transfer`: it must not choose documents by a condition.
NO_IDS: list[Any] = [
    *({"$eq": "A"}, {"$gte": "A", "$lt": "B"}, {"$ne": None}),
    *(re.compile("A"), Regex("A"), ["A"], ("A",), 2**70, object()),
]
NO_AMOUNTS: list[Any] = [0, -1, True, "100", float("nan"), float("inf"), None, Decimal(-1), 2**70]
SAME_IN_BSON: list[tuple[Any, Any]] = [
    ("A", "A"),
    (TIME, TIME.replace(microsecond=123000, tzinfo=UTC)),
    (b"k", Binary(b"k", 0)),
    ({"a": (1, 2)}, {"a": [1, 2]}),
]
ADD, TAKE = {"$inc": {"n": 1}}, {"$inc": {"n": -1}}
# By a position that a filter has met, an undo would change another element. The other operators do nothing here.
NO_UPDATES: list[Any] = [
    *({"$inc": {path: 1}} for path in ("items.$.left", "items.$[x].left", "$", "items.$")),
    *({operator: {"n": 1}} for operator in ("$decrement", "$setOnInsert", "$inCrement")),
    *({}, [{"$set": {"a": 1}}], {"a": 1}, {"$inc": {"pendingTransactions": 1}}, {"$inc": {"transactionFence": 1}}),
    {"$rename": {"a": "_id"}},
]
# Stored as extended JSON, each of them would be another rule, and let through what it was to keep out.
NO_RULES: list[Document] = [
    {"sku": {"$regex": "^L"}},
    {"sku": {"$regex": "^l", "$options": "i"}},
    {"sku": {"$regex": "^L", "$nin": ["Lamp"]}},
    {"sku": {"$numberInt": "5"}},
    {"sku": {"$oid": "zz"}},
    {"$and": [{"sku": {"$date": 5}}]},
]
REFUSED: list[Document] = [
    *({"apply": ADD, "revert": TAKE, where: update} for update in NO_UPDATES for where in ("apply", "revert")),
    *({"apply": ADD, name: rule} for rule in NO_RULES for name in ("require", "revert_require")),
    *({"apply": ADD, "revert": {"$set": rule}} for rule in [*NO_RULES, {"rule": {"$regex": "^L"}}]),
    {"apply": {"$set": {"a": 1}}},  # cannot be reverted
    *({"apply": {"$inc": {"n": value}}} for value in (2**70, -(2**63), "text")),
    {"apply": {"$set": {"u": UUID_ID}}, "revert": {"$unset": {"u": ""}}},  # this client does not say how to encode it
    {"apply": ADD, "require": {"u": UUID_ID}},
    {"apply": ADD, "revert_require": {"u": object()}},
]


def begins(bank: TwoPhaseCommit, stock: Collection[Document]) -> Iterator[tuple[object, Callable[[], object]]]:
    """What is wrong, and a call that begins something with it."""
    for each in NO_IDS:
        yield each, partial(bank.transfer, each, "B", 100)
        yield each, partial(bank.transfer, "A", each, 100)
        yield each, partial(bank.transfer, "A", "B", 100, id=each)
        yield each, partial(bank.begin, [Participant(stock, each, ADD)])
    for each in NO_AMOUNTS:
        yield each, partial(bank.transfer, "A", "B", each)
    for one, other in SAME_IN_BSON:
        yield (one, other), partial(bank.transfer, one, other, 1)
        yield (one, other), partial(bank.begin, [Participant(stock, each, ADD) for each in (one, other)])
    for options in REFUSED:
        yield options, partial(bank.begin, [Participant(stock, 1, **options)])
    yield "none", partial(bank.begin, [])
    yield "no Participant", partial(bank.begin, ["A"])
    yield "no collection", partial(bank.begin, [Participant("c", 1, ADD)])


def test_a_transfer_keeps_all_conditions_of_its_rule(bank: TwoPhaseCommit, database: Db) -> None:
    """MongoDB 4.4 stores a rule with operators as text: there, rules that would come back as others are refused."""
    database["accounts"].update_one({"_id": "A"}, {"$set": {"sku": "Lamp"}})
    unmet: list[Document] = [{"sku": {"$regex": "^L", "$nin": ["Lamp"]}}, {"sku": {"$regex": "^l"}}]
    for number, rule in enumerate(unmet):
        with pytest.raises((TransactionCanceledError, ConfigurationError)):
            bank.run(bank.transfer("A", "B", 1, id=number, require=rule, run=False))
    for rule in NO_RULES:
        with suppress(ConfigurationError):
            identity = bank.transfer("A", "B", 1, require=rule, run=False)
            assert bank.read(identity).parts[0].require == rule
    bank.run(bank.transfer("A", "B", 1, require={"sku": re.compile("^L")}, run=False))
    assert balances(database) == {"A": 999, "B": 1001}


@pytest.mark.needs_mongodb(5, 0)
def test_a_rule_with_operators_is_stored_as_it_is(bank: TwoPhaseCommit, database: Db) -> None:
    """So processes that know no text read it, too."""
    rule = {"sku": {"$regex": "^L"}, "$or": [{"a.b": 1}]}
    bank.transfer("A", "B", 1, id=1, require=rule, run=False)
    assert (database["transactions"].find_one({"_id": 1}) or {})["require"] == rule


def test_what_cannot_work_is_refused_before_anything_is_written(
    bank: TwoPhaseCommit, database: Db, make_client: MakeClient
) -> None:
    """Stored, it would stay pending for ever, or do something else than what was asked."""
    stock = database["stock"]
    assert [wrong for wrong, begin in begins(bank, stock) if not is_refused(begin)] == []
    elsewhere = Participant(make_client()[database.name]["stock"], 1, ADD)
    assert is_refused(partial(bank.begin, [elsewhere])), "no process could find this client again"
    assert balances(database) == {"A": 1000, "B": 1000}
    assert database["transactions"].count_documents({}) == 0
    assert bank.begin([Participant(stock, 1, ADD)])


def test_options_that_cannot_work_are_refused(database: Db) -> None:
    make, given = partial(TwoPhaseCommit, None), {"application": "bank"}
    unfit: list[Document] = [
        *({"application": ""}, {"older_than": 0}, {"timeout": -1}, {"accounts": 3}, {"retention": 60}),
        {"retention": 5, "deadline": 2},
    ]
    for each in unfit:
        assert is_refused(partial(make, database["log"], **{**given, **each})), each
    assert is_refused(partial(make, "db.transactions", **given))
    bank = make(database["log"], application="bank")
    assert is_refused(partial(bank.recover, -1))
    assert is_refused(partial(bank.delay, 1)), "it has no Celery app"


def test_a_condition_finds_no_transaction(bank: TwoPhaseCommit, database: Db) -> None:
    """Nor does one that other code has stored as a participant's id find a participant."""
    bank.transfer("A", "B", 100, run=False)
    for act in (bank.run, bank.cancel, bank.compensate, bank.read):
        with pytest.raises(TransactionStateError):
            act({"$ne": None})
    database["transactions"].insert_one(
        {"_id": 1, "source": {"$eq": "A"}, "destination": "B", "value": 100, "state": "pending"}
    )

    assert [(each.id, each.after) for each in bank.recover(0)] == [(1, "canceled")]
    assert balances(database) == {"A": 1000, "B": 1000}


def test_ids_that_only_python_takes_for_equal_are_two_documents(bank: TwoPhaseCommit, database: Db) -> None:
    accounts = database["accounts"]
    accounts.insert_many([{"_id": each, "balance": 10, "pendingTransactions": []} for each in (1, True)])
    bank.transfer(1, True, 4)
    assert [each["balance"] for each in accounts.find({"_id": {"$in": [1, True]}}).sort("_id", 1)] == [6, 14]


def test_one_document_under_two_ids_that_the_server_takes_for_equal_is_found_in_time(
    bank: TwoPhaseCommit, database: Db, make_client: MakeClient
) -> None:
    """Money would vanish: the second change would count as done already. By type, by collation and by another alias."""
    database["accounts"].insert_one({"_id": 1, "balance": 10, "pendingTransactions": []})
    database.create_collection("names", collation={"locale": "en", "strength": 2})
    database["names"].insert_one({"_id": "A", "balance": 10, "pendingTransactions": []})
    database["stock"].insert_one({"_id": "x", "n": 0})
    log, other = database["transactions"], make_client()
    options: Document = {"application": "bank", "protocol": "documents"}
    by_name = TwoPhaseCommit(None, log, accounts=database["names"], **options)
    aliased = TwoPhaseCommit(None, log, clients={"warehouse": other}, **options)
    for transfer in (
        lambda: bank.transfer(1, Decimal128("1"), 4),
        lambda: bank.transfer(1, 1.0, 4),
        lambda: by_name.transfer("A", "a", 4),
        lambda: aliased.run(aliased.begin([adding(database, "x"), adding(other[database.name], "x", 10)])),
    ):
        with pytest.raises(TransactionCanceledError):
            transfer()
    assert balances(database) == {"A": 1000, "B": 1000, 1: 10}
    assert [(database["names"].find_one() or {})["balance"], (database["stock"].find_one() or {})["n"]] == [10, 0]
    assert markers(database) == []


def test_without_markers_one_document_may_take_part_twice(database: Db) -> None:
    """In a MongoDB transaction both changes are made once, also where only the server knows that they meet."""
    bank = TwoPhaseCommit(None, database["transactions"], application="bank")
    database["stock"].insert_one({"_id": 1, "n": 0})
    bank.run(bank.begin([adding(database, 1), adding(database, 1.0, 10)]))
    assert [each["n"] for each in database["stock"].find()] == [11]


def test_one_document_that_was_changed_already_is_left_to_people(bank: TwoPhaseCommit, database: Db) -> None:
    """Other code began it: which of the two changes it has made cannot be known, so neither is undone."""
    database["accounts"].insert_one({"_id": 1, "balance": 10, "pendingTransactions": []})
    database["transactions"].insert_one({"_id": "t", "source": 1, "destination": 1.0, "value": 4, "state": "pending"})
    Tutorial(database).apply("t", 1, -4)
    assert [(each.after, each.stopped) for each in bank.recover(0)] == [("pending", True)]
    assert (database["accounts"].find_one({"_id": 1}) or {})["balance"] == 6


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
def test_a_rule_that_survives_is_kept(bank: TwoPhaseCommit, database: Db, rule: Document) -> None:
    """And all elements of an array may be changed."""
    values = {"n": 0, "sku": "Lamp", "at": TIME, "u": Binary.from_uuid(UUID_ID)}
    database["stock"].insert_one({"_id": 1, "items": [{"n": 1}, {"n": 2}], **values})
    change = {"$inc": {"items.$[].n": 5}}
    assert bank.run(bank.begin([Participant(database["stock"], 1, change, require=rule)])).state == "done"
    assert (database["stock"].find_one() or {})["items"] == [{"n": 6}, {"n": 7}]


@pytest.mark.parametrize("kind", [UuidRepresentation.STANDARD, UuidRepresentation.JAVA_LEGACY])
def test_uuids_are_sent_as_the_given_collection_encodes_them(database: Db, kind: int) -> None:
    """Whatever the log's own collection does with them; and one that is a transaction's id stops no recovery."""
    make_accounts(database, A=1000, B=1000)
    options = database.codec_options.with_options(uuid_representation=kind)
    own = TwoPhaseCommit(None, database["transactions"], application="bank")
    stock = database["stock"].with_options(codec_options=options)
    stock.insert_one({"_id": UUID_ID, "u": None, "v": UUID_ID})
    parts = [Participant(stock, UUID_ID, {"$set": {"u": UUID_ID}}, {"$set": {"u": None}}, require={"v": UUID_ID})]
    own.run(own.begin(parts))
    assert (stock.find_one() or {})["u"] == UUID_ID

    log = database["others"].with_options(codec_options=options)
    own = TwoPhaseCommit(None, log, application="bank", protocol="documents")
    left = [own.transfer("A", "B", 1, id=identity) for identity in (UUID_ID, "plain")]
    log.update_many({}, {"$set": {"state": "pending"}})
    assert {each.after for each in own.recover(older_than=0)} == {"done"}
    assert [own.read(each).state for each in left] == ["done", "done"]
