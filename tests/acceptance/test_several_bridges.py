"""Several bridges in one listener process: one that fails for good leaves the others alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.listener.process import run_listeners
from mongo_celery.mongo.repeating import Pauses
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.project import MakeProject, Project

_MAIN = "from tests.acceptance.test_several_bridges import main; main()"


class _Events(logging.Handler):
    """Prints the events of log records."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stdout.write(f"event {getattr(record, 'event', '')} {getattr(record, 'bridge', '')}\n")
        sys.stdout.flush()


def main() -> None:
    """Listen as the command does, with a first pause of so many seconds, for the bridges that the arguments name."""
    names = os.environ["PROJECT_NAMES"]
    app = Celery("several", broker=os.environ["PROJECT_BROKER"])
    given: dict[str, Any] = {"database": f"{names}_state", "autodiscover": False, "partitions": 1, "lease_ttl": 20}
    for name in sys.argv[2:]:
        bridge = Bridge(app, os.environ["PROJECT_MONGO"], name=name, **given)
        database = "state" if name.startswith("bad") else "data"  # a bridge must not watch its own state
        bridge.on_change(f"{names}_{database}.items", name=name)(_handler(name))
    app.log.setup(logging.INFO, redirect_stdouts=False)
    logging.getLogger("mongo_celery").addHandler(_Events())
    sys.exit(run_listeners(app, [], pauses=Pauses(first=float(sys.argv[1]), longest=60.0)))


def _handler(name: str) -> Callable[[Any], None]:
    def handle(change: Any) -> None:
        raise AssertionError(f"no worker runs here: {change}")

    handle.__name__ = name
    return handle


class Several(Project):
    """Bridges named `good...`, and `bad...` whose source is refused."""

    app = "several"

    def listen(self, pause: int, *bridges: str) -> ProjectProcess:
        """Start a process for these bridges, which tries one that has failed again after a pause; does not wait."""
        return self._processes.python("listener", "-c", _MAIN, str(pause), *bridges, environment=self.environment)

    def wait_led(self, bridge: str) -> int:
        """Wait for a listener that leads; gives its term."""
        led = {"_id": bridge, "listenerId": {"$ne": None}}
        return int(wait_for(lambda: self.state["leases"].find_one(led))["term"])


@pytest.fixture
def several(make_project: MakeProject) -> Several:
    made: Several = make_project(Several)
    return made


def test_a_bridge_that_fails_for_good_leaves_the_others_alone(several: Several, redis_client: Any) -> None:
    """P1: the healthy one keeps its term and dispatches; the other is tried again, and each failure is loud."""
    listener = several.listen(1, "good", "bad")
    term = several.wait_led("good")
    wait_for(lambda: listener.text.count("event listener_failed bad") >= 3, message="tried again, and once more")
    several.data["items"].insert_one({"_id": 1})
    wait_for(lambda: redis_client.llen("good.0"), message="the healthy bridge dispatches")
    assert listener.running
    assert several.wait_led("good") == term
    assert listener.terminate() == 0


def test_a_shutdown_ends_a_pause(several: Several) -> None:
    listener = several.listen(60, "good", "bad")
    several.wait_led("good")
    listener.wait_for_output("event listener_failed bad")
    assert listener.terminate(40) == 0


def test_the_process_ends_with_status_1_once_every_bridge_has_failed(several: Several) -> None:
    """So that a supervisor restarts it, and sees that it cannot."""
    listener = several.listen(1, "bad1", "bad2")
    assert listener.wait() == 1
    for name in ("bad1", "bad2"):
        assert f"event listener_failed {name}" in listener.text
