"""
Unclaimed messages: lost ones are sent again within seconds, and those that wait for a rate limit are not.

The grace is made much longer here than the promised seconds: an earlier start proves that the loss was noticed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

GRACE_SECONDS = 60
PATIENT: Document = {"dispatch_grace": GRACE_SECONDS, "claim_ttl": 10}
SECOND = 10**9


def _received(chain: Deployment, handler: str) -> int:
    """How many messages of a handler workers were given."""
    return sum(len(re.findall(rf"handlers\.{handler}\[[^]]*\] received", text)) for text in chain.logs.values())


def _wait_for_messages(chain: Deployment, items: Iterable[Due], *, left: bool = True) -> None:
    """Wait until the queues of all these changes have a message left, or none of them has."""
    with chain.broker as broker:
        queues = [f"chain.{chain.partition_of(item.handler, item.key)}" for item in items]
        wait_for(lambda: all(bool(broker.llen(queue)) == left for queue in queues))


def _seconds_until_all_started(chain: Deployment, since: int, items: list[Due]) -> float:
    return (max(start.at for start in chain.starts(*items)) - since) / SECOND


def _seconds_after_an_absence(chain: Deployment, seconds: float) -> float:
    """Broker and workers go away with what was sent; how long after the return of both, one by one, all of it ran."""
    items = chain.write_many("plain", [f"k{number}" for number in range(6)], 1)
    _wait_for_messages(chain, items)
    chain.redis.kill()
    gone = time.monotonic()
    chain.write_many("other", [f"k{number}" for number in range(6)], 1)
    wait_for(lambda: time.monotonic() - gone >= seconds, seconds + 60)
    chain.redis.restart()
    chain.worker()
    back = time.monotonic_ns()
    chain.wait_done()
    chain.judge(spare=0)
    return _seconds_until_all_started(chain, back, items)


@pytest.mark.parametrize(
    ("grace", "seconds", "bound"),
    [
        (GRACE_SECONDS, 0, GRACE_SECONDS / 2),
        pytest.param(None, 300, 30, marks=pytest.mark.slow, id="the grace by default, after five minutes"),
    ],
)
def test_workers_and_broker_that_were_away_together_find_work_when_they_return(
    deployment: MakeDeployment, grace: float | None, seconds: float, bound: float
) -> None:
    """I14: what was sent is lost, and no grace is waited for once more, neither the first nor a doubled one."""
    chain = deployment("plain", "other", options={**PATIENT, "dispatch_grace": grace})
    chain.listener()
    assert _seconds_after_an_absence(chain, seconds) < bound


@pytest.mark.slow
def test_a_listener_that_was_deployed_before_its_workers_has_work_for_them_when_they_start(
    deployment: MakeDeployment,
) -> None:
    """I14: the workers of before drop what they do not know, while they are busy with what they do."""
    chain = deployment("plain", "other", options=PATIENT)
    chain.listener()
    before = chain.worker(name="before", SCRIPTED_HANDLERS="plain")
    busy = chain.write("plain", "busy", 1, gate="open")
    chain.wait_started(busy)
    items = [chain.write("other", next(chain.keys("other", index)), 1) for index in range(chain.partitions)]
    before.wait_for_output("it does not have their task")
    _wait_for_messages(chain, items, left=False)
    chain.open_gate("open")
    chain.wait_done(handlers=["plain"])
    before.end()
    chain.worker(name="after")
    ready = time.monotonic_ns()
    chain.wait_done()
    chain.judge(spare=0)
    assert _seconds_until_all_started(chain, ready, items) < 1.5 * GRACE_SECONDS


def test_what_waits_for_its_rate_limit_is_not_sent_again(deployment: MakeDeployment) -> None:
    """I14: a duplicate would spend a token; so at least nine of ten tokens start a handler."""
    options = {"partitions": 16, "dispatch_grace": 1.5}
    conf = {"worker_prefetch_multiplier": 16}
    chain = deployment("limited", options=options, conf=conf)
    chain.listener()
    chain.worker()
    # Half of them: a busy machine may hold a message up for as long as the tokens of the other half.
    items = chain.write_many("limited", [next(chain.keys("limited", partition)) for partition in range(8)], 3)
    chain.wait_done()
    chain.judge(spare=0)
    assert len(items) >= 0.9 * _received(chain, "limited")
