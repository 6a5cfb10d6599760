"""A new listener leads all that it can win, at once: however many handlers there are, and whatever is locked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

_HANDLERS = 200
_LEASE_SECONDS = 10


def test_a_partition_that_a_dead_client_has_locked_keeps_no_other_from_being_led(deployment: MakeDeployment) -> None:
    """P12: its open transaction never ends by itself; when it has ended, that partition is taken over too."""
    chain = deployment("plain")
    first, _ = chain.both()
    done = chain.write("plain", next(chain.keys("plain", 0)), 1)
    chain.wait_done()
    where = {"_id": chain.of(done)["_id"]}
    with chain.client.start_session() as session:
        session.start_transaction()
        chain.state["partitions"].update_one(where, {"$set": {"note": 1}}, session=session)
        first.send(signal.SIGKILL)
        second = chain.listener("second")
        locked = chain.write("plain", done.key, 2)
        free = [chain.write("plain", next(chain.keys("plain", index)), 1) for index in (1, 2, 3)]
        for item in free:
            chain.wait_started(item)
        lease = wait_for(lambda: chain.state["leases"].find_one({"report.locked": [where["_id"]]}))
        assert lease["term"] > chain.of(locked)["term"], "it is not won"
        # The server has not ended the transaction: nobody has waited for that.
        chain.state["partitions"].update_one(where, {"$set": {"note": 2}}, session=session)
        assert chain.starts(locked) == []
        session.abort_transaction()
    chain.wait_done()
    second.wait_for_output("1 partitions are no longer locked")
    chain.judge()


@contextmanager
def busy(chain: Deployment) -> Iterator[None]:
    """Write all the time."""
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.wait(0.02):
            chain.data["plain"].insert_one({"n": number})
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


@pytest.mark.slow
def test_very_many_handlers_are_taken_over_and_let_go_within_seconds(
    deployment: MakeDeployment, record_property: Callable[[str, object], None]
) -> None:
    """P7: the bounds are those of the promise, doubled for a machine that is busy."""
    chain = deployment(
        "plain",
        *(f"many_{number}" for number in range(_HANDLERS - 1)),
        options={"partitions": 16, "lease_ttl": _LEASE_SECONDS, "claim_ttl": _LEASE_SECONDS, "dispatch_grace": 8},
        environment={"SCRIPTED_MANY": str(_HANDLERS)},
    )

    def free() -> bool:
        lease = chain.state["leases"].find_one({"_id": "chain"})
        return lease is not None and lease.get("listenerId") is None

    first = chain.listener("first")
    second = chain.listener("second", awaited="")
    second.wait_for_output("standing by")
    began = time.monotonic()
    first.send(signal.SIGKILL)
    second.wait_for_output("reading from")
    taken = time.monotonic() - began

    with busy(chain):  # so that all watermarks but its own have moved when the signal comes
        stored = {"resumeToken": {"$ne": None}}
        wait_for(lambda: chain.state["handlers"].count_documents(stored) == _HANDLERS - 1)
        began = time.monotonic()
        second.send(signal.SIGTERM)
        wait_for(free)
        let_go = time.monotonic() - began
    record_property("take-over after SIGKILL", f"{taken:.1f} s")
    record_property("release after SIGTERM", f"{let_go:.1f} s")
    print(f"{_HANDLERS} handlers: led {taken:.1f} s after SIGKILL, released {let_go:.1f} s after SIGTERM")  # noqa: T201
    assert taken < 2 * (_LEASE_SECONDS + 2)
    assert let_go < 2 * 1.5
