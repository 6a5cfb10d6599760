"""Audit records: each command that changes the state says who did it, when, with what effect and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import bson
import click
import pytest
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.bridge.operations.acts import read_history
from mongo_celery.bridge.state.audit import COLLECTION, KEPT_SECONDS, AuditRecords
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.cli.changes import changes
from mongo_celery.cli.listener import listener
from mongo_celery.errors import CommandRefusedError, DeploymentError
from tests.integration.test_rewinds import plain, run
from tests.rig.changes import Document, letter_of
from tests.rig.positions import HANDLER, NAME, PositionsRig, bridge_on, staged

READING = {
    "check", "dead-letters list", "grants", "history", "queues", "show", "status",
}  # fmt: skip
"""Commands that change nothing. All others need an example below."""


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    with staged(mongo_url, database, state_database) as made:
        yield made


def commands_of(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def halted(stage: PositionsRig) -> None:
    """Let a partition halt at a change of which the bytes are stored."""
    with stage.data["orders"].watch() as stream:
        stage.data["orders"].insert_one({})
        event = dict(stream.next())
    where = stage.partition_id(stage.index(event))
    assert stage.store.claims.halt(stage.claims_at(event), event["_id"], "orders insert 1", "ValueError: no")
    change = StoredChange(event["_id"]["_data"], bson.encode(event))
    stage.store.backlog.insert(where, [change], stage.version)


def with_letter(stage: PositionsRig) -> None:
    letter = letter_of(1, 1)
    name = {"_id": f"{NAME}/{HANDLER}/{letter['resumeToken']['_data']}", "handler": HANDLER}
    stage.state["dead_letters"].replace_one({"_id": name["_id"]}, {**letter, **name}, upsert=True)


def found(stage: PositionsRig) -> None:
    stage.state["handlers"].update_one({}, {"$set": {"lost": None}})
    stage.release()


def with_key(stage: PositionsRig) -> None:
    assert stage.term is not None
    stage.store.signing.sealing(stage.term.document)


def resumed(stage: PositionsRig) -> None:
    run(stage.bridge, changes, "resume", HANDLER)


EXAMPLES: dict[str, tuple[Callable[[PositionsRig], None] | None, list[str], int]] = {
    "pause": (None, [HANDLER], 2),
    "resume": (None, [HANDLER, "1"], 1),
    "snapshot start": (resumed, [HANDLER, "--rate", "5", "--yes"], 1),
    "snapshot stop": (None, [HANDLER], 1),
    "snapshot resume": (None, [HANDLER, "--yes"], 1),
    "retry": (halted, [HANDLER], 1),
    "rotate-key": (with_key, ["--overlap", "60"], 1),
    "dead-letters replay": (with_letter, [HANDLER, "--over-newer", "--yes"], 1),
    "dead-letters discard": (None, ["--all", "--yes"], 1),
    "skip": (halted, [HANDLER, "N", "--discard", "--yes"], 1),
    "reset": (found, [HANDLER, "--to", "oldest", "--yes"], 2),
    "remove": (None, [HANDLER, "--dead-letters", "--yes"], 2),
}
"""What comes before a command, its arguments, and how many things it changes; in this order."""


def test_every_command_that_changes_something_leaves_a_record(stage: PositionsRig) -> None:
    """P9: by introspection; a new command has to be listed as one that reads, or be an example."""
    every = dict(commands_of(changes))
    assert set(every) == READING | set(EXAMPLES)
    every["listener"] = listener
    with_reason = {name for name, command in every.items() if "reason" in {each.name for each in command.params}}
    assert with_reason == {"listener", *EXAMPLES}
    emptied = bridge_on(stage.bridge.wiring.url, stage.data, stage.bridge.options.database, "others")
    for name, (prepare, arguments, count) in EXAMPLES.items():
        if prepare is not None:
            prepare(stage)
        index = next((str(each) for each in (0, 1) if stage.partition(each).get("state") == "halted"), "0")
        given = [{"N": index}.get(each, each) for each in arguments]
        before = len(read_history(stage.bridge.wiring, limit=1000))
        bridge = emptied if name == "remove" else stage.bridge
        state = stage.everything()
        planned = run(bridge, changes, *name.split(), *(each for each in given if each != "--yes"), "--dry-run")
        assert (planned.exit_code, stage.everything()) == (0, state), name
        result = run(bridge, changes, *name.split(), *given, "--reason", f"why {name} \x1b[2J")
        assert result.exit_code == 0, (name, result.output)
        (record,) = read_history(stage.bridge.wiring, limit=1000)[before:]
        assert (record["act"], record["reason"]) == (name, f"why {name} \x1b[2J")
        assert record["command"].startswith(name)
        assert "@" in record["by"]
        assert record["at"]
        assert count in record["effect"].values(), (name, record)
        assert record["handlers"] or name == "rotate-key"
    emptied.client.close()
    shown = " ".join(run(stage.bridge, changes, "history", "--limit", "100").stdout.split())
    assert [shown.count(f"why {name}") for name in EXAMPLES] == [1] * len(EXAMPLES)
    assert "\x1b" not in shown
    listed = plain(stage.bridge, changes, "history", HANDLER)["audit_records"]
    assert {each["act"] for each in listed} == EXAMPLES.keys() - {"rotate-key"}


def test_what_changes_nothing_leaves_no_record(stage: PositionsRig) -> None:
    wiring = stage.bridge.wiring
    stage.bridge.operations.pause(HANDLER).run()
    stage.bridge.operations.pause(HANDLER).run()
    with pytest.raises(CommandRefusedError):
        stage.bridge.operations.retry(HANDLER, 0).run()
    run(stage.bridge, changes, "snapshot", "start", HANDLER, "--dry-run")
    run(stage.bridge, changes, "reset", HANDLER, "--to", "oldest", "--yes")
    assert [each["command"] for each in read_history(wiring)] == [f"pause {HANDLER}"]
    indexes = stage.state[COLLECTION].index_information()
    assert indexes["at_1"]["expireAfterSeconds"] == KEPT_SECONDS


def test_a_command_that_ends_halfway_leaves_a_record_of_what_it_did(
    stage: PositionsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first partition is paused, the second is not: the error comes, and so does the record."""
    original, calls = Partitions._command, []

    def pause_one(self: Any, *arguments: Any) -> bool:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Partitions, "_command", pause_one)
    operations = stage.bridge.operations.on_behalf_of("ann (Django)")
    with pytest.raises(KeyboardInterrupt):
        operations.pause(HANDLER, reason="hot \ud800 fix").run()
    (record,) = read_history(stage.bridge.wiring)
    assert (record["by"], record["reason"], record["effect"]) == ("ann (Django)", "hot ? fix", {"partitions": 1})


def test_a_record_that_cannot_be_stored_is_no_secret(stage: PositionsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right nothing is changed; where the write fails after the change, the error says what was done."""

    def fails(*_: Any) -> None:
        raise OperationFailure("not authorized", 13)

    with monkeypatch.context() as patch:
        patch.setattr(AuditRecords, "prepare", fails)
        with pytest.raises(DeploymentError):
            stage.bridge.operations.pause(HANDLER).run()
    assert stage.partition(0)["state"] == "flowing"
    monkeypatch.setattr(AuditRecords, "add", fails)
    with pytest.raises(DeploymentError, match=f"pause {HANDLER}"):
        stage.bridge.operations.pause(HANDLER).run()
    assert stage.partition(0)["state"] == "paused"
    stage.release()
    position = stage.subscription["resumeToken"]
    with pytest.raises(DeploymentError):
        stage.reset("oldest")
    assert stage.subscription["resumeToken"] == position, "its record is part of the transaction"
