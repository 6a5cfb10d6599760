"""One verdict, by commands as people run them; what it prints cures what it says, typed as it is printed."""

from __future__ import annotations

import json
import shlex
from datetime import timedelta
from typing import Any

import pytest

from tests.acceptance.test_cli import APP, Shop
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.redis import MakeRedis
from tests.integration.guarded import GuardedMongo
from tests.rig.project import Done, MakeProject

Document = dict[str, Any]
_WORKER = ("worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat")


@pytest.fixture
def shop(make_project: MakeProject) -> Shop:
    """Give the project on the session's servers, with nothing started."""
    made: Shop = make_project(Shop)
    return made


def health(shop: Shop, **variables: str) -> tuple[int, Document]:
    """The exit status of `status --ask --json`, and what it shows."""
    done = shop.changes("status", "--ask", "--json", **variables)
    assert done.stdout, done.stderr
    found: Document = json.loads(done.stdout)
    assert done.returncode == {"healthy": 0, "degraded": 1, "failing": 2}[found["verdict"]]
    assert "Traceback" not in done.stderr
    return done.returncode, found


def one_reason(shop: Shop) -> tuple[int, list[Document]] | None:
    """What `health` ends with and its reason, where it has just one."""
    code, found = health(shop)
    return (code, found["findings"]) if len(found["findings"]) == 1 else None


def wait_healthy(shop: Shop) -> None:
    """Wait until the bridge is said to be healthy; by people's form, too."""
    said: list[str] = []

    def healthy() -> bool:
        done = shop.changes("status", "--ask")
        said.append(done.stdout)
        return (done.returncode, done.stdout.splitlines()[0]) == (0, "shop: healthy")

    wait_for(healthy, message=lambda: f"health: {said}")


def as_printed(shop: Shop, command: str) -> Done:
    """Run a command line that was printed."""
    program, *words = shlex.split(command)
    assert program == "celery"
    return run_celery(*words, environment=shop.variables())


def test_a_halt_is_cured_by_the_command_that_was_printed(shop: Shop) -> None:
    """From the first look to the last: failing, with the change and its error; the cause is cured; healthy again."""
    shop.start_all()
    shop.orders.insert_one({"_id": 1})
    shop.wait_for_summaries(1)
    wait_healthy(shop)
    wait_for(lambda: json.loads(shop.changes("status", "--json").stdout)["verdict"] == "healthy", message="status")

    shop.orders.insert_one({"_id": 2, "customer": "ann"})
    index = shop.wait_for_halt()["_id"].rpartition("/")[2]
    # A worker that is late with its answer, on a busy machine, would be a second reason.
    code, (reason,) = wait_for(lambda: one_reason(shop), message="the halt is all that is wrong")
    assert (code, reason["code"], reason["severity"]) == (2, "halted", "failing")
    assert "LookupError: no such customer" in reason["sentence"]
    assert reason["commands"][0] == f"celery -A {APP} changes retry summarise {index}"
    told = shop.changes("status")
    assert (told.returncode, f"  {reason['commands'][0]}\n" in told.stdout) == (2, True)
    checked = shop.changes("check")
    assert (checked.returncode, reason["commands"][0] in checked.stdout) == (2, True)

    shop.summaries.database["customers"].insert_one({"_id": "ann"})
    cured = as_printed(shop, reason["commands"][0])
    assert (cured.returncode, cured.stdout) == (0, f"summarise: retried {index}\n")
    shop.wait_for_summaries(2)
    wait_healthy(shop)


def test_nobody_who_leads_and_nobody_who_works_are_seen(shop: Shop) -> None:
    """From before the first start: each is told with the command that starts what is missing."""
    code, found = health(shop)
    start, work = f"celery -A {APP} listener", f"celery -A {APP} worker"
    assert (code, {each["code"]: each["commands"] for each in found["findings"]}) == (
        1,
        {"never_started": [start], "no_worker": [work]},
    )
    assert shop.status(1)["findings"][0]["code"] == "never_started"

    shop.start("listener", awaited="leading bridge")
    listener = shop._processes.started[-1]
    shop.orders.insert_one({"_id": 1})
    shop.wait_for_report(inFlight=1)
    code, found = health(shop)
    told = [(each["code"], each["commands"]) for each in found["findings"]]
    # The oplog, which others fill, may roll over where this bridge begins, which is worse.
    others = [each for each in told if each[0] != "history_at_risk"]
    assert others == [("no_worker", [work])]
    assert code == 2 or told != others
    level, findings = shop.findings()
    assert (level, findings["no_worker"]["severity"]) == (2, "failing")

    listener.wait_for_output("no worker takes messages from .* no worker answers")
    wait_for(lambda: "no_worker" in codes_of_status(shop), message="what asks nobody says it, too")
    shop.start(*_WORKER, awaited="ready")
    shop.wait_for_summaries(1)
    wait_healthy(shop)
    assert listener.text.count("no worker takes messages from") == 1


