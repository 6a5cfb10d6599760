"""A resume token as the start of a bridge: it is pinned once, whatever crashes, and later ones change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.bridge.listener.starts import Start, find_starts, start_time
from mongo_celery.errors import ConfigurationError
from tests.fixtures.mongo import MakeClient, MakeReplicaSet
from tests.integration.term_rig import TermRig, begin_term, mark_at

Document = dict[str, Any]

TOKEN = mark_at(Timestamp(1000, 5))
LATER = mark_at(Timestamp(2000, 1))


@pytest.fixture
def mongo_client(make_replica_set: MakeReplicaSet, make_client: MakeClient) -> MongoClient[Document]:
    """A client of a set of its own, whose oplog is whole: the session's may have rolled over."""
    return make_client(make_replica_set().url)


@pytest.fixture
def rig(mongo_client: MongoClient[Document], state_database: str) -> TermRig:
    """Give the first term of a bridge."""
    return begin_term(mongo_client, state_database, 2)


def found(rig: TermRig, start_from: Any) -> Mapping[str, Start]:
    """Where the handlers of a term begin, with this option."""
    options = replace(rig.options, start_from=start_from)
    return find_starts(rig.store, rig.database.client, rig.renewal, options, rig.handlers, rig.take_over().documents)


def test_a_token_is_where_every_handler_begins(rig: TermRig) -> None:
    """P1: at its time, and of what happened then only what lies behind it; the token need not be of this stream."""
    assert found(rig, TOKEN.token) == {"record": Start(Timestamp(1000, 5), TOKEN, None)}
    lease = rig.database["leases"].find_one()
    assert lease is not None
    assert lease["startAtOperationTime"] == Timestamp(1000, 5)


def test_a_crash_between_pinning_the_bridge_and_its_handlers_keeps_the_token(
    rig: TermRig, mongo_client: MongoClient[Document]
) -> None:
    """P1: the next listener pins the handlers at the same place."""
    assert rig.store.leases.pin_start(rig.renewal.term, start_time(mongo_client, TOKEN.token))
    successor = begin_term(mongo_client, rig.options.database, 2)
    assert found(successor, TOKEN.token)["record"].watermark == TOKEN


@pytest.mark.parametrize("option", [LATER.token, "now", "oldest", Timestamp(3000, 1)], ids=str)
def test_another_start_changes_nothing_afterwards(
    rig: TermRig, mongo_client: MongoClient[Document], option: object
) -> None:
    """It is judged on the first start only; a handler that is new then begins where the bridge began."""
    found(rig, TOKEN.token)
    successor = begin_term(mongo_client, rig.options.database, 2, ("record", "new"))
    starts = found(successor, option)
    assert starts["record"].watermark == TOKEN
    assert starts["new"].place == (Timestamp(1000, 5), "")


def test_a_token_changes_nothing_for_a_bridge_that_began_elsewhere(
    rig: TermRig, mongo_client: MongoClient[Document]
) -> None:
    """Also for its new handlers."""
    found(rig, Timestamp(1500, 1))
    successor = begin_term(mongo_client, rig.options.database, 2, ("record", "new"))
    starts = found(successor, TOKEN.token)
    assert {start.place for start in starts.values()} == {(Timestamp(1500, 1), "")}


def test_a_token_of_another_cluster_is_refused(rig: TermRig) -> None:
    """P9: opened ahead of this cluster's time, the stream would pass over everything until then, without a word."""
    ahead = mark_at(Timestamp(2**32 - 1, 1))
    with pytest.raises(ConfigurationError, match=r"lies ahead of the cluster's time.*another cluster"):
        found(rig, ahead.token)
    assert found(rig, TOKEN.token)["record"].watermark == TOKEN, "nothing was pinned"
