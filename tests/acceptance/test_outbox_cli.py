"""The command lines of `celery -A app outbox`, run as users run them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox
from mongo_celery.outbox.pending import LONG_AGO
from tests.acceptance.chain_rig import QUIET
from tests.acceptance.test_cli import BARE_APP, NOWHERE, Document, Done, one_sentence, run
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import UrlOf, with_a_wrong_password
from tests.integration.outbox_rig import ripen

APP = "tests.acceptance.outbox_cli_project"
WITH_BEAT = ("-c", "1", "-B", "-s", "/dev/null", "--scheduler", "celery.beat:Scheduler")


class Shop:
    """The project's databases and commands, and a writer that leaves delivery to others."""

    def __init__(self, client: MongoClient[Document], mongo_url: str, broker_url: str, broker: Any) -> None:
        self.names = f"outbox_cli_{uuid4().hex[:10]}"
        self.orders = client[f"{self.names}_data"]["orders"]
        self.parcels = client[f"{self.names}_data"]["parcels"]
        self.notes = client[f"{self.names}_state"]["outbox_sweeps"]
        self.dead_letters = client[f"{self.names}_state"]["outbox_dead_letters"]
        self.app = Celery("outbox_cli", broker=broker_url)
        options: Document = {"database": f"{self.names}_state", "at_once": False, "sweep_every": None}
        self.outbox = Outbox(self.app, self.orders, foreign_tasks=True, **options)
        lacking = Celery("outbox_cli", broker=broker_url)
        lacking.finalize()  # as in a worker: it has heard of all its tasks
        self.lacking = Outbox(lacking, self.orders, failure_policy="dead_letter", **options)
        self._broker = broker
        self.environment = {"PROJECT_MONGO": mongo_url, "PROJECT_BROKER": broker_url, "PROJECT_NAMES": self.names}

    def run(self, *arguments: str, text: str = "", **variables: str) -> Done:
        """Run `celery -A app outbox` with arguments."""
        return run("-A", APP, "outbox", *arguments, environment={**self.environment, **variables}, text=text)

    def lines(self, *arguments: str, status: int = 0, **variables: str) -> list[Document]:
        """Run a command with `--json`; what its lines say."""
        done = self.run(*arguments, "--json", **variables)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def task(self, name: str, order: int) -> Any:
        """A task of the project by its name."""
        return self.app.signature(f"{APP}.{name}", args=(order,))

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
        messages = [json.loads(text) for text in reversed(self._broker.lrange("celery", 0, -1))]
        heads = [message["headers"] for message in messages]
        arguments = [json.loads(base64.b64decode(message["body"]))[0] for message in messages]
        return [(head["task"], head["id"], found) for head, found in zip(heads, arguments, strict=True)]

    def replay(self, *arguments: str, status: int = 0, **environment: str) -> list[Document]:
        """Replay dead letters; the answer for each."""
        (answer,) = self.lines("dead-letters", "replay", *arguments, status=status, **environment)
        found: list[Document] = answer["letters"]
        return found

    def make_dead_letter(self, order: int) -> str:
        """Insert an order with a task that the app lacks, and deliver it; the dead letter's id."""
        self.outbox.insert_one({"_id": order}, tasks=[self.task("bill", order)])
        (entry,) = self.entries(order)
        ripen(self.orders, order)
        assert self.lacking.backing.relay.deliver(order).dead == 1
        return str(entry["id"])


@pytest.fixture
def shop(mongo_client: MongoClient[Document], mongo_url: str, redis_url: str, redis_client: Any) -> Iterator[Shop]:
    """Give the project on the session's servers."""
    project = Shop(mongo_client, mongo_url, redis_url, redis_client)
    yield project
    project.outbox.publisher.close()
    for suffix in ("data", "state"):
        empty(mongo_client, f"{project.names}_{suffix}")


# -- status and sweep ------------------------------------------------------------------------------


