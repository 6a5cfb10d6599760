"""The command lines of `celery -A app changes`, run as users run them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import bson
import pytest
from pymongo.collection import Collection

from mongo_celery.bridge.state.backlog import Backlog, StoredChange
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.redis import MakeRedis
from tests.rig.project import OPTIONS, Done, MakeProject, Project

Document = dict[str, Any]

APP = "tests.acceptance.cli_project"
BARE_APP = "tests.acceptance.bare_project"
HALVES_APP = "tests.acceptance.halves_project"
NOWHERE = "127.0.0.1:1"
_COMMAND_SECONDS_MAX = 120.0
_WORKER = ("worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")
_STATUS_KEYS = {
    "bridge",
    "state",
    "leader",
    "term",
    "lag_seconds",
    "oplog_seconds",
    "in_flight",
    "buffered",
    "dead_letters",
    "backlog",
    "handlers",
    "findings",
    "verdict",
}
_HANDLER_KEYS = {"name", "state", "watermark", "lag_seconds", "stored", "partitions"}
_PARTITION_KEYS = {
    "partition",
    "queue",
    "state",
    "committed",
    "fencing_token",
    "claim",
    "retries",
    "stored",
}


class Shop(Project):
    """The project's databases, processes and commands."""

    app = APP
    # What stands stays in the buffer: a slow machine must not make `buffered` a matter of time.
    options = MappingProxyType({**OPTIONS, "partitions": 2, "spill_after": 600})

    @property
    def orders(self) -> Collection[Document]:
        return self.data["orders"]

    @property
    def summaries(self) -> Collection[Document]:
        return self.data["summaries"]

    def changes(self, *arguments: str, **given: str) -> Done:
        """Run `celery -A app changes` with arguments."""
        return self.run("changes", *arguments, **given)

    def json(self, *arguments: str, **variables: str) -> Document:
        """Run a command that must succeed, with `--json`."""
        return self._json(self.changes(*arguments, "--json", **variables), 0)

    def status(self, code: int) -> Document:
        """Run `status`, which must end as the verdict of that status does."""
        return self._json(self.changes("status", "--json"), code)

    @staticmethod
    def _json(done: Done, code: int) -> Document:
        assert done.returncode == code, done.stdout + done.stderr
        answer: Document = json.loads(done.stdout)
        return answer

    def findings(self, **variables: str) -> tuple[int, dict[str, Document]]:
        """Run `check`; the exit status, and the findings by name."""
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
        """Start a listener and a worker that gets its queues from the command."""
        self.start("listener", awaited="leading bridge")
        queues = self.changes("queues").stdout.strip()
        self.start(*_WORKER, "-Q", queues, awaited="ready")

    def wait_for_summaries(self, count: int) -> None:
        """Wait until so many orders have been handled."""
        wait_for(lambda: self.summaries.count_documents({}) >= count, message=f"{count} orders")

    def wait_for_report(self, **wanted: object) -> None:
        """Wait until the listener has reported these values from now on."""
        asked = self.state.client.admin.command("hello")["localTime"]

        def reported() -> bool:
            lease = self.state["leases"].find_one({"renewedAt": {"$gt": asked}}) or {"report": {}}
            return all((lease.get("report") or {}).get(name) == value for name, value in wanted.items())

        wait_for(reported, message=f"a report of {wanted}")

    def wait_for_commits(self, count: int) -> None:
        """Wait until so many changes have been committed."""

        def committed() -> bool:
            numbers = [int(each["committed"]) for each in self.state["partitions"].find()]
            return sum(numbers) >= count

        wait_for(committed, message=f"{count} commits")

    def store_head(self, partition: Document) -> None:
        """Let the order at which a partition has halted be stored, as its execution or the listener does it."""
        event = {
            "_id": partition["halted"]["resumeToken"],
            "operationType": "insert",
            "ns": {"db": f"{self.names}_data", "coll": "orders"},
            "documentKey": {"_id": "bad"},
            "fullDocument": {"_id": "bad", "bad": True},
        }
        backlog = Backlog(self.state["backlog"], "shop", ttl=60.0)
        change = StoredChange(partition["halted"]["resumeToken"]["_data"], bson.encode(event))
        backlog.insert(partition["_id"], [change], partition["term"])

    def wait_for_halt(self, after: int = 0) -> Document:
        """Wait until a partition has halted under a larger fence than that, and return its document."""
        query = {"state": "halted", "fencingToken": {"$gt": after}}
        return wait_for(lambda: self.state["partitions"].find_one(query), message="a partition has halted")


