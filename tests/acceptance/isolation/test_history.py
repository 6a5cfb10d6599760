"""Lost history stops only those who lost it, is decided for each of them, and does not come without a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.embedded import MongoReplicaSet
from tests.acceptance.isolation.rolling_rig import Rolling
from tests.fixtures.process import wait_for
from tests.rig.deployment import MakeDeployment

Document = dict[str, Any]


@pytest.fixture
def make_rolling(
    deployment: MakeDeployment, rolling_oplog: MongoReplicaSet, make_client: Callable[..., MongoClient[Document]]
) -> Callable[..., Rolling]:
    """
    Give what makes such a bridge, with these handlers.

    It has no room for stored changes: what stands in it can lose its history.
    """
    client = make_client(rolling_oplog.url)
    return lambda *handlers, **options: deployment(
        *handlers, kind=Rolling, client=client, url=rolling_oplog.url, options={"spill_bytes": 1, **options}
    )


def test_lost_history_stops_the_listener_until_somebody_decides(make_rolling: Callable[..., Rolling]) -> None:
    """P1, P9: never skipped silently, also by a supervisor's restarts; the remedy is in the sentence and works."""
    chain = make_rolling("plain")
    first, _ = chain.both()
    chain.write("plain", "before", 1)
    chain.wait_done()
    wait_for(lambda: chain.watermark("plain") > Timestamp(0, 0), message="a stored position")
    assert first.terminate() == 0
    chain.stand(chain.write("plain", "lost", 1))
    chain.roll()
    chain.keep()
    for name in ("one", "two"):
        listener = chain.listener(name, awaited="")
        assert listener.wait() == 1
        assert "--on-history-lost" in listener.text
        assert "Traceback" not in listener.text
    assert (chain.lease["state"], chain.lease.get("listenerId")) == ("history_lost", None)

    decided = ("listener", "-l", "INFO", "--on-history-lost", "now")
    deciding = chain.start(*decided, name="deciding", awaited="reading from")
    chain.wait_started(chain.write("plain", "after", 1))
    assert {start.key for start in chain.starts()} == {"before", "after"}
    (gap,) = chain.subscription("plain")["gaps"]
    assert gap["policy"] == "now"
    wait_for(lambda: chain.watermark("plain") > gap["until"])
    assert deciding.terminate() == 0
    again = chain.listener("again")
    chain.wait_started(chain.write("plain", "later", 1))
    assert again.running, "the new position is in the oplog: no decision is needed any more"


def test_those_who_lost_their_history_stand_still_and_the_others_go_on(make_rolling: Callable[..., Rolling]) -> None:
    """
    I2, P12: until somebody decides, and for that one alone; the decision needs no restart.

    One was halted: that change was stored by its execution, so that a retry runs it, whatever became of the oplog.
    One was away for longer than the oplog.
    """
    chain = make_rolling("plain", "halting", "other")
    first, _ = chain.both()
    chain.write("other", "before", 1)
    chain.wait_done()
    assert first.terminate() == 0
    without = chain.listener("without", SCRIPTED_HANDLERS="plain,halting")
    bad = chain.halt()
    chain.roll_past("plain")
    assert without.terminate() == 0

    again = chain.listener("again")
    chain.write("plain", "two", 1)
    chain.wait_done(handlers=["plain"])
    unread = chain.write("halting", chain.key_beside(bad), 1)

    again.wait_for_output("handler halting is stopped: .* reset halting --to oldest")
    wait_for(lambda: chain.shown() == {"halting": "history_lost", "other": "history_lost", "plain": "flowing"})
    assert chain.subscription("other")["lost"]["at"] < chain.oldest
    assert chain.starts(unread) == []

    done = chain.command("reset", "halting", "--to", "oldest", "--yes")
    assert done.returncode == 0, done.stderr
    chain.wait_started(unread)
    assert chain.of(bad)["state"] == "halted", "its partitions stay as they are"
    assert [gap["policy"] for gap in chain.subscription("halting")["gaps"]] == ["oldest"]
    where = ("halting", str(chain.partition_of("halting", bad.key)))
    begun = len(chain.starts(chain.allow(bad)))
    back = chain.command("retry", *where)
    assert back.returncode == 0, back.stderr
    wait_for(lambda: len(chain.starts(bad)) > begun)
    chain.wait_state(bad, lambda state: state["state"] == "halted")
    assert again.running
    chain.judge()