def test_status_shows_what_waits_and_a_sweep_delivers_it_in_order(shop: Shop) -> None:
    """Two outboxes, one of them with a document whose two tasks were left behind; afterwards nothing waits."""
    shop.outbox.insert_one({"_id": 1}, tasks=[shop.task("receipt", 10), shop.task("receipt", 11)])
    shop.orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.at": LONG_AGO}})

    orders, parcels = shop.lines("status")
    assert (orders["outbox"], orders["documents"], orders["pending"], orders["dead_letters"]) == ("orders", 1, 2, 0)
    assert orders["collection"] == f"{shop.names}_data.orders"
    assert orders["broker"] == {"answers": True, "error": None}
    assert (orders["late"], orders["scheduled"], orders["indexed"]) == (True, True, False)
    assert orders["oldest_seconds"] > 0
    assert [words in " ".join(orders["advice"]) for words in ("APP beat", "index pendingEvents")] == [True, True]
    assert (parcels["outbox"], parcels["pending"], parcels["oldest_seconds"]) == ("parcels", 0, None)
    assert (parcels["late"], parcels["swept_seconds"]) == (False, None)
    assert ["Nobody has swept it yet" in each for each in parcels["advice"]] == [True]

    swept = shop.run("sweep")
    assert (swept.returncode, swept.stderr) == (0, "")
    assert swept.stdout.splitlines() == [
        "orders: 2 dispatched, 0 became dead letters",
        "parcels: 0 dispatched, 0 became dead letters",
    ]
    assert [arguments for _, _, arguments in shop.published()] == [[10], [11]]
    assert shop.entries(1) == []
    (after,) = shop.lines("status", "--name", "orders")
    assert (after["pending"], after["indexed"], after["advice"]) == (0, True, [])


def test_a_broker_that_is_down_is_said_and_ends_a_sweep_with_status_1(shop: Shop) -> None:
    """Status itself ends with 0: what waits is no failure of the command. Its password is not shown."""
    away = f"redis://:secret@{NOWHERE}/0"
    shop.outbox.insert_one({"_id": 1}, tasks=[shop.task("receipt", 1)])

    done = shop.run("status", PROJECT_BROKER=away)
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stdout
    assert "Entries wait in MongoDB" in done.stdout
    assert "APP beat" not in done.stdout, "one cause is enough"
    assert "secret" not in done.stdout + done.stderr

    ((swept,),) = (each["outboxes"] for each in shop.lines("sweep", "--name", "orders", status=1, PROJECT_BROKER=away))
    assert (swept["dispatched"], swept["dead"], swept["left"], swept["broker_down"]) == (0, 0, 1, True)
    assert "secret" not in json.dumps(swept)
    assert len(shop.entries(1)) == 1


# -- check -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_check_fails_until_beat_and_a_worker_sweep(shop: Shop, processes: Processes) -> None:
    """An outbox that only its writers import is swept by nobody; a worker with beat is all it takes."""
    shop.orders.insert_one({"_id": 1})
    for found in shop.lines("check", status=1):
        assert found["ok"] is False
        assert [each["severity"] for each in found["findings"] if each["code"] == "sweep"] == ["failing"]

    processes.celery(APP, "worker", *QUIET, *WITH_BEAT, environment=shop.environment)
    wait_for(lambda: shop.notes.count_documents({}) == 2)

    checked: list[Document] = []

    def is_fine() -> bool:  # not at the first look, where a busy worker answers late
        done = shop.run("check", "--json")
        checked[:] = [json.loads(line) for line in done.stdout.splitlines()]
        return done.returncode == 0

    wait_for(is_fine, message=lambda: str(checked))
    assert [(each["outbox"], each["ok"]) for each in checked] == [("orders", True), ("parcels", True)]
    severities = {each["code"]: each["severity"] for each in checked[0]["findings"]}
    assert severities["sweep"] == "ok"


# -- dead letters ----------------------------------------------------------------------------------


def test_a_dead_letter_is_shown_and_replayed_after_the_app_was_corrected(shop: Shop) -> None:
    """The whole way of an operator; the task has the id that it was stored with, and stands behind later ones."""
    dead_letter = shop.make_dead_letter(7)
    assert shop.entries(7) == []
    listed = shop.run("dead-letters", "list")
    assert dead_letter in listed.stdout
    assert "not registered" in listed.stdout
    assert "parcels: 0 dead letters" in listed.stdout
    (status,) = shop.lines("status", "--name", "orders")
    assert status["dead_letters"] == 1
    assert "dead-letters list" in status["advice"][-1]
    (shown,) = shop.lines("dead-letters", "show", dead_letter)
    assert (shown["id"], shown["document"], shown["entry"]["name"]) == (dead_letter, 7, f"{APP}.bill")
    assert "payload" not in shown["entry"]
    assert "UnknownTaskError" in shown["traceback"]
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
    (status,) = shop.lines("status", "--name", "orders")
    assert (status["unsigned"], "--sign" in " ".join(status["advice"])) == (1, True)
    ((letter,),) = (each["letters"] for each in shop.lines("dead-letters", "list", "--name", "orders"))

    (refused,) = shop.replay("--all", status=1)
    assert (refused["result"], f"replay {letter['id']} --sign" in refused["error"]) == ("refused", True)
    assert shop.run("dead-letters", "replay", "--all", "--sign").returncode == 2
    (done,) = shop.replay(letter["id"], "--sign")
    assert done["result"] == "pending"
    shop.lines("sweep", "--older-than", "0")
    assert [(name, arguments) for name, _, arguments in shop.published()] == [(f"{APP}.receipt", [7])]


