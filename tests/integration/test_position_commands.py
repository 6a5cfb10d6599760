"""The commands on positions as people and scripts use them: what they say, what they ask, how they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.cli.steering import history, remove, reset, snapshot
from tests.rig.positions import HANDLER, PositionsRig, bridge_on, data_of, staged

Document = dict[str, Any]
Run = Callable[..., Result]


def run(bridge: Bridge, command: click.Command, *arguments: str, answer: str = "") -> Result:
    app = SimpleNamespace(app=bridge.wiring.app, no_color=True)
    found = CliRunner().invoke(command, list(arguments), obj=app, input=answer)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "Traceback" not in found.output
    return found


def plain(bridge: Bridge, command: click.Command, *arguments: str) -> Document:
    found: Document = json.loads(run(bridge, command, *arguments, "--json").stdout)
    return found


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    with staged(mongo_url, database, state_database) as made:
        yield made


def test_a_reset_shows_what_it_does_asks_and_is_remembered(stage: PositionsRig) -> None:
    bridge, place = stage.bridge, data_of(stage.events[0]["_id"])
    led = run(bridge, reset, HANDLER, "--to", place)
    assert (led.exit_code, "[y/N]" in led.output) == (1, False)
    stage.release()
    before = stage.everything()
    dry = run(bridge, reset, HANDLER, "--to", place, "--dry-run")
    assert dry.exit_code == 0
    assert plain(bridge, reset, HANDLER, "--to", place, "--dry-run")["dry_run"]
    unwatched = run(bridge, reset, HANDLER, "--to", place, "--key", "k", "--source", "others.orders", "--dry-run")
    assert unwatched.exit_code == 1
    no = run(bridge, reset, HANDLER, "--to", place, answer="n\n")
    assert (no.exit_code, "[y/N]" in no.output) == (1, True)
    assert stage.everything() == before
    yes = run(bridge, reset, HANDLER, "--to", place, "--reason", "a wrong sum", answer="y\n")
    assert yes.exit_code == 0
    again = run(bridge, reset, HANDLER, "--to", place, "--yes")
    assert again.exit_code == 1
    forward = plain(bridge, reset, HANDLER, "--to", "now", "--yes")
    assert (forward["forward"], forward["moved"], forward["withdrawn"], forward["leader"]) == (True, [0, 1], 0, None)
    assert "a wrong sum" in run(bridge, history).stdout
    assert [each["act"] for each in plain(bridge, history, HANDLER)["audit_records"]] == ["reset", "reset"]


def test_a_handler_is_removed(stage: PositionsRig) -> None:
    stage.release()
    emptied = bridge_on(stage.bridge.wiring.url, stage.data, stage.bridge.options.database, "others")
    assert run(emptied, remove, HANDLER, answer="n\n").exit_code == 1
    assert plain(emptied, remove, HANDLER, "--dry-run")["partitions"] == 2
    assert run(emptied, remove, HANDLER, answer="y\n").exit_code == 0
    assert [each["act"] for each in plain(emptied, history)["audit_records"]] == ["remove"]
    emptied.client.close()


def test_a_snapshot_shows_what_it_reads_and_asks(stage: PositionsRig) -> None:
    source, known = f"{stage.data.name}.orders for {HANDLER}", stage.state["snapshots"]
    dry = run(stage.bridge, snapshot, "start", HANDLER, "--dry-run")
    assert (dry.exit_code, source in dry.stdout, "[y/N]" in dry.output) == (0, True, False)
    no = run(stage.bridge, snapshot, "start", HANDLER, answer="n\n")
    assert (no.exit_code, source in no.stderr, known.count_documents({})) == (1, True, 0)
    yes = run(stage.bridge, snapshot, "start", HANDLER, answer="y\n")
    assert (yes.exit_code, source in yes.stdout, known.count_documents({})) == (0, True, 1)
    assert run(stage.bridge, snapshot, "stop", HANDLER).exit_code == 0
    assert "[y/N]" not in run(stage.bridge, snapshot, "start", HANDLER, "--yes").stderr
    assert known.count_documents({}) == 2
