"""The command lines of `celery -A app outbox`, run as users run them."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
import redis
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox
from mongo_celery.outbox.pending import LONG_AGO
from tests.acceptance.test_cli import BARE_APP, NOWHERE, Document, one_sentence
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import UrlOf
from tests.fixtures.serializer import ACCEPTED, NEW
from tests.fixtures.tasks import register_tasks
from tests.rig.outbox import ripen
from tests.rig.project import QUIET, MakeProject, Project

APP = "tests.acceptance.outbox_cli_project"
WITH_BEAT = ("-c", "1", "-B", "-s", "/dev/null", "--scheduler", "celery.beat:Scheduler")


class Shop(Project):
    """The project's databases and commands, and a writer that leaves delivery to others."""

    app = APP

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.orders = self.data["orders"]
        self.dead_letters = self.state["outbox_dead_letters"]
        self.writer = Celery("outbox_cli", broker=broker, accept_content=ACCEPTED)
        register_tasks(self.writer, f"{APP}.bill")
        options: Document = {"database": self.state.name, "at_once": False, "sweep_every": None}
        self.outbox = Outbox(self.writer, self.orders, **options)
        lacking = Celery("outbox_cli", broker=broker)
        self.lacking = Outbox(lacking, self.orders, failure_policy="dead_letter", **options)

    def __exit__(self, *error: object) -> None:
        self.outbox.runtime.publisher.close()
        super().__exit__(*error)

    def lines(self, *arguments: str, status: int = 0, **variables: str) -> list[Document]:
        """Run a command with `--json`; what its lines say."""
        done = self.run("outbox", *arguments, "--json", **variables)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def task(self, name: str, order: int, **options: Any) -> Any:
        """A task of the project by its name."""
        return self.writer.signature(f"{APP}.{name}", args=(order,), **options)

    def entries(self, order: int) -> list[Document]:
        """What is pending in an order."""
        document = self.orders.find_one({"_id": order})
        assert document is not None
        field: Document = document.get("pendingEvents", {"count": 0, "events": []})
        assert field["count"] == len(field["events"]), "the index is on the count"
        found: list[Document] = field["events"]
        return found

    def published(self) -> list[tuple[str, str, list[Any]]]:
        """Name, id and arguments of all tasks in the default queue, the oldest first."""
        with redis.Redis.from_url(self.writer.conf.broker_url) as broker:
            messages = [json.loads(text) for text in reversed(broker.lrange("celery", 0, -1))]
        heads = [message["headers"] for message in messages]
        arguments = [json.loads(base64.b64decode(message["body"]))[0] for message in messages]
        return [(head["task"], head["id"], found) for head, found in zip(heads, arguments, strict=True)]

    def replay(self, *arguments: str, status: int = 0, **environment: str) -> list[Document]:
        """Replay dead letters; the answer for each."""
        (answer,) = self.lines("dead-letters", "replay", *arguments, status=status, **environment)
        found: list[Document] = answer["dead_letters"]
        return found

    def make_dead_letter(self, order: int) -> str:
        """Insert an order with a task that the app cannot read, and deliver it; the dead letter's id."""
        self.outbox.insert_one({"_id": order}, tasks=[self.task("bill", order, serializer=NEW)])
        (entry,) = self.entries(order)
        ripen(self.orders, order)
        assert self.lacking.runtime.relay.deliver(order).dead == 1
        return str(entry["id"])


@pytest.fixture
def shop(make_project: MakeProject) -> Shop:
    """Give the project on the session's servers."""
    made: Shop = make_project(Shop)
    return made


def severities(found: Document) -> dict[str, str]:
    """The severity of each finding, by its code; not of findings that hold for every outbox of these tests."""
    return {each["code"]: each["severity"] for each in found["findings"] if each["code"] != "late"}


# -- status and sweep ------------------------------------------------------------------------------