@pytest.fixture
def shop(make_project: MakeProject) -> Shop:
    """Give the project on the session's servers, with nothing started."""
    made: Shop = make_project(Shop)
    return made


# -- with a listener and a worker ------------------------------------------------------------------


def test_a_running_bridge_is_shown_paused_and_resumed(shop: Shop) -> None:
    """Status with all its keys; a pause holds changes back, and a resume lets them go on."""
    shop.start_all()
    shop.orders.insert_one({"_id": 1})
    shop.wait_for_summaries(1)
    shop.wait_for_commits(1)
    shop.wait_for_report(inFlight=0, buffered=0, caughtUp=True)
    status = shop.json("status")
    assert (status["in_flight"], status["buffered"], status["lag_seconds"]) == (0, 0, 0)
    assert set(status) >= _STATUS_KEYS
    assert status["state"] == "leading"
    assert status["leader"]["pid"] > 0
    (handler,) = status["handlers"]
    assert sum(each["committed"] for each in handler["partitions"]) == handler["committed"] == 1
    assert set(handler) >= _HANDLER_KEYS
    assert all(set(each) >= _PARTITION_KEYS for each in handler["partitions"])

    assert shop.json("pause", "--yes")["done"] == 2
    shop.orders.insert_many([{"_id": number} for number in range(2, 8)])
    shop.wait_for_report(buffered=6)
    status = shop.status(1)
    assert (status["buffered"], status["handlers"][0]["state"]) == (6, "paused")
    assert (status["verdict"], [each["code"] for each in status["findings"]]) == ("degraded", ["paused"])
    assert shop.summaries.count_documents({}) == 1
    resumed = shop.changes("resume", "summarise")
    assert (resumed.returncode, resumed.stdout) == (0, "summarise: resumed 0, 1\n")
    shop.wait_for_summaries(7)

    found = shop.wait_for_findings(consumers="ok", worker_tasks="ok")
    assert not [each for each in found.values() if each["severity"] == "failing"]
    assert shop.changes("status").stdout.startswith("shop: healthy\n")


def test_a_change_that_fails_halts_is_retried_and_is_skipped(shop: Shop) -> None:
    """The whole way of an operator, from the loud stop to the next change."""
    shop.start_all()
    shop.orders.insert_one({"_id": "bad", "bad": True})

    first = shop.wait_for_halt()
    text = shop.changes("status").stdout
    assert "a [bad] order" in text
    level, found = shop.findings()
    assert level == 2
    assert "changes retry summarise " in found["halted"]["commands"][0]
    assert "a [bad] order" in found["halted"]["sentence"]

    forgotten = shop.changes("retry", "--yes", PROJECT_HANDLER="audit")
    assert "no handler in this app" in forgotten.stdout
    assert "Nothing to do" in forgotten.stdout
    one_sentence(shop.changes("retry", "summarise", PROJECT_HANDLER="audit"), "no handler in this app")
    assert shop.json("retry", "--yes")["done"] == 1
    second = shop.wait_for_halt(after=first["fencingToken"])
    assert second["_id"] == first["_id"]

    index = first["_id"].rpartition("/")[2]
    shop.store_head(second)
    head = shop.json("show", "summarise", index)
    assert (head["status"]["state"], head["token"]) == ("halted", second["halted"]["resumeToken"]["_data"])
    assert head["event"]["fullDocument"] == {"_id": "bad", "bad": True}
    shown = shop.changes("show", "summarise", index, "--bytes", "9").stdout
    assert ("a [bad] order" in shown, "more characters" in shown) == (True, True)
    other = shop.changes("show", "summarise", str(1 - int(index)))
    assert (other.returncode, "is not blocked" in other.stderr) == (1, True)
    assert shop.changes("skip").returncode == 2, "a handler must be named"
    refused = shop.changes("skip", "summarise", index, text="n\n")
    assert refused.returncode == 1
    assert "a [bad] order" in refused.stderr
    assert '"bad": true' in refused.stderr
    assert shop.wait_for_halt()["fencingToken"] == second["fencingToken"]
    skipped = shop.changes("skip", "summarise", index, text="y\n")
    assert (skipped.returncode, skipped.stdout) == (0, f"summarise: skipped {index}\n")
    shop.orders.insert_many([{"_id": number} for number in range(4)])
    shop.wait_for_summaries(4)
    again = shop.changes("skip", "summarise", index, "--yes")
    assert again.returncode == 1
    assert "not halted" in again.stderr


