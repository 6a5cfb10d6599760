"""`commit="inline"`: the position is the one write of a success, and all that a chain promises is promised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from tests.acceptance.chain_rig import Chain, frozen
from tests.chaos.history import started_out_of_sequence
from tests.fixtures.process import wait_for

Document = dict[str, Any]
MakeChain = Callable[..., Chain]

_LATE = 600.0
"""A `commit_grace` that no test waits for: whatever is committed in time was not waited for."""


@pytest.fixture
def make_chain(mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path) -> Iterator[MakeChain]:
    """Give bridges of one partition that commit inline, in runs of up to ten changes."""
    made: list[Chain] = []

    def make(*handlers: str, **options: Any) -> Chain:
        chosen = {"commit": "inline", "partitions": 1, "run_size": 10, "max_crashes": 9, "commit_grace": _LATE}
        made.append(Chain(mongo_client, mongo_url, tmp_path, handlers=handlers, options={**chosen, **options}))
        return made[-1].__enter__()

    yield make
    for chain in made:
        chain.__exit__()


def _pile_up(chain: Chain, handler: str, count: int, **asked: Document) -> list[Any]:
    """Changes of one key behind one that waits, so that they become one run; `n3` is what the third one does."""
    first = chain.write(handler, "first", 1, gate="open")
    chain.wait_started(first)
    items = [chain.write(handler, "key", n, **asked.get(f"n{n}", {})) for n in range(1, count + 1)]
    chain.wait_read(count + 1)
    chain.open_gate("open")
    return items


def test_whatever_its_handlers_do_positions_follow_without_a_second_message(make_chain: MakeChain) -> None:
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
        ("plain", {"at": "Claims.handle"}, 2),
        ("plain", {"at": "Claims.handle", "behind": True}, 1),
        ("together", {"at": "Claims.handle", "behind": True}, 2),
        ("together", {"at": "Execution.note_commit"}, 1),
    ],
    ids=["before the write", "behind the write", "before the commit of a transaction", "behind the commit"],
)
def test_there_is_no_moment_between_success_and_position(
    make_chain: MakeChain, handler: str, point: Document, starts: int
) -> None:
    """P1, P6: killed right before its success is written, a change runs again; right behind, it is done."""
    chain = make_chain(handler)
    chain.listener()
    chain.worker(name="doomed", concurrency=1, CHAIN_POINT=json.dumps(point))
    item = chain.write(handler, "hit", 1)
    chain.wait_started(item)  # else both are in one run, and both run again
    successor = chain.write(handler, "hit", 2)
    chain.wait_done()
    assert [len(chain.starts(each)) for each in (item, successor)] == [starts, 1]
    chain.allow(item)
    chain.judge()
    if handler == "together":
        assert [effect.due for effect in chain.effects()] == [item, successor]


def test_a_frozen_handler_that_wakes_after_its_effect_moves_no_position(make_chain: MakeChain) -> None:
    """P3, P4: the position that it would write is refused; its successor's stands."""
    chain = make_chain("plain")
    _, worker = chain.both()
    item = chain.write("plain", "hit", 1, late_gate="open")
    chain.write("plain", "hit", 2)
    zombie = chain.wait_started(item)
    wait_for(lambda: len(chain.effects()) == 1)
    with frozen(worker, zombie.pid):
        chain.wait_started(item, 2)
        chain.open_gate("open")
        chain.wait_done()
    worker.wait_for_output(rf"handled of chain/plain/\d+/0 \(fencing token {zombie.fence}\) was refused")
    chain.allow(item)
    chain.judge()
    assert chain.of(item)["committed"] == 2
