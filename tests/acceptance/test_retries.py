"""Retries as Celery users know them, parked in MongoDB: nothing overtakes, nothing is held by the broker."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due, Started


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give one listener and one worker; the broker redelivers what is not acknowledged within two seconds."""
    return shared_deployment("plain", "auto", "letters", transport={"visibility_timeout": 2}, start="both")


def _seconds_between(starts: list[Started]) -> list[float]:
    return [(later.at - earlier.at) / 1e9 for earlier, later in itertools.pairwise(starts)]


def _retries(chain: Deployment, item: Due) -> list[int]:
    return [start.retries for start in chain.starts(item)]


def test_a_change_that_retries_is_not_overtaken_while_other_partitions_go_on(chain: Deployment) -> None:
    """P2: the successor in its partition waits, one in another partition does not."""
    keys = chain.keys("plain", 0, "wait")
    slow = chain.write("plain", next(keys), 1, act="retry", options={"countdown": 3})
    chain.allow(slow)
    successor = chain.write("plain", next(keys), 1)
    elsewhere = chain.write("plain", next(chain.keys("plain", 1, "free")), 1)
    chain.wait_done()
    chain.judge()
    first, again = chain.starts(slow)
    assert (again.at - first.at) / 1e9 >= 3
    assert chain.starts(successor)[0].at > again.at
    assert chain.starts(elsewhere)[0].at < again.at
    assert _retries(chain, slow) == [0, 1]


def test_a_retry_longer_than_the_visibility_timeout_runs_once_for_each_attempt(chain: Deployment) -> None:
    """P6: no message is held during a countdown, so the broker has nothing to redeliver."""
    item = chain.write("plain", "longer", 1, act="retry", times=2, options={"countdown": 3})
    chain.allow(item, 2)
    chain.wait_started(item, 3)
    chain.wait_done()
    chain.judge()
    assert _retries(chain, item) == [0, 1, 2]
    assert all(gap >= 3 for gap in _seconds_between(chain.starts(item)))


def test_every_form_of_a_retry_ends_its_handler_and_counts(chain: Deployment) -> None:
    """
    With `throw=False` a handler that went on would take effect, be committed, and run again; `eta=` names a time.

    After `max_retries` the policy has the error: the one passed as `exc=`, or one that shows the label of the change.
    """
    quiet = chain.allow(chain.write("plain", "quiet", 1, act="retry", options={"countdown": 0.2, "throw": False}))
    timed = chain.allow(chain.write("plain", "timed", 1, act="retry", eta_in=1.2))
    ended = [chain.write("letters", f"ended-{exc}", 1, act="retry", times=9, exc=exc) for exc in (True, False)]
    for item in ended:
        chain.give_up(chain.allow(item, 2))
    chain.wait_done()
    chain.judge()
    assert _retries(chain, quiet) == _retries(chain, timed) == [0, 1]
    assert chain.facts["end"].count_documents({"key": "quiet"}) == 1
    assert _seconds_between(chain.starts(timed))[0] >= 1.1
    letters = {each["change"]["documentKey"]["_id"]: each for each in chain.letters("letters")}
    for item, error in zip(ended, ("WantedError", "MaxRetriesExceededError"), strict=True):
        letter = letters[item.key]
        assert (letter["error"].partition(":")[0], letter["attempts"]) == (error, 3)
        assert _retries(chain, item) == [0, 1, 2]
    assert f"'{ended[1].key}'" in letters[ended[1].key]["error"]


def test_a_parked_retry_survives_the_restart_of_everything_and_an_empty_broker(deployment: MakeDeployment) -> None:
    """P8: the retry time and the count live in MongoDB."""
    chain = deployment("plain")
    listener, worker = chain.both()
    keys = chain.keys("plain", 0)
    item = chain.allow(chain.write("plain", next(keys), 1, act="retry", options={"countdown": 6}))
    successor = chain.write("plain", next(keys), 1)
    chain.wait_state(item, lambda state: state["retry"] and state["retry"]["notBefore"])
    worker.send_group(signal.SIGKILL)
    assert listener.terminate() == 0
    with chain.broker as broker:
        broker.flushall()
    chain.both()
    chain.wait_done()
    chain.judge()
    assert _retries(chain, item) == [0, 1]
    assert _seconds_between(chain.starts(item))[0] >= 6
    assert chain.starts(successor)[0].at > chain.starts(item)[1].at
