"""The command lines of `celery -A app outbox`, run as users run them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import redis
from pymongo import MongoClient

from mongo_celery import Outbox
from mongo_celery.outbox.pending import LONG_AGO
from tests.acceptance import outbox_rig
from tests.acceptance.outbox_project import EFFECTS, configured
from tests.acceptance.test_cli import NOWHERE, Document
from tests.fixtures.process import Processes
from tests.fixtures.serializer import ACCEPTED, NEW
from tests.rig.outbox import pending, ripen
from tests.rig.project import MakeProject


class Shop(outbox_rig.Shop):
    """The project's commands, and a writer that leaves delivery to others."""

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        options = {"at_once": False, "failure_policy": "dead_letter", "sweep_after": 0.01, "sweep_every": 1}
        super().__init__(processes, client, url, broker, **options)
        self.dead_letters = self.state["outbox_dead_letters"]
        self.writer.conf.accept_content = ACCEPTED
        self.lacking = Outbox(configured(broker), self.items, database=self.state.name, **options)  # type: ignore[arg-type]

    def lines(self, *arguments: str, status: int = 0, **variables: str) -> list[Document]:
        done = self.run("outbox", *arguments, "--json", **variables)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def entries(self, key: str) -> list[Document]:
        found: list[Document] = pending(self.data, key, "items")["events"]
        return found

    def published(self) -> list[tuple[str, list[Any]]]:
        with redis.Redis.from_url(self.writer.conf.broker_url) as broker:
            messages = [json.loads(text) for text in reversed(broker.lrange(EFFECTS, 0, -1))]
        return [(each["headers"]["id"], json.loads(base64.b64decode(each["body"]))[0]) for each in messages]

    def replay(self, *arguments: str, status: int = 0) -> Document:
        (answer,) = self.lines("dead-letters", "replay", *arguments, status=status)
        (found,) = answer["dead_letters"]
        return dict(found)

    def make_dead_letter(self) -> str:
        """Insert a document with a task that the app cannot read, and deliver it; the dead letter's id."""
        self.outbox.insert_one({"_id": "key", "ns": [1]}, tasks=[self.effect("key", 1).set(serializer=NEW)])
        (entry,) = self.entries("key")
        ripen(self.items, "key")
        assert self.lacking.runtime.relay.deliver("key").dead == 1
        return str(entry["id"])


@pytest.fixture
def shop(make_project: MakeProject) -> Shop:
    made: Shop = make_project(Shop)
    return made


def severities(found: Document) -> dict[str, str]:
    """The severity of each finding, by its code; not of findings that hold for every outbox of these tests."""
    return {each["code"]: each["severity"] for each in found["findings"] if each["code"] != "late"}


def test_status_shows_what_waits_and_a_sweep_delivers_it_in_order(shop: Shop) -> None:
    """Two outboxes, one of them with a document whose two tasks were left behind; afterwards nothing waits."""
    shop.insert("key", 10, 11)
    shop.items.update_one({"_id": "key"}, {"$set": {"pendingEvents.events.0.at": LONG_AGO}})

    items, boxes = shop.lines("status", status=2)
    assert (items["outbox"], items["documents"], items["pending"], items["dead_letters"]) == ("items", 1, 2, 0)
    assert items["collection"] == shop.items.full_name
    assert items["oldest_seconds"] > 0
    assert items["verdict"] == "failing"
    assert severities(items) == {"sweep": "failing", "index": "degraded", "broker": "ok"}
    assert (boxes["outbox"], boxes["pending"], boxes["oldest_seconds"]) == ("boxes", 0, None)
    assert severities(boxes)["sweep"] == "failing"

    (swept,) = shop.lines("sweep")
    assert {each["outbox"]: each["dispatched"] for each in swept["outboxes"]} == {"items": 2, "boxes": 0}
    assert [arguments for _, arguments in shop.published()] == [["key", 10], ["key", 11]]
    assert shop.entries("key") == []
    (after,) = shop.lines("status", "--name", "items")
    assert (after["pending"], after["verdict"], severities(after)["index"]) == (0, "healthy", "ok")


