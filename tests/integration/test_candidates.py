"""Whose definitions may lead, judged by the server; and the name that a bridge had before it took the app's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection

from mongo_celery import Bridge
from mongo_celery.bridge.listener.candidacy import Candidacy
from mongo_celery.bridge.operations.lease_check import judge_lease
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.candidates import Definitions
from mongo_celery.bridge.state.leases import Leases, Term
from mongo_celery.bridge.state.signing import SigningKeys
from mongo_celery.bridge.state.store import Store
from mongo_celery.errors import ConfigurationError

Document = dict[str, Any]

BRIDGE = "shop"
TASKS = {"summarise": "shop.changes.summarise"}
OLD = Definitions("shop", TASKS, {"summarise": "1"}, "aa")
NEW = Definitions("shop", TASKS, {"summarise": "2"}, "bb")


@pytest.fixture
def leases(mongo_client: MongoClient[Document], state_database: str) -> Leases:
    """Give the lease of a bridge whose document was just created."""
    found = Store(mongo_client, BridgeOptions(name=BRIDGE, database=state_database, lease_ttl=60)).leases
    found.ensure()
    return found


@pytest.fixture
def signing(mongo_client: MongoClient[Document], state_database: str) -> SigningKeys:
    """Give what a worker reads of the same lease."""
    return Store(mongo_client, BridgeOptions(name=BRIDGE, database=state_database, lease_ttl=60)).signing


@pytest.fixture
def documents(mongo_client: MongoClient[Document], state_database: str) -> Collection[Document]:
    """Give the collection itself, to move what is stored in time."""
    return mongo_client[state_database].get_collection("leases", write_concern=WriteConcern("majority"))


def _led(leases: Leases, definitions: Definitions) -> Term:
    leases.announce(definitions)
    term = leases.acquire(definitions)
    assert term is not None
    assert leases.serve(term, definitions)
    return term


def _overtaken(leases: Leases, term: Term, definitions: Definitions) -> bool:
    renewed = leases.renew(term, {}, definitions)
    assert renewed is not None
    return bool(renewed.document["overtaken"])


def _age(documents: Collection[Document], digest: str, **seconds: float) -> None:
    """Let fields of a candidate lie so much further back."""
    candidate = documents.find_one({"_id": BRIDGE})["candidates"][digest]  # type: ignore[index]
    change = {f"candidates.{digest}.{name}": candidate[name] - timedelta(seconds=ago) for name, ago in seconds.items()}
    documents.update_one({"_id": BRIDGE}, {"$set": change})


def test_a_leader_is_overtaken_by_newer_definitions_only(leases: Leases) -> None:
    """In either order: what was first seen later is newer."""
    term = _led(leases, OLD)
    assert not _overtaken(leases, term, OLD)
    leases.announce(NEW)
    assert _overtaken(leases, term, OLD)
    assert leases.release(term, OLD)
    assert leases.acquire(OLD) is None, "somebody with newer ones is there"
    term = _led(leases, NEW)
    leases.announce(OLD)
    assert not _overtaken(leases, term, NEW)


def test_a_lease_says_whose_handlers_it_serves(leases: Leases) -> None:
    """For workers, status, and listeners of other apps."""
    _led(leases, NEW)
    lease = leases.read()
    assert lease is not None
    assert (lease["app"], lease["tasks"], lease["definitions"]) == ("shop", TASKS, {"summarise": "2"})
    assert lease["definedAt"] == lease["candidates"]["bb"]["definedAt"]


def test_a_candidate_that_has_ended_or_is_silent_for_the_ttl_stands_in_nobodys_way(
    leases: Leases, documents: Collection[Document]
) -> None:
    """So older definitions lead again when the newer ones are gone."""
    leases.announce(OLD)
    term = _led(leases, NEW)
    assert leases.release(term, NEW)
    term = _led(leases, OLD)
    leases.announce(NEW)
    assert _overtaken(leases, term, OLD), "it keeps its place for a while"
    _age(documents, "bb", seenAt=61)
    assert not _overtaken(leases, term, OLD)


def test_definitions_that_fail_are_not_newer_for_some_minutes(leases: Leases, documents: Collection[Document]) -> None:
    """A crash loop of new code does not interrupt the old one again and again."""
    leases.announce(OLD)
    term = _led(leases, NEW)
    assert leases.release(term, NEW, "failed", "$it has failed")
    assert leases.read()["error"] == "$it has failed"  # type: ignore[index]
    term = _led(leases, OLD)
    leases.announce(NEW)
    assert not _overtaken(leases, term, OLD)
    _age(documents, "bb", failedAt=301)
    assert _overtaken(leases, term, OLD)


def _kill(documents: Collection[Document]) -> None:
    """Let the lease expire as that of a process that is gone."""
    documents.update_one({"_id": BRIDGE}, [{"$set": {"expiresAt": "$$NOW"}}])


def _failed(documents: Collection[Document]) -> list[str]:
    candidates = documents.find_one({"_id": BRIDGE})["candidates"]  # type: ignore[index]
    return [digest for digest, each in candidates.items() if each["failedAt"] is not None]


def test_definitions_whose_listener_is_killed_have_failed_as_well(
    leases: Leases, documents: Collection[Document]
) -> None:
    """Where others can lead, they do for some minutes, however soon the killed ones are there again."""
    leases.announce(OLD)
    _led(leases, NEW)
    _kill(documents)
    leases.announce(NEW)
    assert leases.acquire(NEW) is None, "started again at once, it leaves the lease to the others"
    term = _led(leases, OLD)
    assert _failed(documents) == ["bb"]
    assert not _overtaken(leases, term, OLD)
    _age(documents, "bb", failedAt=301)
    assert _overtaken(leases, term, OLD)


def test_definitions_that_are_the_only_ones_lead_again_at_once_however_often_their_listener_is_killed(
    leases: Leases, documents: Collection[Document]
) -> None:
    """Distrust keeps nobody from leading where there is nobody else: none, a silent one, or one that has failed too."""
    for _ in range(3):
        _led(leases, NEW)
        _kill(documents)
    leases.announce(OLD)
    _age(documents, "aa", seenAt=61)
    term = _led(leases, NEW)
    assert leases.release(term, NEW)
    term = _led(leases, OLD)
    assert leases.release(term, OLD, "failed", "it has failed")
    leases.announce(OLD)
    _led(leases, NEW)


def test_the_death_of_a_listener_of_an_earlier_version_is_charged_to_nobody(
    leases: Leases, documents: Collection[Document]
) -> None:
    """Nor an orderly end: only the set that the dead term has said to serve has failed."""
    assert leases.release(_led(leases, NEW), NEW)
    _earlier_version_leads(documents, seconds=0)
    _led(leases, NEW)
    assert _failed(documents) == []


def test_definitions_that_nobody_has_had_for_ten_minutes_are_new_again(
    leases: Leases, documents: Collection[Document]
) -> None:
    """A deliberate return to old code; sooner than that, it waits for the newer listeners to end."""
    leases.announce(OLD)
    term = _led(leases, NEW)
    _age(documents, "aa", seenAt=300, definedAt=300)
    leases.announce(OLD)
    assert not _overtaken(leases, term, NEW)
    _age(documents, "aa", seenAt=601, definedAt=601)
    leases.announce(OLD)
    assert _overtaken(leases, term, NEW)


def test_what_was_not_named_for_long_is_forgotten(leases: Leases, documents: Collection[Document]) -> None:
    """The document does not grow with each deploy."""
    leases.announce(OLD)
    _age(documents, "aa", seenAt=601)
    leases.announce(NEW)
    assert list(documents.find_one({"_id": BRIDGE})["candidates"]) == ["bb"]  # type: ignore[index]


def _earlier_version_leads(documents: Collection[Document], seconds: int = 60) -> None:
    """Take the lease as a listener does that writes none of these fields, and looks at none."""
    held = {"version": {"$add": ["$version", 1]}, "listenerId": "earlier", "expiresAt": _in(seconds)}
    documents.update_one({"_id": BRIDGE}, [{"$set": held}])


def _in(seconds: int) -> Document:
    return {"$add": ["$$NOW", seconds * 1000]}


def test_a_listener_of_an_earlier_version_leads_and_is_waited_for_as_before(
    leases: Leases, documents: Collection[Document]
) -> None:
    """Until it ends, or its lease expires."""
    _earlier_version_leads(documents)
    leases.announce(NEW)
    assert leases.acquire(NEW) is None
    documents.update_one({"_id": BRIDGE}, {"$set": {"listenerId": None, "expiresAt": None}})
    assert leases.acquire(NEW) is not None


def test_what_an_earlier_term_served_is_not_told_of_one_that_does_not_say(
    leases: Leases, documents: Collection[Document], signing: SigningKeys
) -> None:
    """An earlier version leaves the fields as it finds them: then nobody knows whose handlers are led."""
    term = _led(leases, NEW)
    raised = leases.raise_version(term, term.version + 2**40)
    assert raised is not None
    ring = signing.read()
    assert ring is not None
    assert ring.definitions == {"summarise": "2"}, "the term is the same with a larger version"
    assert _judged(leases, NEW) == [("definitions", "ok")]

    assert leases.release(raised, NEW)
    _earlier_version_leads(documents)
    ring = signing.read()
    assert ring is not None
    assert ring.definitions is None
    assert _judged(leases, NEW) == [("definitions", "warning")]


def test_check_names_the_handlers_that_the_leader_does_not_know(leases: Leases) -> None:
    """New code in the workers, old code in the listener."""
    _led(leases, NEW)
    lease = leases.read()
    assert lease is not None
    newer = replace(NEW, handlers={**NEW.handlers, "invoice": "1"})
    (found,) = judge_lease(lease, newer, datetime.now(UTC))

    assert (found.name, found.level) == ("definitions", "warning")
    assert "does not know invoice: deploy this code where listeners run" in found.message


def _judged(leases: Leases, mine: Definitions) -> list[tuple[str, str]]:
    lease = leases.read()
    assert lease is not None
    return [(each.name, each.level) for each in judge_lease(lease, mine, datetime.now(UTC))]


@pytest.fixture
def bridges(mongo_url: str, state_database: str) -> Iterator[Any]:
    """Give a maker of bridges of the app "shop" on one state database."""
    made: list[Bridge] = []

    def make(**options: Any) -> Candidacy:
        app = Celery("shop", broker="memory://", set_as_current=False)
        bridge = Bridge(app, mongo_url, database=state_database, autodiscover=False, **options)
        made.append(bridge)
        return Candidacy(bridge.wiring, bridge.wiring.stream()[0] if bridge.handlers else [])

    yield make
    for bridge in made:
        bridge.client.close()


def test_positions_under_the_former_name_are_not_left_behind_in_silence(
    bridges: Any, leases: Leases, documents: Collection[Document]
) -> None:
    """A name in so many words decides; so does a start under the new name."""
    bridges().refuse_forgotten_name()
    former = leases.of("default")
    former.ensure()
    bridges().refuse_forgotten_name()  # nobody ever led under it
    documents.update_one({"_id": "default"}, {"$set": {"startAtOperationTime": Timestamp(1, 1)}})
    with pytest.raises(ConfigurationError, match="Give Bridge name='default' to go on where it stands; or name='shop'"):
        bridges().refuse_forgotten_name()
    bridges(name="default").refuse_forgotten_name()
    bridges(name="shop").refuse_forgotten_name()
    documents.update_one({"_id": BRIDGE}, {"$set": {"startAtOperationTime": Timestamp(1, 1)}})
    bridges().refuse_forgotten_name()


def test_a_bridge_of_another_app_that_is_really_called_default_is_left_alone(
    bridges: Any, leases: Leases, documents: Collection[Document]
) -> None:
    """It says whose it is."""
    leases.of("default").ensure()
    theirs = {"startAtOperationTime": Timestamp(1, 1), "app": "billing", "tasks": {"invoice": "billing.invoice"}}
    documents.update_one({"_id": "default"}, {"$set": theirs})
    bridges().refuse_forgotten_name()