def test_status_shows_what_waits_and_a_sweep_delivers_it_in_order(shop: Shop) -> None:
    """Two outboxes, one of them with a document whose two tasks were left behind; afterwards nothing waits."""
    shop.outbox.insert_one({"_id": 1}, tasks=[shop.task("receipt", 10), shop.task("receipt", 11)])
    shop.orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.at": LONG_AGO}})

    orders, parcels = shop.lines("status", status=2)
    assert (orders["outbox"], orders["documents"], orders["pending"], orders["dead_letters"]) == ("orders", 1, 2, 0)
    assert orders["collection"] == f"{shop.names}_data.orders"
    assert orders["oldest_seconds"] > 0
    assert (orders["verdict"], severities(orders)) == (
        "failing",
        {"sweep": "failing", "index": "degraded", "broker": "ok"},
    )
    assert (parcels["outbox"], parcels["pending"], parcels["oldest_seconds"]) == ("parcels", 0, None)
    assert severities(parcels)["sweep"] == "failing"

    swept = shop.run("outbox", "sweep")
    assert (swept.returncode, swept.stderr) == (0, "")
    assert swept.stdout.splitlines() == [
        "orders: 2 dispatched, 0 became dead letters",
        "parcels: 0 dispatched, 0 became dead letters",
    ]
    assert [arguments for _, _, arguments in shop.published()] == [[10], [11]]
    assert shop.entries(1) == []
    (after,) = shop.lines("status", "--name", "orders")
    assert (after["pending"], after["verdict"], severities(after)["index"]) == (0, "healthy", "ok")


def test_a_broker_that_is_down_is_said_and_ends_a_sweep_with_status_1(shop: Shop) -> None:
    """Status has the same verdict. The broker's password is not shown."""
    away = f"redis://:secret@{NOWHERE}/0"
    shop.outbox.insert_one({"_id": 1}, tasks=[shop.task("receipt", 1)])

    done = shop.run("outbox", "status", PROJECT_BROKER=away)
    assert done.returncode == 2, done.stderr
    assert "did not answer within" in done.stdout
    assert "beat" not in done.stdout, "one cause is enough"
    assert "secret" not in done.stdout + done.stderr

    ((swept,),) = (each["outboxes"] for each in shop.lines("sweep", "--name", "orders", status=1, PROJECT_BROKER=away))
    assert (swept["dispatched"], swept["dead"], swept["left"], swept["broker_down"]) == (0, 0, 1, True)
    assert "secret" not in json.dumps(swept)
    assert len(shop.entries(1)) == 1


# -- check -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_check_fails_until_beat_and_a_worker_sweep(shop: Shop) -> None:
    """An outbox that only its writers import is swept by nobody; a worker with beat is all it takes."""
    shop.orders.insert_one({"_id": 1})
    for found in shop.lines("status", "--check", status=2):
        assert (found["verdict"], severities(found)["sweep"]) == ("failing", "failing")

    shop.start("worker", *QUIET, *WITH_BEAT)
    wait_for(lambda: shop.state["outbox_sweeps"].count_documents({}) == 2)

    checked: list[Document] = []

    def is_fine() -> bool:  # not at the first look, where a busy worker answers late
        done = shop.run("outbox", "status", "--check", "--json")
        checked[:] = [json.loads(line) for line in done.stdout.splitlines()]
        return done.returncode < 2

    wait_for(is_fine, message=lambda: str(checked))
    assert [each["outbox"] for each in checked] == ["orders", "parcels"]
    assert severities(checked[0])["sweep"] == "ok"


# -- dead letters ----------------------------------------------------------------------------------


def test_a_dead_letter_is_shown_and_replayed_after_the_app_was_corrected(shop: Shop) -> None:
    """The whole way of an operator; the task has the id that it was stored with, and stands behind later ones."""
    dead_letter = shop.make_dead_letter(7)
    assert shop.entries(7) == []
    listed = shop.run("outbox", "dead-letters", "list")
    assert dead_letter in listed.stdout
    assert "untrusted content" in listed.stdout
    assert "parcels: 0 dead letters" in listed.stdout
    (status,) = shop.lines("status", "--name", "orders", status=2)
    assert (status["dead_letters"], severities(status)["dead_letters"]) == (1, "degraded")
    (shown,) = shop.lines("dead-letters", "list", dead_letter)
    assert (shown["id"], shown["document"], shown["entry"]["name"]) == (dead_letter, 7, f"{APP}.bill")
    assert "payload" not in shown["entry"]
    assert "ContentDisallowed" in shown["traceback"]
    shop.outbox.update_one({"_id": 7}, {"$set": {"paid": True}}, tasks=[shop.task("receipt", 8)])

    (replayed,) = shop.replay(dead_letter)

    assert replayed == {"outbox": "orders", "id": dead_letter, "result": "pending", "entry": f"{dead_letter}~1"}
    assert shop.dead_letters.count_documents({}) == 0
    assert [(entry["id"], entry["attempts"]) for entry in shop.entries(7)[1:]] == [(f"{dead_letter}~1", 0)]
    shop.lines("sweep", "--older-than", "0", PROJECT_KNOWS="1")
    first, second = shop.published()
    assert (first[0], first[2]) == (f"{APP}.receipt", [8])
    assert second == (f"{APP}.bill", dead_letter, [7])


