"""How a bridge enters a worker: what it refuses, what it keeps out of logs, when it leaves things alone."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bson.binary import UuidRepresentation
from celery import Celery, bootsteps
from celery.worker import state as worker_state

from mongo_celery import Bridge
from mongo_celery.bridge.listener.in_worker import _is_ending
from mongo_celery.bridge.raw_event import EVENT_TYPES
from tests.fixtures.process import Processes

_URL = "mongodb://127.0.0.1:1/?connect=false"
_APP = """
from celery import Celery
from mongo_celery import Bridge

app = Celery("shop", broker="memory://")
app.conf.update({settings})
good = Bridge(app, "{url}", name="good", autodiscover=False)
bad = Bridge(app, "{url}", name="bad", autodiscover=False, {options})
"""
_COMMANDS = "pymongo.command"


@pytest.mark.parametrize(
    ("settings", "options", "named", "logfile"),
    [
        ("mongo_celery_partitons=8", "", "mongo_celery_partitions", False),
        ("mongo_celery_partitions=8", "queues=12", "queues=12", True),
    ],
)
def test_a_worker_whose_bridge_cannot_work_ends_and_says_why(
    processes: Processes, tmp_path: Path, settings: str, options: str, named: str, logfile: bool
) -> None:
    """Without partition queues it would run, and consume nothing; a detached one says so in its log file."""
    (tmp_path / "shop.py").write_text(_APP.format(settings=settings, options=options, url=_URL), encoding="utf-8")
    where = tmp_path / "worker-file.log"
    more = ["--logfile", str(where)] if logfile else []
    worker = processes.celery("shop", "worker", "-P", "solo", *more, environment={"PYTHONPATH": str(tmp_path)})
    assert worker.wait() == 1
    text = where.read_text(encoding="utf-8") if logfile else worker.text
    (critical,) = [line for line in text.splitlines() if "CRITICAL" in line]
    assert named in critical
    assert "Traceback" not in text


@pytest.mark.parametrize("which", ["client", "stream"])
@pytest.mark.parametrize(
    ("driver", "commands", "kept"),
    [
        (logging.NOTSET, logging.NOTSET, logging.INFO),
        (logging.DEBUG, logging.NOTSET, logging.NOTSET),
        (logging.NOTSET, logging.DEBUG, logging.DEBUG),
    ],
)
def test_a_client_logs_no_commands_unless_someone_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, which: str, driver: int, commands: int, kept: int
) -> None:
    """Where the app sets up logging by itself, Celery sends no signal; a root at DEBUG would show the key."""
    logger = logging.getLogger(_COMMANDS)
    monkeypatch.setattr(logging.getLogger("pymongo"), "level", driver)
    monkeypatch.setattr(logger, "level", commands)
    bridge = Bridge(Celery("quiet", broker="memory://", set_as_current=False), _URL, autodiscover=False)
    client: Any = bridge.client if which == "client" else bridge.wiring.stream_client(1.0)
    client.close()
    assert logger.level == kept


def test_events_are_read_alike_whatever_the_url_says_of_types() -> None:
    """P1: partition keys must not depend on an option that the next start may have otherwise; handlers get it."""
    types = "uuidRepresentation=standard&tz_aware=true&datetime_conversion=DATETIME&unicode_decode_error_handler=ignore"
    url = f"{_URL}&{types}"
    bridge = Bridge(Celery("typed", broker="memory://", set_as_current=False), url, autodiscover=False)
    with bridge.wiring.stream_client(1.0) as client:
        assert client.codec_options == EVENT_TYPES
    assert bridge.client.codec_options.uuid_representation == UuidRepresentation.STANDARD
    bridge.client.close()


@pytest.mark.parametrize(
    ("should_stop", "should_terminate", "state", "expected"),
    [
        (None, None, "running", False),
        (False, False, "running", False),
        (0, None, "running", True),
        (None, 1, "running", True),
        (None, None, "closing", True),
        (None, None, "terminating", True),
    ],
)
def test_a_worker_is_ending_from_the_signal_on(
    monkeypatch: pytest.MonkeyPatch, should_stop: Any, should_terminate: Any, state: str, expected: bool
) -> None:
    """Celery keeps the exit status there, and 0 is one; a remote shutdown shows in the blueprint only."""
    monkeypatch.setattr(worker_state, "should_stop", should_stop)
    monkeypatch.setattr(worker_state, "should_terminate", should_terminate)
    blueprint: Any = bootsteps.Blueprint(name="worker")
    blueprint.state = {name: number for number, name in blueprint.state_to_name.items()}[state]
    assert _is_ending(SimpleNamespace(blueprint=blueprint)) is expected
