"""
Every command that a finding prints, typed as it is printed, on one bridge that goes from state to state.

Listener, worker, MongoDB and Redis are real. A state that takes minutes or another machine is written into the state
database, as whoever brings it about would write it.
"""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64
from pymongo import MongoClient

from mongo_celery.bridge.state.backlog import Backlog, StoredChange
from tests.acceptance.test_cli import _WORKER, APP, Shop
from tests.fixtures.forked import run_celery
from tests.fixtures.process import Processes, ProjectProcess, wait_for
from tests.rig.project import Done, MakeProject
from tests.unit.test_verdict import CASES, judged

Document = dict[str, Any]

_HANDLERS = {"summarise", "retired"}


def shape(command: str) -> str:
    """What is left of a command without the names of one bridge."""
    *_, rest = shlex.join(shlex.split(command)).split(" ", 3)
    words = shlex.split(rest)
    after = ["", *words]
    known = ["DB.COLLECTION" if before == "--source" else word for before, word in zip(after, words, strict=False)]
    return " ".join("HANDLER" if word in _HANDLERS else "PARTITION" if word.isdigit() else word for word in known)


class Typist(Shop):
    """The project, and somebody who types what it prints."""

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.typed: set[str] = set()

    def look(self, *codes: str, ask: bool = False, elsewhere: dict[str, str] | None = None) -> dict[str, list[str]]:
        """Wait until the status has these findings; what they print, by code."""
        found: dict[str, list[str]] = {}
        words = ["status", "--json", *(["--ask"] if ask else [])]

        def has_all() -> bool:
            found.clear()
            for each in json.loads(self.changes(*words, **(elsewhere or {})).stdout)["findings"]:
                found.setdefault(each["code"], []).extend(each["commands"])
            return found.keys() >= set(codes)

        wait_for(has_all, message=lambda: f"{codes}, and there are {found}")
        return found

    def wait_gone(self, code: str) -> None:
        def is_gone() -> bool:
            found = json.loads(self.changes("status", "--ask", "--json").stdout)["findings"]
            return code not in {each["code"] for each in found}

        wait_for(is_gone, message=code)

    def enter(self, command: str, text: str = "", code: int = 0, **variables: str) -> Done:
        """Type a command line that was printed; it ends with this status."""
        self.typed.add(shape(command))
        done = run_celery(*shlex.split(command)[1:], environment=self.variables(None, **variables), text=text)
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done

    def begin(self, command: str, awaited: str, **variables: str) -> ProjectProcess:
        """Type a command line that starts a process; a command in it is typed first, as a shell does."""
        self.typed.add(shape(command))
        line = re.sub(r'"\$\((.*?)\)"', lambda inner: shlex.quote(self.enter(inner[1]).stdout.strip()), command)
        program, option, app, *words = shlex.split(line)
        assert (program, option) == ("celery", "-A")
        process = self._processes.celery(app, *words, environment=self.variables(None, **variables))
        process.wait_for_output(awaited)
        return process

    def partition(self, index: int) -> Document:
        found: Document = self.state["partitions"].find_one({"handler": "summarise", "partition": index}) or {}
        return found

    def write_retry(self, index: int, **retry: Any) -> None:
        self.state["partitions"].update_one({"handler": "summarise", "partition": index}, {"$set": {"retry": retry}})

    def halt(self, order: str) -> int:
        """Write an order whose customer is missing; the partition that halts at it."""
        self.orders.insert_one({"_id": order, "customer": order})
        return int(self.wait_for_halt()["partition"])

    def leave_behind(self, name: str) -> None:
        """Let a handler that no code has any more be stored, with a stored change."""
        handler = self.state["handlers"].find_one({"handler": "summarise"}) or {}
        self.state["handlers"].insert_one({**handler, "_id": f"shop/{name}", "handler": name})
        one = self.state["partitions"].find_one({"handler": "summarise"}) or {}
        where = f"shop/{name}/{handler['partitioning']['term']}/0"
        stored = StoredChange("82FF", b"a change")
        mark = {"to": stored.data, "since": datetime.now(UTC), "reason": "halted"}
        self.state["partitions"].insert_one({**one, "_id": where, "handler": name, "partition": 0, "stored": mark})
        Backlog(self.state["backlog"], "shop", ttl=60.0).insert(where, [stored], one["term"])

    def snapshot(self, name: str, source: str, state: str) -> None:
        """Let a snapshot have ended."""
        numbers = {each: Int64(0) for each in ("term", "begun", "moved", "passed", "done")}
        record = {"bridge": "shop", "handler": "summarise", "source": source, "state": state, "sentence": "why"}
        known = {"_id": f"shop/summarise/{name}", "since": datetime.now(UTC), **record, **numbers}
        self.state["snapshots"].insert_one(known)


@pytest.fixture
def shop(make_project: MakeProject) -> Typist:
    made: Typist = make_project(Typist)
    return made


def test_every_command_that_a_finding_prints_does_what_the_finding_says(shop: Typist) -> None:
    """P16: what is printed runs as it is, and helps."""
    listener = start(shop)
    move_partitions(shop)
    give_up(shop)
    listener.terminate()
    lose_history(shop)
    lead_again(shop)
    look_closer(shop)
    found = [finding for of in CASES.values() for case in of for finding in judged(case).findings]
    printed = {(each.code, shape(command)) for each in found for command in each.commands}
    assert {each for each in printed if each[1] not in shop.typed} == set()
    assert {code for code, _ in printed} >= {"halted", "no_worker", "snapshot_failed", "dead_letters"}


