"""Several bridges in one listener process: one that fails for good leaves the others alone."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.listener import Listener
from mongo_celery.bridge.listener.process import FAILED_BRIDGE, ListenerThreads, run_listeners
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.repeating import Pauses
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.project import MakeProject, Project

Document = dict[str, Any]
SHORT = Pauses(first=1.0, longest=2.0)
_MAIN = "from tests.acceptance.test_several_bridges import main; main()"


def main() -> None:
    """Listen as the command does, with short pauses, for the bridges that the arguments name."""
    names = os.environ["PROJECT_NAMES"]
    app = Celery("several", broker=os.environ["PROJECT_BROKER"])
    given: Document = {"database": f"{names}_state", "autodiscover": False, "partitions": 1, "lease_ttl": 2}
    for name in sys.argv[1:]:
        bridge = Bridge(app, os.environ["PROJECT_MONGO"], name=name, **given)
        database = "state" if name.startswith("bad") else "data"  # a bridge must not watch its own state
        bridge.on_change(f"{names}_{database}.items", name=name)(_handler(name))
    app.log.setup(logging.INFO)
    sys.exit(run_listeners(app, [], pauses=SHORT))


def _handler(name: str) -> Callable[[Any], None]:
    def handle(change: Any) -> None:
        raise AssertionError(f"no worker runs here: {change}")

    handle.__name__ = name
    return handle


class Several(Project):
    """Bridges named `good...`, and `bad...` whose source is refused."""

    app = "several"

    def listen(self, *bridges: str) -> ProjectProcess:
        """Start a process for these bridges; does not wait."""
        return self._processes.python("listener", "-c", _MAIN, *bridges, environment=self.environment)

    def version(self, bridge: str) -> int:
        """The version of a bridge's lease."""
        return int((self.state["leases"].find_one({"_id": bridge}) or {})["term"])


@pytest.fixture
def several(make_project: MakeProject) -> Several:
    """Give such bridges, of which nothing is started."""
    made: Several = make_project(Several)
    return made


def test_a_bridge_that_fails_for_good_leaves_the_others_alone(several: Several, redis_client: Any) -> None:
    """P1: the healthy one keeps its term and dispatches; the other is tried again, and each failure is loud."""
    listener = several.listen("good", "bad")
    listener.wait_for_output("leading bridge good")
    listener.wait_for_output("CRITICAL.*bridge bad has failed")
    version = wait_for(lambda: several.version("good"))
    wait_for(lambda: listener.text.count("bridge bad has failed") >= 3, message="tried again, and once more")
    several.data["items"].insert_one({"_id": 1})
    wait_for(lambda: redis_client.llen("good.0"), message="the healthy bridge dispatches")
    assert listener.running
    assert several.version("good") == version
    assert listener.terminate() == 0


def test_the_process_ends_with_status_1_once_every_bridge_has_failed(several: Several) -> None:
    """So that a supervisor restarts it, and sees that it cannot."""
    listener = several.listen("bad1", "bad2")
    assert listener.wait() == 1
    for name in ("bad1", "bad2"):
        assert f"bridge {name} has failed" in listener.text


class _Fake:
    """A listener that fails so many times, then listens until it is stopped."""

    has_lease = False

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.activity = Activity("bridge", ["handler"], 10.0)
        self.listens = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        if self.left:
            self.left -= 1
            raise ConfigurationError("as the test asked")
        self.listens.set()
        self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


def test_stop_ends_a_pause() -> None:
    """A shutdown does not wait for ten minutes."""
    fakes = [_Fake(9), _Fake(0)]
    threads = ListenerThreads([cast("Listener", fake) for fake in fakes], FAILED_BRIDGE, ends_with_all=True)
    threads.start()
    wait_for(lambda: fakes[0].left == 8)
    threads.stop()
    assert not any(thread.is_alive() for thread in threads._threads)
    assert fakes[0].left == 8