def test_watch_repeats_one_object_a_line_until_it_is_interrupted(shop: Shop, processes: Processes) -> None:
    """And ends quietly."""
    environment = shop.variables()
    arguments = ("changes", "status", "--json", "--watch", "0.2")
    watching = processes.celery(APP, *arguments, name="watch", environment=environment)
    wait_for(lambda: watching.text.count("\n") >= 3, message="three statuses")
    watching.send(signal.SIGINT)
    assert watching.wait() == 0
    assert all(json.loads(line)["state"] == "never_started" for line in watching.text.splitlines())


# -- queues ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "arguments", "printed"),
    [
        (None, "", "shop.0,shop.1"),
        (None, "--with-default", "shop.0,shop.1,celery"),
        ("slow", "", "shop.0,shop.1,shop.slow.0,shop.slow.1"),
        ("slow", "--group slow", "shop.slow.0,shop.slow.1"),
        ("slow", "--without-group --with-default", "shop.0,shop.1,celery"),
        (None, "--group slow", "No handler is in group 'slow'. No handler has a group."),
        ("slow", "--group slwo", "No handler is in group 'slwo'. The groups are slow."),
    ],
)
def test_queues_are_printed_for_q(shop: Shop, group: str | None, arguments: str, printed: str) -> None:
    """P12: one line, and nothing else; without any server. With a group without handlers it would name no queue."""
    away = {"PROJECT_MONGO": f"mongodb://{NOWHERE}", "PROJECT_BROKER": f"redis://{NOWHERE}"}
    chosen = {"PROJECT_GROUP": group} if group else {}
    done = shop.changes("queues", *arguments.split(), **away, **chosen)
    if printed.startswith("shop."):
        assert (done.returncode, done.stdout) == (0, f"{printed}\n")
    else:
        one_sentence(done, printed)


# -- check -----------------------------------------------------------------------------------------


def test_check_finds_a_redis_that_throws_tasks_away(shop: Shop, make_redis: MakeRedis) -> None:
    """It is failing, and so status 2."""
    redis = make_redis(options=["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"])
    level, found = shop.findings(PROJECT_BROKER=redis.url)
    assert level == 2
    assert found["redis_eviction"]["severity"] == "failing"
    assert "noeviction" in found["redis_eviction"]["sentence"]
    assert found["redis_persistence"]["severity"] == "degraded"


def test_check_finds_queues_without_consumer_and_workers_without_tasks(shop: Shop) -> None:
    """A worker of another app on one of our queues does both harms."""
    shop.start(*_WORKER, "-Q", "shop.0,celery", app=BARE_APP, awaited="ready")
    found = shop.wait_for_findings(consumers="failing", worker_tasks="failing")
    assert "shop.1" in found["consumers"]["sentence"]
    assert "summarise" in found["worker_tasks"]["sentence"]


# -- what is wrong with the call -------------------------------------------------------------------


def one_sentence(done: Done, *words: str, code: int = 1) -> None:
    """That status, one line on standard error with these words, no traceback, nothing on standard output."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    assert all(word in lines[0] for word in words), lines[0]


def code_of(command: str) -> int:
    """The status with which a command ends that cannot do its work: where it is a verdict's, 1 would be degraded."""
    return 2 if command in {"status", "check"} else 1


@pytest.mark.parametrize("command", ["status", "show x 1"])
def test_without_an_app_the_error_says_how_to_name_one(command: str) -> None:
    """`celery` itself goes on with a default app, which has no bridge."""
    one_sentence(
        run_celery("changes", *command.split()), "-A", f"changes {command.split(maxsplit=1)[0]}", code=code_of(command)
    )