def codes_of_status(shop: Shop) -> set[str]:
    """What `status` says, which reads MongoDB alone; its verdict is failing or not yet."""
    found: Document = json.loads(shop.changes("status", "--json").stdout)
    return {each["code"] for each in found["findings"] if each["severity"] == "failing"}


def test_workers_that_consume_other_queues_are_told_once(shop: Shop) -> None:
    """P16: in the listener's log with the command, and in every verdict, also of what asks nobody."""
    shop.start(*_WORKER, "-Q", "default,mail", awaited="ready")
    shop.start("listener", awaited="leading bridge")
    listener = shop._processes.started[-1]
    shop.orders.insert_one({"_id": 1})
    said = listener.wait_for_output("no worker takes messages from .*consume other queues.* Start a worker: (.*)")
    assert "worker -Q" in said[1]
    wait_for(lambda: "consumers" in codes_of_status(shop), message="what asks nobody says it, too")
    shop.start(*_WORKER, awaited="ready")
    shop.wait_for_summaries(1)
    wait_healthy(shop)
    assert listener.text.count("no worker takes messages from") == 1
    wait_for(lambda: slots(shop) == 1, message="the worker says how many calls it runs at a time")
    assert shop.findings()[1]["time_limits"]["severity"] == "degraded"


def slots(shop: Shop) -> int | None:
    """How many calls the workers can run at a time, as they answer; None while one is late with that."""
    found: int | None = (health(shop)[1]["workers"] or {}).get("slots")
    return found


@pytest.mark.slow
def test_a_listener_that_is_gone_is_failing_after_the_time_of_a_deploy(shop: Shop, processes: Processes) -> None:
    """And not before; the state alone says so."""
    shop.start("listener", awaited="leading bridge")
    processes.started[-1].terminate()
    status = shop.status(1)
    assert (status["state"], [each["code"] for each in status["findings"]]) == ("no_listener", ["no_listener"])
    leases = shop.state["leases"]
    renewed = (leases.find_one() or {})["renewedAt"]
    leases.update_one({}, {"$set": {"renewedAt": renewed - timedelta(minutes=5)}})
    status = shop.status(2)
    (reason,) = status["findings"]
    assert "5 min" in reason["sentence"]
    shop.start(*shlex.split(reason["commands"][0])[3:], awaited="leading bridge")
    assert shop.json("status")["state"] == "leading"


@pytest.mark.slow
def test_a_refused_login_is_failing_and_shows_no_password(shop: Shop, make_redis: MakeRedis) -> None:
    """Of MongoDB, and of the broker; in one sentence, and in `check`."""
    with GuardedMongo() as server:
        url = server.add_user("hush", ("readWrite", f"{shop.names}_state"), ("read", f"{shop.names}_data"))
        wrong = url.replace("hush:hush", "hush:wrong")
        code, found = health(shop, PROJECT_MONGO=wrong)
        told = shop.changes("status", "--ask", PROJECT_MONGO=wrong)
        level, findings = shop.findings(PROJECT_MONGO=wrong)
    (reason,) = found["findings"]
    assert (code, reason["code"], reason["commands"], "login" in reason["sentence"]) == (
        2,
        "state_unreadable",
        [],
        True,
    )
    assert (told.returncode, told.stderr) == (2, "")
    assert (level, "login" in findings["state_unreadable"]["sentence"]) == (2, True)
    assert "wrong" not in told.stdout + json.dumps([found, findings])

    redis = make_redis(options=["--requirepass", "hush"])
    refused = redis.url.replace("redis://", "redis://:wrong@")
    code, found = health(shop, PROJECT_BROKER=refused)
    assert (code, found["findings"][0]["code"]) == (2, "broker")
    level, findings = shop.findings(PROJECT_BROKER=refused)
    assert (level, findings["broker"]["severity"]) == (2, "failing")
    assert "wrong" not in json.dumps([found, findings])
