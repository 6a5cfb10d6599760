"""What a stream passes over: a neighbour's writes, however many sources there are, and all before a resume token."""

from __future__ import annotations

from typing import Any

from bson import Timestamp
from pymongo import WriteConcern

from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

QUIET = 60
_BATCH = 400


def disturb(chain: Deployment, entries: int) -> Timestamp:
    """Write so many entries in a neighbour's collection; the time of the last."""
    neighbour = chain.data.get_collection("neighbour", write_concern=WriteConcern(1))
    for _ in range(0, entries, _BATCH):
        neighbour.insert_many([{"text": "x" * 100} for _ in range(_BATCH)], ordered=False)
    return operation_time(chain.client)


def wait_passed(chain: Deployment, time: Timestamp, count: int) -> None:
    """Wait until the watermarks of so many handlers have passed a time."""
    handlers = chain.state["handlers"]
    wait_for(
        lambda: handlers.count_documents({"clusterTime": {"$gte": time}}) >= count,
        message=lambda: f"{count} watermarks pass {time}: {handlers.distinct('clusterTime')}",
    )


def _token_behind(time: Timestamp) -> Document:
    """As a quiet stream gives it, of a place behind everything that happened until now."""
    return {"_data": f"82{time.time:08X}{time.inc + 1:08X}2B0229296E04"}


def test_the_watermarks_of_quiet_handlers_pass_a_neighbours_writes(deployment: MakeDeployment) -> None:
    """I3: what lies before the first read, and what is written meanwhile; no change is read, and every place moves."""
    chain = deployment(
        *(f"many_{number}" for number in range(QUIET)),
        options={"partitions": 2},
        environment={"SCRIPTED_MANY": str(QUIET)},
    )
    chain.data["many_0"].insert_one({"_id": "before the start"})
    start = operation_time(chain.client)
    before = disturb(chain, 20_000)
    listener = chain.listener(options={"start_from": _token_behind(start)})
    wait_passed(chain, before, QUIET)

    last = disturb(chain, 20_000)

    disturb(chain, _BATCH)  # a time is passed when something lies behind it
    wait_passed(chain, last, QUIET)
    assert listener.terminate() == 0


def test_a_stream_of_an_older_version_goes_on_without_a_gap_or_a_repetition(deployment: MakeDeployment) -> None:
    """P1: its token is not used, since another pipeline may not find it; the stream is opened once at its time."""
    chain = deployment("plain")
    first, _ = chain.both()
    for number in range(3):
        chain.write("plain", f"before {number}", 1)
    chain.wait_done()
    wait_passed(chain, operation_time(chain.client), 1)
    assert first.terminate() == 0
    stored = chain.state["handlers"].find_one() or {}
    chain.state["handlers"].update_one({"_id": stored["_id"]}, {"$set": {"fingerprint": "of another stream"}})
    for number in range(3):
        chain.write("plain", f"after {number}", 1)

    second = chain.listener("second")

    wait_for(lambda: chain.state["handlers"].count_documents({"fingerprint": stored["fingerprint"]}) == 1)
    chain.wait_done()
    assert second.terminate() == 0
    chain.judge(spare=0)
