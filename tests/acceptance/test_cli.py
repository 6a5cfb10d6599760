"""The command lines of `celery -A app changes`, run as users run them."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.rights import UrlOf, with_a_wrong_password
from tests.rig.project import OPTIONS, Done, MakeProject, Project

Document = dict[str, Any]

APP = "tests.acceptance.cli_project"
BARE_APP = "tests.acceptance.bare_project"
HALVES_APP = "tests.acceptance.halves_project"
NOWHERE = "127.0.0.1:1"
AWAY = {
    "PROJECT_MONGO": f"mongodb://hush:secret@{NOWHERE}/?replicaSet=rs0",
    "PROJECT_BROKER": f"redis://:secret@{NOWHERE}/0",
}
_WORKER = ("worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")


class Shop(Project):
    app = APP
    # What stands stays in the buffer: a slow machine must not make `buffered` a matter of time.
    options = MappingProxyType({**OPTIONS, "partitions": 2, "spill_after": 600, "lease_ttl": 20.0})

    @property
    def orders(self) -> Collection[Document]:
        return self.data["orders"]

    @property
    def summaries(self) -> Collection[Document]:
        return self.data["summaries"]

    def changes(self, *arguments: str, **given: str) -> Done:
        return self.run("changes", *arguments, **given)

    def json(self, *arguments: str, status: int = 0) -> Document:
        return self.answer("changes", *arguments, status=status)

    def findings(self, **variables: str) -> tuple[int, dict[str, Document]]:
        done = self.changes("check", "--json", **variables)
        assert done.stdout, done.stderr
        return done.returncode, {each["code"]: each for each in json.loads(done.stdout)["findings"]}

    def wait_for_findings(self, **levels: str) -> dict[str, Document]:
        """Run `check` until findings have these levels, and return all by name: a worker may be late with an answer."""
        asked: list[dict[str, Document]] = []

        def judged() -> bool:
            asked.append(self.findings()[1])
            return {name: asked[-1].get(name, {}).get("severity") for name in levels} == levels

        wait_for(judged, message=lambda: f"check finds {levels}: {asked[-1]}")
        return asked[-1]

    def start_all(self) -> None:
        self.start("listener", awaited="leading bridge")
        queues = self.changes("queues").stdout.strip()
        self.start(*_WORKER, "-Q", queues, awaited="ready")

    def wait_for_summaries(self, count: int) -> None:
        wait_for(lambda: self.summaries.count_documents({}) >= count, message=f"{count} orders")

    def wait_for_status(self, **wanted: object) -> Document:
        found: Document = {}

        def has_all() -> bool:
            found.update(json.loads(self.changes("status", "--json").stdout))
            return {name: found.get(name) for name in wanted} == wanted

        wait_for(has_all, message=lambda: f"{wanted}: {found}")
        return found

    def wait_for_halt(self, after: int = 0) -> Document:
        query = {"state": "halted", "fencingToken": {"$gt": after}}
        return wait_for(lambda: self.state["partitions"].find_one(query), message="a partition has halted")


@pytest.fixture
def shop(make_project: MakeProject) -> Shop:
    made: Shop = make_project(Shop)
    return made


# -- with a listener and a worker ------------------------------------------------------------------


def test_a_running_bridge_is_shown_paused_and_resumed(shop: Shop) -> None:
    """A pause holds changes back, and a resume lets them go on."""
    shop.start_all()
    shop.orders.insert_one({"_id": 1})
    wait_for(lambda: shop.state["partitions"].find_one({"committed": 1}), message="it is done")
    status = shop.wait_for_status(in_flight=0, buffered=0, lag_seconds=0, caught_up=True, verdict="healthy")
    assert status["state"] == "leading"
    assert status["leader"]["pid"] > 0
    (handler,) = status["handlers"]
    assert sum(each["committed"] for each in handler["partitions"]) == handler["committed"] == 1

    assert shop.json("pause", "--yes")["done"] == 2
    shop.orders.insert_many([{"_id": number} for number in range(2, 8)])
    status = shop.wait_for_status(buffered=6, verdict="degraded")
    assert (status["handlers"][0]["state"], [each["code"] for each in status["findings"]]) == ("paused", ["paused"])
    assert shop.summaries.count_documents({}) == 1
    resumed = shop.changes("resume", "summarise")
    assert (resumed.returncode, resumed.stdout) == (0, "summarise: partitions 0, 1 resumed\n")
    shop.wait_for_summaries(7)

    found = shop.wait_for_findings(consumers="ok", worker_tasks="ok")
    assert not [each for each in found.values() if each["severity"] == "failing"]
    wait_for(lambda: shop.changes("status").stdout.startswith("shop: healthy\n"))


def test_a_change_that_fails_halts_is_retried_and_is_skipped(shop: Shop) -> None:
    """The whole way of an operator, from the loud stop to the next change."""
    shop.start_all()
    shop.orders.insert_one({"_id": "bad", "bad": "a [bad] order"})

    first = shop.wait_for_halt()
    text = shop.changes("status").stdout
    assert "a [bad] order" in text
    level, found = shop.findings()
    assert level == 2
    assert "changes retry summarise " in found["halted"]["commands"][0]
    assert "a [bad] order" in found["halted"]["sentence"]

    forgotten = shop.changes("retry", "--yes", PROJECT_HANDLER="audit")
    assert "summarise" in forgotten.stdout
    assert shop.wait_for_halt()["fencingToken"] == first["fencingToken"]
    one_sentence(shop.changes("retry", "summarise", PROJECT_HANDLER="audit"), "summarise")
    assert shop.json("retry", "--yes")["done"] == 1
    second = shop.wait_for_halt(after=first["fencingToken"])
    assert second["_id"] == first["_id"]

    index = first["_id"].rpartition("/")[2]
    head = shop.json("show", "summarise", index)
    assert (head["status"]["state"], head["token"]) == ("halted", second["halted"]["resumeToken"]["_data"])
    assert head["event"]["fullDocument"] == {"_id": "bad", "bad": "a [bad] order"}
    shown = shop.changes("show", "summarise", index, "--bytes", "9").stdout
    assert ("a [bad] order" in shown, "more characters" in shown) == (True, True)
    other = shop.changes("show", "summarise", str(1 - int(index)))
    assert other.returncode == 1
    assert shop.changes("skip").returncode == 2, "a handler must be named"
    refused = shop.changes("skip", "summarise", index, text="n\n")
    assert refused.returncode == 1
    assert "a [bad] order" in refused.stderr
    assert '"bad": "a [bad] order"' in refused.stderr
    assert shop.wait_for_halt()["fencingToken"] == second["fencingToken"]
    skipped = shop.changes("skip", "summarise", index, text="y\n")
    assert (skipped.returncode, skipped.stdout) == (0, f"summarise: partition {index} skipped\n")
    kept = shop.state["dead_letters"].find_one({"cause": "skipped"}) or {}
    assert kept["change"]["fullDocument"] == head["event"]["fullDocument"]
    shop.orders.insert_many([{"_id": number} for number in range(4)])
    shop.wait_for_summaries(4)
    again = shop.changes("skip", "summarise", index, "--yes")
    assert again.returncode == 1


def test_watch_repeats_one_object_a_line_until_it_is_interrupted(shop: Shop, processes: Processes) -> None:
    """And ends quietly."""
    environment = shop.variables()
    arguments = ("changes", "status", "--json", "--watch", "0.2")
    watching = processes.celery(APP, *arguments, name="watch", environment=environment)
    wait_for(lambda: watching.text.count("\n") >= 3, message="three statuses")
    watching.send(signal.SIGINT)
    assert watching.wait() == 0
    assert all(json.loads(line)["state"] == "never_started" for line in watching.text.splitlines())


# -- what is wrong with the call -------------------------------------------------------------------


def one_sentence(done: Done, *words: str, code: int = 1) -> None:
    """That status, one line on standard error with these words, no traceback, nothing on standard output."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_a_bridge_is_shown_beside_one_whose_server_is_away(shop: Shop) -> None:
    """P16: people and programs see the one that answers, and the status is that of the worst."""
    told = shop.changes("status", app=HALVES_APP)
    assert told.returncode == 2, told.stderr
    assert NOWHERE in told.stdout
    assert "there: " in told.stdout
    plain = shop.changes("status", "--json", app=HALVES_APP)
    assert plain.returncode == 2, plain.stderr
    found = {each["bridge"]: each for each in map(json.loads, plain.stdout.splitlines())}
    assert found["away"]["findings"][0]["code"] == "state_unreadable"
    assert found["there"]["state"] == "never_started"


