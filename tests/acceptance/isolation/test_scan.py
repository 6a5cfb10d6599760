"""What a stream passes over: a neighbour's writes, however many sources there are, and all before a resume token."""

from __future__ import annotations

from bson import Timestamp

from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment


def wait_passed(chain: Deployment, time: Timestamp, count: int) -> None:
    handlers = chain.state["handlers"]
    wait_for(
        lambda: handlers.count_documents({"clusterTime": {"$gte": time}}) >= count,
        message=lambda: f"{count} watermarks pass {time}: {handlers.distinct('clusterTime')}",
    )


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
