"""How a bridge enters a worker: what it refuses, what it keeps out of logs, when it leaves things alone."""

from __future__ import annotations

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


def test_events_are_read_alike_whatever_the_url_says_of_types() -> None:
    """P1: partition keys must not depend on an option that the next start may have otherwise; handlers get it."""
    types = "uuidRepresentation=standard&tz_aware=true&datetime_conversion=DATETIME&unicode_decode_error_handler=ignore"
    url = f"{_URL}&{types}"
    bridge = Bridge(Celery("typed", broker="memory://", set_as_current=False), url, autodiscover=False)
    with bridge.wiring.stream_client(1.0) as client:
        assert client.codec_options == EVENT_TYPES
    assert bridge.client.codec_options.uuid_representation == UuidRepresentation.STANDARD
    bridge.client.close()


def test_a_worker_is_ending_from_the_signal_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery keeps the exit status there, and 0 is one. A remote shutdown shows in the blueprint only."""
    blueprint: Any = bootsteps.Blueprint(name="worker")
    numbers = {name: number for number, name in blueprint.state_to_name.items()}
    found = []
    for stop, terminate, state in (
        (None, None, "running"),
        (0, None, "running"),
        (None, 1, "running"),
        (None, None, "closing"),
    ):
        monkeypatch.setattr(worker_state, "should_stop", stop)
        monkeypatch.setattr(worker_state, "should_terminate", terminate)
        blueprint.state = numbers[state]
        found.append(_is_ending(SimpleNamespace(blueprint=blueprint)))
    assert found == [False, True, True, True]