def test_queues_are_printed_for_q(shop: Shop) -> None:
    """P12: one line, and nothing else; without any server. With a group without handlers it would name no queue."""
    for group, arguments, printed in (
        (None, "", "shop.0,shop.1"),
        (None, "--with-default", "shop.0,shop.1,celery"),
        ("slow", "", "shop.0,shop.1,shop.slow.0,shop.slow.1"),
        ("slow", "--group slow", "shop.slow.0,shop.slow.1"),
        ("slow", "--without-group --with-default", "shop.0,shop.1,celery"),
    ):
        chosen = {"PROJECT_GROUP": group} if group else {}
        done = shop.changes("queues", *arguments.split(), **AWAY, **chosen)
        assert (done.returncode, done.stdout) == (0, f"{printed}\n")
    one_sentence(shop.changes("queues", "--group", "slwo", **AWAY, PROJECT_GROUP="slow"), "'slwo'", "slow")


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        ("check", {"app": BARE_APP}, ("no bridge", "Bridge(app")),
        ("retry", {"app": BARE_APP}, ("no bridge", "Bridge(app")),
        ("status --bridge shpo", AWAY, ("'shpo'", "shop")),
        ("pause", AWAY, (NOWHERE,)),
        ("status", {"PROJECT_SETTINGS": '{"mongo_celery_partition": 4}'}, ("mongo_celery_partitions",)),
        ("check", {"PROJECT_SETTINGS": '{"mongo_celery_partition": 4}'}, ("mongo_celery_partitions",)),
    ],
)
def test_a_wrong_call_is_told_in_one_sentence(
    shop: Shop, command: str, given: dict[str, str], words: tuple[str, ...]
) -> None:
    """P9: with what there is; status 2 where 1 would be that of a verdict, degraded. No password is shown."""
    done = shop.changes(*command.split(), **given)
    one_sentence(done, *words, code=2 if command.split(maxsplit=1)[0] in {"status", "check"} else 1)
    assert "secret" not in done.stderr


