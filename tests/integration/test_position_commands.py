"""The commands on positions as people and scripts use them: what they say, what they ask, how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.cli.steering import history, reset
from tests.rig.positions import HANDLER, PositionsRig, data_of, staged

Document = dict[str, Any]


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
