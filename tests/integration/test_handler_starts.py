"""Where each handler begins: its own start, else the bridge's, judged once, and never where others stand."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.listener.starts import Start, find_starts, start_time
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.oplog import operation_time, read_oplog
from tests.rig.term import Document, advance, begin_term, mark_at

TOKEN = mark_at(Timestamp(1000, 5))
SLOWEST = mark_at(Timestamp(2000, 1))


@pytest.fixture(scope="module")
def mongo_client(replica_set: MongoReplicaSet) -> Iterator[MongoClient[Document]]:
    """Give a client of a set whose oplog is whole: the session's may have rolled over."""
    del replica_set  # only to be skipped where there is no mongod
    with MongoReplicaSet() as started, MongoClient[Document](started.url) as client:
        yield client


def find_all(
    client: MongoClient[Document], database: str, names: Sequence[str] = ("record",), **options: Any
) -> Mapping[str, Start]:
    """Begin a term, and find where its handlers begin."""
    rig = begin_term(client, database, 2, names, **options)
    return find_starts(rig.store, client, rig.renewal, rig.options, rig.handlers, rig.take_over().documents)


def running(client: MongoClient[Document], database: str) -> None:
    """Let `record` be behind, as it may be for days."""
    find_all(client, database, start_from=Timestamp(1500, 1))
    rig = begin_term(client, database, 2)
    rig.take_over()
    assert advance(rig.store.subscriptions, "record", rig.version, SLOWEST.token, SLOWEST.cluster_time, "stream")


OWN: dict[str, tuple[object, tuple[Timestamp, str] | str]] = {
    "a time": (Timestamp(1700, 1), (Timestamp(1700, 1), "")),
    "a datetime": (datetime(1970, 1, 1, 0, 30, tzinfo=UTC), (Timestamp(1800, 0), "")),
    "a token": (TOKEN.token, (Timestamp(1000, 5), TOKEN.data)),
    "oldest": ("oldest", "oldest"),
    "now": ("now", "now"),
}


@pytest.mark.parametrize("has_begun", [True, False], ids=["added", "at the first start"])
@pytest.mark.parametrize(("own", "place"), OWN.values(), ids=OWN)
def test_a_handler_begins_where_its_own_start_says(
    mongo_client: MongoClient[Document], state_database: str, own: object, place: object, *, has_begun: bool
) -> None:
    """P1: whatever the bridge's option is, and wherever others stand; these keep their places."""
    if has_begun:
        running(mongo_client, state_database)
    before = operation_time(mongo_client)
    given: Any = {"starts": {"late": own}, "start_from": Timestamp(1500, 1)}
    starts = find_all(mongo_client, state_database, ("record", "late"), **given)
    assert starts["record"].place[0] == (SLOWEST.cluster_time if has_begun else Timestamp(1500, 1))
    if place == "now":
        assert starts["late"].place[0] > before
    elif place == "oldest":
        assert starts["late"].place == (read_oplog(mongo_client).first, "")
    else:
        assert starts["late"].place == place


@pytest.mark.parametrize(
    ("option", "time"), [(Timestamp(1900, 1), Timestamp(1900, 1)), (TOKEN.token, TOKEN.cluster_time)]
)
def test_without_a_start_of_its_own_it_begins_where_the_bridges_says_now(
    mongo_client: MongoClient[Document],
    state_database: str,
    option: Any,
    time: Timestamp,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not where the slowest stands, and not where the bridge began under another option; it says so."""
    running(mongo_client, state_database)
    with caplog.at_level(logging.WARNING):
        starts = find_all(mongo_client, state_database, ("record", "late"), start_from=option)
    assert starts["late"].place[0] == time
    assert "subscription_added" in [vars(each).get("event") for each in caplog.records]


def test_a_start_is_judged_once(mongo_client: MongoClient[Document], state_database: str) -> None:
    first = find_all(mongo_client, state_database, starts={"record": "now"})
    for own in ("now", "oldest", Timestamp(1, 1), None):
        again = find_all(mongo_client, state_database, starts={"record": own})
        assert again["record"].place == first["record"].place


def test_a_crash_between_pinning_the_bridge_and_its_handlers_keeps_the_token(
    mongo_client: MongoClient[Document], state_database: str
) -> None:
    """P1: the next listener pins the handlers at the same place, and another start changes nothing afterwards."""
    rig = begin_term(mongo_client, state_database, 2)
    assert rig.store.leases.pin_start(rig.renewal.term, start_time(mongo_client, TOKEN.token))
    for option in (TOKEN.token, SLOWEST.token, "now", "oldest", Timestamp(3000, 1)):
        starts = find_all(mongo_client, state_database, start_from=option)
        assert starts == {"record": Start(Timestamp(1000, 5), TOKEN, None)}


def test_handlers_of_one_start_begin_at_one_place(mongo_client: MongoClient[Document], state_database: str) -> None:
    """So that what is written while they are pinned belongs to all of them, or to none."""
    names = ("a", "b", "c")
    starts = find_all(mongo_client, state_database, names, starts=dict.fromkeys(names, "now"))
    assert len({start.place for start in starts.values()}) == 1


def test_a_token_of_another_cluster_pins_nothing(mongo_client: MongoClient[Document], state_database: str) -> None:
    """P9: one sentence; not even the handlers that stand in front of it are pinned."""
    ahead = mark_at(Timestamp(2**32 - 1, 1))
    with pytest.raises(ConfigurationError):
        find_all(mongo_client, state_database, ("a", "b"), starts={"a": "now", "b": ahead.token})
    pinned = {"startAtOperationTime": {"$ne": None}}
    assert mongo_client[state_database]["handlers"].count_documents(pinned) == 0


def test_a_position_without_a_handler_beside_a_new_handler_is_logged(
    mongo_client: MongoClient[Document], state_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P9: a renamed function would begin anew without a word; both names, and `name=` as the fix, once."""
    running(mongo_client, state_database)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            find_all(mongo_client, state_database, ("fresh",), start_from=Timestamp(1900, 1))
    (record,) = [vars(each) for each in caplog.records if vars(each).get("event") == "position_unserved"]
    assert (record["stored"], record["new"]) == (["record"], ["fresh"])