def test_a_letter_whose_document_is_gone_is_refused_or_published_without_it(shop: Shop) -> None:
    """The safe way is the default; the other dead letters of the same command are replayed all the same."""
    gone, kept = shop.make_dead_letter(7), shop.make_dead_letter(8)
    shop.orders.delete_one({"_id": 7})

    answers = {each["id"]: each for each in shop.replay("--all", status=1)}

    assert answers[gone]["result"] == "refused"
    assert "--without-document" in answers[gone]["error"]
    assert answers[kept]["result"] == "pending"
    assert shop.orders.count_documents({"_id": 7}) == 0, "nothing is made anew"
    (unknown,) = shop.replay(gone, "--without-document", status=1)
    assert "still cannot be published" in unknown["error"]
    assert shop.dead_letters.count_documents({}) == 1
    (done,) = shop.replay(gone, "--without-document", PROJECT_KNOWS="1")
    assert (done["result"], shop.published()) == ("published", [(f"{APP}.bill", gone, [7])])
    assert shop.dead_letters.count_documents({}) == 0


def test_a_letter_is_discarded_only_on_a_yes(shop: Shop) -> None:
    """What is thrown away is said on standard error: it may be the only trace."""
    dead_letter = shop.make_dead_letter(7)
    shown = shop.run("dead-letters", "show", dead_letter, "--payload").stdout
    assert re.search(rf"document: +7\n(.*\n)*payload: .*{APP}.bill", shown), shown
    assert "UnknownTaskError" in shown

    refused = shop.run("dead-letters", "discard", dead_letter, text="n\n")
    assert refused.returncode == 1
    assert f"{APP}.bill" in refused.stderr
    assert shop.dead_letters.count_documents({}) == 1

    done = shop.run("dead-letters", "discard", dead_letter, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{dead_letter}: discarded\n")
    assert shop.dead_letters.count_documents({}) == 0
    one_sentence(shop.run("dead-letters", "discard", dead_letter, "--yes"), "no dead letter", dead_letter)


# -- what is wrong with the call -------------------------------------------------------------------


@pytest.mark.slow
def test_wrong_calls_end_in_one_sentence(shop: Shop) -> None:
    """No app, no outbox, an outbox or a dead letter that there is not."""
    one_sentence(run("outbox", "status"), "-A", "outbox status")
    one_sentence(run("-A", BARE_APP, "outbox", "sweep"), "no outbox", "Outbox(app")
    one_sentence(shop.run("status", "--name", "ordres"), "'ordres'", "orders, parcels")
    one_sentence(shop.run("dead-letters", "show", "nothing"), "no dead letter", "'nothing'")
    assert shop.run("dead-letters", "replay").returncode == 2


def test_a_server_that_is_away_is_told_within_seconds(shop: Shop) -> None:
    """The address is shown, the password is not."""
    done = shop.run("status", PROJECT_MONGO=f"mongodb://hush:secret@{NOWHERE}/?replicaSet=rs0")
    one_sentence(done, "no answer", NOWHERE)
    assert "secret" not in done.stderr


@pytest.mark.parametrize("command", [["status"], ["sweep"], ["dead-letters", "list"]], ids=" ".join)
def test_a_missing_right_names_the_outbox_its_collections_and_the_cure(
    shop: Shop, guarded_url: UrlOf, command: list[str]
) -> None:
    """Not the bridge's state, which this app does not have."""
    done = shop.run(*command, PROJECT_MONGO=guarded_url("bridge"))
    assert (done.returncode, done.stdout) == (1, "")
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("Error: ")]
    said, *others = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert all("the index pendingEvents" in each for each in warnings)
    assert f"lacks a right on the outbox's collection {shop.names}_data.orders" in said
    assert f"find, insert, update and remove on {shop.names}_state.outbox_dead_letters" in said
    assert "state database" not in said
    assert [f"{shop.names}_data.parcels" in each for each in others] == ([True] if command == ["sweep"] else [])


def test_a_refused_operation_is_not_taken_for_a_missing_replica_set(shop: Shop, failpoint: Failpoint) -> None:
    """IllegalOperation has many meanings; this one is none of a change stream."""
    with failpoint(failCommands=["aggregate"], errorCode=20):
        done = shop.run("status")
    one_sentence(done, "Failing command", f"{shop.names}_data.orders")
    assert "hange stream" not in done.stderr


def test_a_refused_login_is_no_missing_right(shop: Shop, guarded_url: UrlOf) -> None:
    """The cure is in the URL."""
    done = shop.run("status", PROJECT_MONGO=with_a_wrong_password(guarded_url("bridge")))
    one_sentence(done, "refused the login", "authSource")
