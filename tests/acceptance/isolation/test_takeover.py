"""A new listener leads all that it can win, at once: however many handlers there are, and whatever is locked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.chain_rig import Chain
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for

Document = dict[str, Any]
MakeChain = Callable[..., Chain]

_HANDLERS = 200
_LEASE_SECONDS = 10


@pytest.fixture
def make_chain(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> MakeChain:
    """Give a function that makes a bridge; options as for `Chain`."""

    def make(**options: Any) -> Chain:
        chain = Chain(mongo_client, mongo_url, tmp_path, **options)
        started: AbstractContextManager[Chain] = chain
        started.__enter__()
        request.addfinalizer(lambda: started.__exit__(None, None, None))
        return chain

    return make


def test_a_partition_that_a_dead_client_has_locked_keeps_no_other_from_being_led(make_chain: MakeChain) -> None:
    """P12: its open transaction never ends by itself; when it has ended, that partition is taken over too."""
    chain = make_chain(handlers=["plain"])
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
    second.wait_for_output("took over 1 partitions that had been locked")
    chain.judge()


@pytest.mark.slow
def test_a_listener_that_is_told_to_end_does_not_wait_for_a_frozen_mongodb(
    make_chain: MakeChain, failpoint: Failpoint
) -> None:
    """P7: positions, the last renewal and the release have bounds that follow from `lease_ttl`, here two seconds."""
    chain = make_chain(handlers=["plain"])
    listener = chain.listener()
    with failpoint(
        failCommands=["update", "findAndModify"],
        blockConnection=True,
        blockTimeMS=90_000,
        appName=chain.app_name("listener"),
    ):
        assert listener.terminate(timeout=60) == 0


@contextmanager
def busy(chain: Chain) -> Iterator[None]:
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
    make_chain: MakeChain, record_property: Callable[[str, object], None]
) -> None:
    """P7: the bounds are those of the promise, doubled for a machine that is busy."""
    chain = make_chain(
        handlers=["plain", *(f"many_{number}" for number in range(_HANDLERS - 1))],
        options={"partitions": 16, "lease_ttl": _LEASE_SECONDS, "claim_ttl": _LEASE_SECONDS, "dispatch_grace": 8},
        environment={"CHAIN_MANY": str(_HANDLERS)},
    )

    def free() -> bool:
        lease = chain.state["leases"].find_one({"_id": "chain"})
        return lease is not None and lease.get("listenerId") is None

    first = chain.listener("first")
    second = chain.run("listener", name="second")
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
