"""Retries as Celery users know them, parked in MongoDB: nothing overtakes, nothing is held by the broker."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.change_stream import ChangeStream

from tests.acceptance.chain_rig import Chain
from tests.chaos.history import Due, Started
from tests.fixtures.process import wait_for

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chain(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chain]:
    """Give one listener and one worker; the broker redelivers what is not acknowledged within two seconds."""
    with Chain(
        mongo_client,
        mongo_url,
        tmp_path_factory.mktemp("retries"),
        handlers=["plain", "auto", "letters"],
        transport={"visibility_timeout": 2},
    ) as started:
        started.both()
        yield started


def _seconds_between(starts: list[Started]) -> list[float]:
    return [(later.at - earlier.at) / 1e9 for earlier, later in itertools.pairwise(starts)]


def _retries(chain: Chain, item: Due) -> list[int]:
    return [start.retries for start in chain.starts(item)]


def test_a_change_that_retries_is_not_overtaken_while_other_partitions_go_on(chain: Chain) -> None:
    """P2: the successor in its partition waits, one in another partition does not."""
    keys = chain.keys("plain", 0, "wait")
    slow = chain.write("plain", next(keys), 1, act="retry", options={"countdown": 1.5})
    chain.allow(slow)
    successor = chain.write("plain", next(keys), 1)
    elsewhere = chain.write("plain", next(chain.keys("plain", 1, "free")), 1)
    chain.wait_done()
    chain.judge()
    first, again = chain.starts(slow)
    assert (again.at - first.at) / 1e9 >= 1.5
    assert chain.starts(successor)[0].at > again.at
    assert chain.starts(elsewhere)[0].at < again.at
    assert _retries(chain, slow) == [0, 1]


def test_a_retry_longer_than_the_visibility_timeout_runs_once_for_each_attempt(chain: Chain) -> None:
    """P6: no message is held during a countdown, so the broker has nothing to redeliver."""
    item = chain.write("plain", "longer", 1, act="retry", times=2, options={"countdown": 3})
    chain.allow(item, 2)
    chain.wait_started(item, 3)
    chain.wait_done()
    chain.judge()
    assert _retries(chain, item) == [0, 1, 2]
    assert all(gap >= 3 for gap in _seconds_between(chain.starts(item)))


def test_retry_with_throw_false_ends_the_handler_all_the_same(chain: Chain) -> None:
    """A handler that went on would take effect, be committed, and run again."""
    item = chain.write("plain", "no-throw", 1, act="retry", options={"countdown": 0.2, "throw": False})
    chain.allow(item)
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(item)) == 2
    assert chain.facts["end"].count_documents({"key": "no-throw"}) == 1


def test_a_retry_may_name_its_time(chain: Chain) -> None:
    """`eta=` counts by the server's clock."""
    item = chain.write("plain", "at-a-time", 1, act="retry", eta_in=1.2)
    chain.allow(item)
    chain.wait_done()
    chain.judge()
    assert _retries(chain, item) == [0, 1]
    assert _seconds_between(chain.starts(item))[0] >= 1.1


@pytest.mark.needs_mongodb(6, 0)
def test_autoretry_backs_off_with_jitter_and_counts(chain: Chain) -> None:
    """`autoretry_for`, `retry_backoff` and `retry_jitter` keep Celery's own logic: at most 1 s, then at most 2 s."""
    with chain.state["partitions"].watch() as stream:
        items = [chain.write("auto", f"auto{number}", 1, act="raise", times=2) for number in range(4)]
        for item in items:
            chain.allow(item, 2)
        chain.wait_done()
        countdowns = _countdowns(stream, 8)
    chain.judge()
    assert all(_retries(chain, item) == [0, 1, 2] for item in items)
    assert [count for count, _ in countdowns].count(1) == 4
    assert all(seconds <= count for count, seconds in countdowns), countdowns


def _countdowns(stream: ChangeStream[Document], number: int) -> list[tuple[int, float]]:
    """For so many retries, as they were stored: the how many-th it is, and its seconds, by the server's clock."""
    found: list[tuple[int, float]] = []

    def all_read() -> bool:
        event = stream.try_next()
        fields = event.get("updateDescription", {}).get("updatedFields", {}) if event else {}
        retry = fields.get("retry") or {name: fields.get(f"retry.{name}") for name in ("count", "notBefore")}
        if event and retry.get("notBefore"):
            found.append((retry["count"], (retry["notBefore"] - event["wallTime"]).total_seconds()))
        return len(found) == number

    wait_for(all_read, message=lambda: f"{found}")
    return found


def test_exhausted_retries_raise_what_retry_was_given_and_go_to_the_policy(chain: Chain) -> None:
    """After `max_retries` the exception passed as `exc=` is the error of the dead letter."""
    item = chain.write("letters", "given", 1, act="retry", times=9, exc=True)
    chain.give_up(chain.allow(item, 2))
    chain.wait_done()
    chain.judge()
    (letter,) = [each for each in chain.letters("letters") if each["change"]["documentKey"] == {"_id": "given"}]
    assert letter["error"] == "WantedError: retried"
    assert letter["attempts"] == 3
    assert _retries(chain, item) == [0, 1, 2]


def test_exhausted_retries_without_an_exception_say_so_and_name_the_change(chain: Chain) -> None:
    """MaxRetriesExceededError shows the label of the change, never the envelope."""
    item = chain.write("letters", "exceeded", 1, act="retry", times=9)
    chain.give_up(chain.allow(item, 2))
    chain.wait_done()
    chain.judge()
    (letter,) = [each for each in chain.letters("letters") if each["change"]["documentKey"] == {"_id": "exceeded"}]
    assert letter["error"].startswith("MaxRetriesExceededError: ")
    assert "'exceeded' seq=" in letter["error"]
    assert len(letter["error"]) < 500


def test_a_successor_runs_after_the_letter_of_its_predecessor(chain: Chain) -> None:
    """A change that is set aside lets the next of its partition go on, with counts of its own."""
    bad = chain.write("letters", "in-line", 1, act="raise", times=9)
    chain.give_up(bad)
    good = chain.write("letters", "in-line", 2, act="retry", times=1, options={"countdown": 0})
    chain.allow(good)
    chain.wait_done()
    chain.judge()
    assert _retries(chain, good) == [0, 1]
    assert chain.starts(good)[0].at > chain.starts(bad)[0].at


def test_a_parked_retry_survives_the_restart_of_everything_and_an_empty_broker(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """P8: the retry time and the count live in MongoDB."""
    with Chain(mongo_client, mongo_url, tmp_path_factory.mktemp("restart"), handlers=["plain"]) as chain:
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
