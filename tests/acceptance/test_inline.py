"""`commit="inline"`: the position is the one write of a success, and all that a chain promises is promised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import started_out_of_sequence

Document = dict[str, Any]

_LATE = 600.0
"""A `commit_grace` that no test waits for: whatever is committed in time was not waited for."""


@pytest.fixture
def make_chain(deployment: MakeDeployment) -> Make:
    """Give bridges of one partition that commit inline, in runs of up to ten changes."""
    chosen = {"commit": "inline", "partitions": 1, "run_size": 10, "max_crashes": 9, "commit_grace": _LATE}
    return lambda *handlers, **options: deployment(*handlers, options={**chosen, **options})


def _pile_up(chain: Deployment, handler: str, count: int, **asked: Document) -> list[Any]:
    """Changes of one key behind one that waits, so that they become one run; `n3` is what the third one does."""
    first = chain.write(handler, "first", 1, gate="open")
    chain.wait_started(first)
    items = [chain.write(handler, "key", n, **asked.get(f"n{n}", {})) for n in range(1, count + 1)]
    chain.wait_read(count + 1)
    chain.open_gate("open")
    return items


def test_whatever_its_handlers_do_positions_follow_without_a_second_message(make_chain: Make) -> None:
    """
    P1, P2, P6: runs, of which one is cut in the middle, retries, dead letters, what is ignored, transactions.

    No commit task is ever received, and nobody waits for one.
    """
    chain = make_chain("plain", "auto", "letters", "together")
    _, worker = chain.both()
    third = _pile_up(chain, "letters", 5, n3={"act": "raise", "times": 99})[2]
    chain.give_up(chain.allow(third, 3))
    chain.allow(chain.write("auto", "retried", 1, act="raise", times=2), 2)
    chain.give_up(chain.write("plain", "ignored", 1, act="ignore", times=9))
    together = [chain.write("together", "t", n) for n in range(1, 4)]
    chain.wait_done()
    history = chain.judge()
    assert started_out_of_sequence([each for each in history if getattr(each, "handler", "") == "together"]) == []
    assert [effect.due for effect in chain.effects() if effect.handler == "together"] == together
    assert [letter["attempts"] for letter in chain.letters("letters")] == [1]
    assert len({start.fence for start in chain.starts() if start.key == "key"}) < 5, "and runs were runs"
    assert chain.partition("letters", 0)["handled"] is None
    assert "mongo_celery.commit[" not in worker.text
    assert "refused" not in worker.text


@pytest.mark.parametrize(
    ("handler", "point", "starts"),
    [
        ("plain", {"at": "Claims.finish"}, 2),
        ("plain", {"at": "Claims.finish", "behind": True}, 1),
        ("together", {"at": "Claims.write_inside", "behind": True}, 2),
        ("together", {"at": "Execution.note_commit"}, 1),
    ],
    ids=["before the write", "behind the write", "before the commit of a transaction", "behind the commit"],
)
def test_there_is_no_moment_between_success_and_position(
    make_chain: Make, handler: str, point: Document, starts: int
) -> None:
    """P1, P6: killed right before its success is written, a change runs again; right behind, it is done."""
    chain = make_chain(handler)
    chain.listener()
    chain.worker(name="doomed", concurrency=1, SCRIPTED_POINT=json.dumps(point))
    item = chain.write(handler, "hit", 1)
    chain.wait_started(item)  # else both are in one run, and both run again
    successor = chain.write(handler, "hit", 2)
    chain.wait_done()
    repeated = len(chain.starts(item)) - starts
    assert repeated in ((0, 1) if starts == 2 else (0,)), "on a busy machine the claim may lapse before the restart"
    assert len(chain.starts(successor)) == 1
    chain.allow(item)
    chain.judge()
    if handler == "together":
        assert [effect.due for effect in chain.effects()] == [item, successor]
