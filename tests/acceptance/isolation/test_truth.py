"""What status and check say is what is so: also while the stream is dead, and beside a change that stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]
_HOST_UNREACHABLE = 6


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    return deployment("plain", options={"lease_ttl": 20})


def wait_status(chain: Deployment, condition: Callable[[Document], object]) -> Document:
    seen: Document = {}

    def found() -> Document | None:
        seen.update(chain.changes("status"))
        return seen if condition(seen) else None

    return wait_for(found, message=lambda: f"status: {seen}")


def test_a_dead_stream_is_not_called_caught_up(chain: Deployment, failpoint: Failpoint) -> None:
    """The listener leads, renews and has nothing to do, and can read nothing: status and check say so, and why."""
    chain.both()
    chain.write("plain", "a", 1)
    chain.wait_done()
    calm = wait_status(chain, lambda status: status["caught_up"])
    assert (calm["unread_seconds"], calm["reading_waits"], calm["lag_seconds"]) == (0, None, 0)
    with failpoint(
        failCommands=["aggregate", "getMore"],
        errorCode=_HOST_UNREACHABLE,
        errorLabels=["ResumableChangeStreamError"],
        appName=chain.app_name("listener"),
    ):
        dead = wait_status(chain, lambda status: status["unread_seconds"] and status["reading_waits"])
        assert dead["state"] == "leading"
        assert not dead["caught_up"]
        assert "HostUnreachable" in dead["reading_waits"]
        found = {each["code"]: each for each in chain.changes("check")["findings"]}
        assert found["reading_waits"]["severity"] in {"degraded", "failing"}, "failing when it has lasted"
        assert "HostUnreachable" in found["reading_waits"]["sentence"]
    chain.write("plain", "a", 2)
    chain.wait_done()
    wait_status(chain, lambda status: status["caught_up"] and not status["unread_seconds"])
    # The stream is read to its end, everything else is done: one change is blocked.
    chain.stand(chain.write("plain", "b", 1, act="raise"))
    halted = wait_status(chain, lambda status: status["handlers"][0]["state"] == "halted")
    assert not halted["caught_up"]
    chain.judge()
