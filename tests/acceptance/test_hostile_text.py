"""What documents hold reaches the operator's terminal as text: no escapes, no turned direction, no forged lines."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from mongo_celery.bridge.state.audit import make_record
from mongo_celery.outbox.entries import Entry
from mongo_celery.testing import BridgeRunner
from tests.fixtures.forked import run_on_a_terminal
from tests.fixtures.mongo import empty
from tests.unit.test_visible import HARMFUL, HOSTILE

Document = dict[str, Any]

APP = "tests.acceptance.cli_project"
TEXT = HOSTILE.replace("\ud800", "").replace("[2J", "[3J")  # BSON has no lone surrogates; `top` clears its screen
FORGED = "leading bridge shop"
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|\?(?:25|1049)[hl]|H)")
"""What rich writes for colors, the cursor and the other screen."""

COMMANDS = {
    "changes status": True,
    "changes check": True,
    "changes status --all": True,
    "changes show summarise 0": True,
    "changes history": True,
    "changes dead-letters list": True,
    "changes dead-letters list --full": True,
    "changes dead-letters discard slow": True,
    "changes skip summarise --dry-run": True,
    "changes snapshot stop summarise --dry-run": False,
    "outbox status": False,
    "outbox dead-letters list": True,
    "outbox dead-letters list LETTER": True,
    "outbox dead-letters discard LETTER": True,
    "transactions list --state initial --state done": True,
    "transactions recover --dry-run --all": True,
    "transactions list HOSTILE": True,
}
"""Each command, and whether it shows a document's text."""


@pytest.fixture(scope="module")
def environment(replica_set: Any) -> Iterator[dict[str, str]]:
    """Give a bridge, an outbox and transactions in which everything that a document can name is hostile."""
    names = f"hostile_{uuid4().hex[:10]}"
    given = {
        "PROJECT_MONGO": replica_set.url,
        "PROJECT_BROKER": "memory://",
        "PROJECT_NAMES": names,
        "PROJECT_STATE": f"{names}_state",
        "PROJECT_OPTIONS": '{"partitions": 1, "autodiscover": false}',
        "PROJECT_GROUP": "slow",
    }
    os.environ.update(given)
    project = importlib.import_module(APP)
    with BridgeRunner(project.bridge) as runner, MongoClient[Document](replica_set.url, appname=TEXT[:60]) as client:
        data, state = client[f"{names}_data"], client[project.bridge.wiring.options.database]
        for name in ("orders", "slow"):
            data[name].insert_one({"_id": f"k {TEXT}", "bad": TEXT, TEXT.replace("\n", " "): TEXT})
        runner.deliver(raises=False)
        record = make_record("remove", [TEXT], TEXT, TEXT, [TEXT], {TEXT: TEXT})
        project.bridge.wiring.store.audit.add(record)
        snapshots = project.bridge.wiring.store.snapshots
        snapshots.insert([{"_id": snapshots.make_id("summarise"), "source": data["orders"].full_name, "by": TEXT}])
        state["snapshots"].update_one({}, {"$set": {"state": "failed", "sentence": TEXT}})
        data["invoices"].insert_one(project.outbox.with_tasks({"_id": TEXT}, [project.confirm.s(TEXT)]))
        (entry,) = data["invoices"].find_one()["pendingEvents"]["events"]  # type: ignore[index]
        project.outbox.runtime.dead_letters.add(TEXT, Entry.from_document(entry), ValueError(TEXT))
        stored = {"source": TEXT, "destination": "B", "value": 1, "lastModified": datetime(2020, 1, 1, tzinfo=UTC)}
        more = {"application": TEXT, "reason": TEXT}
        data["transfers"].insert_many(
            [{"_id": f"{at} {TEXT}", "state": at, **stored, **more} for at in ("initial", "pending", "done")]
        )
        yield {**given, "PROJECT_STATE": state.name, "LETTER": entry["id"]}
        project.collection("invoices").database.client.close()
        for suffix in ("data", "state"):
            empty(client, f"{names}_{suffix}")
    for name in given:
        del os.environ[name]
    del sys.modules[APP]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_obeys_no_document(environment: dict[str, str], command: str) -> None:
    """Of every command that shows what documents hold."""
    typed = [environment.get(word, word) for word in command.replace("HOSTILE", "\0").split()]
    typed = [f"done {TEXT}" if word == "\0" else word for word in typed]
    shown = run_on_a_terminal("-A", APP, *typed, environment=environment, keys="n\n")
    plain = OURS.sub("", shown)
    assert not HARMFUL.search(plain), repr(HARMFUL.search(plain))
    assert [line for line in plain.split("\n") if line.startswith(("[2026-01-01", FORGED))] == []
    assert bool(re.search(r"\\(u00|x)1b", plain)) == COMMANDS[command], plain