def test_a_letter_that_the_outbox_has_not_signed_is_sent_where_somebody_vouches_for_it(shop: Shop) -> None:
    """Never by --all; status, check and the refusal say what to type."""
    shop.outbox.insert_one({"_id": 7}, tasks=[shop.task("receipt", 7)])
    shop.orders.update_one({"_id": 7}, {"$set": {"pendingEvents.events.0.name": "harmless"}})
    swept = shop.lines("sweep", "--older-than", "0")[0]["outboxes"][0]
    assert (swept["dispatched"], swept["dead"], shop.published()) == (0, 1, [])
    (status,) = shop.lines("status", "--name", "orders", status=2)
    assert (status["unsigned"], severities(status)["unsigned"]) == (1, "failing")
    ((letter,),) = (each["dead_letters"] for each in shop.lines("dead-letters", "list", "--name", "orders"))

    (refused,) = shop.replay("--all", status=1)
    assert (refused["result"], f"replay {letter['id']} --sign" in refused["error"]) == ("refused", True)
    assert shop.run("outbox", "dead-letters", "replay", "--all", "--sign").returncode == 2
    (done,) = shop.replay(letter["id"], "--sign")
    assert done["result"] == "pending"
    shop.lines("sweep", "--older-than", "0")
    assert [(name, arguments) for name, _, arguments in shop.published()] == [(f"{APP}.receipt", [7])]


def test_a_letter_is_discarded_only_on_a_yes(shop: Shop) -> None:
    """What is thrown away is said on standard error: it may be the only trace."""
    dead_letter = shop.make_dead_letter(7)
    shown = shop.run("outbox", "dead-letters", "list", dead_letter, "--payload").stdout
    assert re.search(rf"document: +7\n(.*\n)*payload: .*{APP}.bill", shown), shown
    assert "ContentDisallowed" in shown

    refused = shop.run("outbox", "dead-letters", "discard", dead_letter, text="n\n")
    assert refused.returncode == 1
    assert f"{APP}.bill" in refused.stderr
    assert shop.dead_letters.count_documents({}) == 1

    done = shop.run("outbox", "dead-letters", "discard", dead_letter, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{dead_letter}: discarded\n")
    assert shop.dead_letters.count_documents({}) == 0
    one_sentence(shop.run("outbox", "dead-letters", "discard", dead_letter, "--yes"), "no dead letter", dead_letter)


# -- what is wrong with the call -------------------------------------------------------------------


@pytest.mark.slow
def test_wrong_calls_end_in_one_sentence(shop: Shop) -> None:
    """No app, no outbox, an outbox or a dead letter that there is not."""
    one_sentence(run_celery("outbox", "status"), "-A", "outbox status")
    one_sentence(run_celery("-A", BARE_APP, "outbox", "sweep"), "no outbox", "Outbox(app")
    one_sentence(shop.run("outbox", "status", "--name", "ordres"), "'ordres'", "orders, parcels")
    one_sentence(shop.run("outbox", "dead-letters", "list", "nothing"), "no dead letter", "'nothing'")
    assert shop.run("outbox", "dead-letters", "replay").returncode == 2


@pytest.mark.parametrize("command", [["sweep"], ["dead-letters", "list"]], ids=" ".join)
def test_a_missing_right_names_the_outbox_its_collections_and_the_cure(
    shop: Shop, guarded_url: UrlOf, command: list[str]
) -> None:
    """Not the bridge's state, which this app does not have."""
    done = shop.run("outbox", *command, PROJECT_MONGO=guarded_url("bridge"))
    assert (done.returncode, done.stdout) == (1, "")
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("Error: ")]
    said, *others = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert all("index pendingEvents" in each for each in warnings)
    assert f"may not use the outbox's collection {shop.names}_data.orders" in said
    assert f"find, insert, update and remove on {shop.names}_state.outbox_dead_letters" in said
    assert "state database" not in said
    assert [f"{shop.names}_data.parcels" in each for each in others] == ([True] if command == ["sweep"] else [])