def test_a_broker_that_is_down_ends_a_sweep_with_status_1(shop: Shop) -> None:
    """Status has the same verdict. The broker's password is not shown."""
    away = f"redis://:secret@{NOWHERE}/0"
    shop.insert("key", 1)

    found = shop.lines("status", "--name", "items", status=2, PROJECT_BROKER=away)
    assert severities(found[0])["broker"] == "failing"
    ((swept,),) = (each["outboxes"] for each in shop.lines("sweep", "--name", "items", status=1, PROJECT_BROKER=away))
    assert (swept["dispatched"], swept["dead"], swept["left"], swept["broker_down"]) == (0, 0, 1, True)
    assert "secret" not in json.dumps([found, swept])
    assert len(shop.entries("key")) == 1


def test_a_dead_letter_is_shown_and_replayed_after_the_app_was_corrected(shop: Shop) -> None:
    """The whole way of an operator; the task has the id that it was stored with, and stands behind later ones."""
    dead_letter = shop.make_dead_letter()
    assert dead_letter in shop.run("outbox", "dead-letters", "list").stdout
    (status,) = shop.lines("status", "--name", "items", status=2)
    assert (status["dead_letters"], severities(status)["dead_letters"]) == (1, "degraded")
    (shown,) = shop.lines("dead-letters", "list", dead_letter)
    assert (shown["id"], shown["document"], shown["entry"]["name"]) == (dead_letter, "key", "effect")
    assert "payload" not in shown["entry"]
    assert "ContentDisallowed" in shown["traceback"]
    shop.add("key", 2)

    replayed = {"outbox": "items", "id": dead_letter, "result": "pending", "entry": f"{dead_letter}~1"}
    assert shop.replay(dead_letter) == replayed
    assert shop.dead_letters.count_documents({}) == 0
    assert [(entry["id"], entry["attempts"]) for entry in shop.entries("key")[1:]] == [(f"{dead_letter}~1", 0)]
    shop.lines("sweep", "--older-than", "0", PROJECT_KNOWS="1")
    first, second = shop.published()
    assert (first[1], second) == (["key", 2], (dead_letter, ["key", 1]))


def test_a_letter_that_the_outbox_has_not_signed_is_sent_where_somebody_vouches_for_it(shop: Shop) -> None:
    """Never by --all."""
    shop.insert("key", 7)
    shop.items.update_one({"_id": "key"}, {"$set": {"pendingEvents.events.0.name": "harmless"}})
    swept = shop.lines("sweep", "--older-than", "0")[0]["outboxes"][0]
    assert (swept["dispatched"], swept["dead"], shop.published()) == (0, 1, [])
    (status,) = shop.lines("status", "--name", "items", status=2)
    assert (status["unsigned"], severities(status)["unsigned"]) == (1, "failing")
    ((letter,),) = (each["dead_letters"] for each in shop.lines("dead-letters", "list", "--name", "items"))

    assert shop.replay("--all", status=1)["result"] == "refused"
    assert shop.run("outbox", "dead-letters", "replay", "--all", "--sign").returncode == 2
    assert shop.replay(letter["id"], "--sign")["result"] == "pending"
    shop.lines("sweep", "--older-than", "0")
    assert [arguments for _, arguments in shop.published()] == [["key", 7]]


def test_a_letter_is_discarded_only_on_a_yes(shop: Shop) -> None:
    """What is thrown away is shown: it may be the only trace."""
    dead_letter = shop.make_dead_letter()
    assert "payload" in shop.run("outbox", "dead-letters", "list", dead_letter, "--payload").stdout
    refused = shop.run("outbox", "dead-letters", "discard", dead_letter, text="n\n")
    assert refused.returncode == 1
    assert "effect" in refused.stderr
    assert shop.dead_letters.count_documents({}) == 1
    assert shop.run("outbox", "dead-letters", "discard", dead_letter, "--yes").returncode == 0
    assert shop.dead_letters.count_documents({}) == 0
    assert shop.run("outbox", "dead-letters", "discard", dead_letter, "--yes").returncode == 1