@pytest.mark.parametrize("command", ["check", "retry"])
def test_an_app_without_a_bridge_is_told_how_to_make_one(command: str) -> None:
    """The name of the class is the cure."""
    one_sentence(run_celery("-A", BARE_APP, "changes", command), "no bridge", "Bridge(app", code=code_of(command))


def test_an_unknown_bridge_is_told_with_those_that_exist(shop: Shop) -> None:
    """Nothing is connected for it."""
    done = shop.changes("status", "--bridge", "shpo", PROJECT_MONGO=f"mongodb://{NOWHERE}")
    one_sentence(done, "'shpo'", "shop", code=2)


def test_an_unreachable_server_is_one_sentence(shop: Shop) -> None:
    """The address is shown, the password is not."""
    done = shop.changes("pause", PROJECT_MONGO=f"mongodb://hush:secret@{NOWHERE}/?replicaSet=rs0")
    one_sentence(done, "no answer", NOWHERE)
    assert "secret" not in done.stderr


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


@pytest.mark.parametrize("command", ["status", "check"])
def test_an_unknown_setting_is_a_mistake_of_the_code(shop: Shop, command: str) -> None:
    """P9: a finding about the state would send people to MongoDB."""
    done = shop.changes(command, PROJECT_SETTINGS='{"mongo_celery_partition": 4}')
    one_sentence(done, "mongo_celery_partition", "mongo_celery_partitions", code=2)


@pytest.mark.parametrize("command", ["status", "check"])
def test_a_module_that_cannot_be_imported_is_not_degraded(shop: Shop, command: str) -> None:
    """Status 1 is what goes on by itself; and Python would end with it after any error."""
    done = shop.changes(command, app=HALVES_APP, PROJECT_INCLUDE="tasks_that_are_gone")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "ModuleNotFoundError: No module named 'tasks_that_are_gone'" in done.stderr


def test_check_goes_on_when_no_server_answers(shop: Shop) -> None:
    """Both absences are findings."""
    away = f"redis://:secret@{NOWHERE}/0"
    level, found = shop.findings(PROJECT_MONGO=f"mongodb://hush:secret@{NOWHERE}", PROJECT_BROKER=away)
    assert level == 2
    assert found["state_unreadable"]["severity"] == found["broker"]["severity"] == "failing"
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("url", [f"mongodb://hush:se/cret@{NOWHERE}", "mongodb://hush:cret@localhost:nine", "cret://x"])
def test_a_url_that_is_none_is_told_without_its_password(shop: Shop, url: str) -> None:
    """Drivers take the rest of an unescaped password for a database, and show it."""
    done = shop.changes("status", PROJECT_MONGO=url)
    assert (done.returncode, done.stderr, "URL of bridge shop is not valid" in done.stdout) == (2, "", True)
    assert "cret@" not in done.stdout


@pytest.mark.parametrize("command", [("changes", "check"), ("changes", "queues"), ("listener",), ("outbox", "status")])
def test_a_broker_url_that_is_none_is_told_without_its_password(shop: Shop, command: tuple[str, ...]) -> None:
    """Its parser takes what is before an unescaped slash for a port, and shows it."""
    variables = {**shop.variables(), "PROJECT_BROKER": "redis://:cret/se@localhost:6379/0"}
    done = run_celery("-A", APP, *command, environment=variables)
    shown = done.stdout + done.stderr
    assert not {"Traceback", "cret"} & {word for word in ("Traceback", "cret") if word in shown}, shown
    assert ("broker_url is not valid" in " ".join(shown.split())) == (command[-1] in {"check", "listener"})


def test_celery_help_shows_the_commands_without_importing_pymongo() -> None:
    """Every `celery` command of every project loads the plug-ins."""
    code = (
        "import sys; from celery.bin.celery import celery; celery(['--help'], standalone_mode=False); "
        "print([name for name in ('pymongo', 'bson', 'rich', 'mongo_celery.cli.changes') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_COMMAND_SECONDS_MAX, check=True
    )
    assert re.search(r"listener +Listen to MongoDB", done.stdout)
    assert re.search(r"changes +Show and control", done.stdout)
    assert done.stdout.splitlines()[-1] == "['mongo_celery.cli.changes']"