def test_without_an_app_the_error_says_how_to_name_one() -> None:
    """`celery` itself goes on with a default app, which has no bridge."""
    one_sentence(run_celery("changes", "show", "x", "1"), "-A", "changes show")


def test_a_module_that_cannot_be_imported_is_not_degraded(shop: Shop) -> None:
    """Status 1 is what goes on by itself; and Python would end with it after any error."""
    for command in ("status", "check"):
        done = shop.changes(command, app=HALVES_APP, PROJECT_INCLUDE="tasks_that_are_gone")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "tasks_that_are_gone" in done.stderr


def test_a_url_that_is_none_is_told_without_its_password(shop: Shop) -> None:
    """Parsers take the rest of an unescaped password for a database or a port, and show it."""
    for url in (f"mongodb://hush:se/cret@{NOWHERE}", "mongodb://hush:cret@localhost:nine", "cret://x"):
        done = shop.changes("status", PROJECT_MONGO=url)
        assert (done.returncode, done.stderr, "shop" in done.stdout) == (2, "", True)
        assert "cret@" not in done.stdout
    statuses = {"changes check": 2, "changes queues": 0, "listener": 1, "outbox status": 2}
    for command, status in statuses.items():
        done = shop.run(*command.split(), PROJECT_BROKER="redis://:cret/se@localhost:6379/0")
        shown = done.stdout + done.stderr
        assert [word for word in ("Traceback", "cret") if word in shown] == [], shown
        assert (done.returncode, "broker_url" in shown) == (status, command != "changes queues")


# -- transactions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "list 1", "recover", "cancel 1 --yes"])
def test_a_missing_right_names_the_transactions_and_the_fix(shop: Shop, guarded_url: UrlOf, command: str) -> None:
    done = shop.run("transactions", *command.split(), PROJECT_MONGO=guarded_url("bridge"))
    one_sentence(done, f"{shop.data.name}.transfers", "find")


def test_a_refused_login_and_a_server_that_is_away_are_no_missing_right(shop: Shop, guarded_url: UrlOf) -> None:
    """The fix is in the URL, of which no password is shown."""
    mistyped = with_a_wrong_password(guarded_url("bridge"))
    one_sentence(shop.run("transactions", "list", PROJECT_MONGO=mistyped), "authSource")
    away = f"mongodb://hush:secret@{NOWHERE}/?serverSelectionTimeoutMS=500"
    done = shop.run("transactions", "list", PROJECT_MONGO=away)
    one_sentence(done, NOWHERE)
    assert "secret" not in done.stderr


def test_what_recovery_would_take_is_listed_by_a_trial(shop: Shop) -> None:
    """The trial changes nothing, and the list shows each unfinished transaction."""
    stored = {"source": "A", "destination": "B", "value": 1, "lastModified": datetime.now(UTC) - timedelta(hours=1)}
    states = ["canceled", "done", "initial", "pending"]
    shop.data["transfers"].insert_many([{"_id": state, "state": state, **stored} for state in states])
    listed = shop.run("transactions", "list", "--json").stdout.splitlines()
    assert {json.loads(each)["_id"] for each in listed} == {"initial", "pending"}
    [found] = shop.answer("transactions", "recover", "--dry-run")["transactions"]
    assert found["_id"] == "pending"
    assert sorted(each["state"] for each in shop.data["transfers"].find()) == states