def start(shop: Typist) -> ProjectProcess:
    """From before the first start: listener and workers."""
    found = shop.look("never_started", "no_worker", ask=True)
    listener = shop.begin(found["never_started"][0], "leading bridge")
    worker = shop.begin(found["no_worker"][0], "shop.0")
    shop.wait_gone("no_worker")
    worker.terminate()
    shop.start(*_WORKER, "-Q", "mail", awaited="ready")
    (_, with_queues) = shop.look("consumers", ask=True)["consumers"]
    shop.orders.insert_one({"_id": "first"})
    listener.wait_for_output("no worker takes messages from .* Start a worker: ")
    shop.look("consumers")  # also of what asks nobody
    shop.begin(with_queues, "shop.0")
    shop.wait_for_summaries(1)
    wait_for(lambda: shop.state["partitions"].find_one({"committed": 1}), message="a commit ends retries, too")
    return listener


def move_partitions(shop: Typist) -> None:
    """Halted, retrying, waiting for a server, paused: each is ended by its command."""
    halted = shop.halt("ann")
    later = datetime.now(UTC) + timedelta(hours=3)
    shop.write_retry(1 - halted, count=Int64(1), notBefore=later, error="ConnectionError: later")
    found = shop.look("halted", "retrying")
    retry, show, skip = found["halted"]
    assert "LookupError: no such customer" in shop.enter(show).stdout
    shop.summaries.database["customers"].insert_one({"_id": "ann"})
    assert shop.enter(retry).stdout == f"summarise: partition {halted} retried\n"
    shop.wait_for_summaries(2)
    shop.enter(found["retrying"][0])
    assert shop.partition(1 - halted).get("retry") is None

    waiting = {"since": datetime.now(UTC), "cause": "AutoReconnect: gone", "count": Int64(9)}
    shop.write_retry(1 - halted, count=Int64(0), notBefore=later, waiting=waiting)
    shop.enter(shop.look("waiting")["waiting"][0])
    assert shop.partition(1 - halted).get("retry") is None

    assert shop.halt("bob") in (0, 1)
    _, _, skip = shop.look("halted")["halted"]
    assert "Move 1 halted change to the dead letters?" in shop.enter(skip, text="y\n").stderr
    assert shop.state["dead_letters"].count_documents({"handler": "summarise"}) == 1
    shop.changes("pause", "summarise")
    found = shop.look("paused", "dead_letters")
    assert "LookupError: no such customer" in shop.enter(found["dead_letters"][0]).stdout
    shop.enter(found["paused"][0])
    assert shop.partition(0)["state"] == shop.partition(1)["state"] == "flowing"


def give_up(shop: Typist) -> None:
    """Snapshots that have ended, a handler that is gone, and a listener with another definition."""
    source = f"{shop.names}_data.orders"
    shop.summaries.database["customers"].insert_one({"_id": "bob"})  # else its order halts as a snapshot row
    shop.snapshot("a", source, "failed")
    shop.snapshot("b", f"{shop.names}_data.gone", "source gone")
    shop.leave_behind("retired")
    shop.state["leases"].update_one({}, {"$set": {"identity.handlers.summarise.digest": "0"}})
    found = shop.look("snapshot_failed", "unregistered", "definitions")
    for command in found["snapshot_failed"]:
        shop.enter(command)
    state = {each["source"]: each["state"] for each in shop.state["snapshots"].find()}
    assert (state[source] in {"running", "done"}, state[f"{shop.names}_data.gone"]) == (True, "stopped")
    assert shop.enter(found["unregistered"][0], text="n\n", code=1).stdout == ""
    shop.enter(found["unregistered"][0], text="y\n")
    assert shop.state["partitions"].count_documents({"handler": "retired"}) == 0
    shop.begin(found["definitions"][0], "standing by").terminate()


def lose_history(shop: Typist) -> None:
    """A position that the oplog no longer reaches: a decision."""
    handler = shop.state["handlers"].find_one({"handler": "summarise"}) or {}
    start = handler["startAtOperationTime"]
    at = max(start, handler.get("clusterTime") or start)
    lost = {"since": datetime.now(UTC), "at": at, "oldest": Timestamp(at.time + 1, 1), "error": "it has rolled over"}
    shop.state["handlers"].update_one({"_id": handler["_id"]}, {"$set": {"lost": lost}})
    oldest, now = shop.look("history_lost")["history_lost"]
    assert "lost" in (shop.state["handlers"].find_one({"handler": "summarise"}) or {})
    assert shop.enter(f"{now} --dry-run").stdout.startswith("summarise: the oplog no longer reaches")
    shop.typed.add(shape(now))
    shop.enter(oldest, text="y\n")
    assert "lost" not in (shop.state["handlers"].find_one({"handler": "summarise"}) or {})


def lead_again(shop: Typist) -> None:
    """No listener, and a broker that has moved."""
    start = shop.look("no_listener")["no_listener"][0]
    again = shop.begin(start, "leading bridge")
    moved = {"PROJECT_BROKER": f"{shop.environment['PROJECT_BROKER'].rpartition('/')[0]}/1"}
    assert shop.look("identity", elsewhere=moved)["identity"] == [], "people decide first"
    again.terminate()
    shop.begin(f"{start} --take-over", "leading bridge", **moved).terminate()


def look_closer(shop: Typist) -> None:
    """Commands that only look: what they end with is the verdict."""
    command = f"celery -A {APP} changes"
    assert "Partitions:" in shop.enter(f"{command} status --all", code=2).stdout
    assert "oplog" in shop.enter(f"{command} check", code=2).stdout
    assert "createRole" in shop.enter(f"{command} grants").stdout
    # Typed above for one partition; for several, findings name none.
    for verb in ("retry", "resume"):
        shop.enter(f"{command} {verb} summarise")
        shop.enter(f"{command} {verb}", text="y\n")
    shop.enter(f"{command} retry summarise 0", code=1)
    shop.enter(f"{command} resume summarise 0")
