"""Dead letters of a bridge: replayed in order, fenced with the live handler, and never lost, whoever dies meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX
from mongo_celery.bridge.worker.replay_subject import OUTDATED
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.dead_letter_handlers"


@pytest.fixture
def make_chain(deployment: MakeDeployment) -> Make:
    return lambda *handlers, **options: deployment(*handlers, include=HANDLERS, options={"partitions": 1, **options})


def _letters(chain: Deployment, *arguments: str) -> Document:
    return chain.changes("dead-letters", *arguments)


def _fail(chain: Deployment, handler: str, key: str, *numbers: int, **do: Any) -> list[Due]:
    """Changes of a key whose first start fails, and whose next one succeeds; wait until they are dead letters."""
    before = len(chain.letters(handler))
    items = [chain.write(handler, key, n, **{"act": "raise", **do}) for n in numbers]
    wait_for(lambda: len(chain.letters(handler)) == before + len(numbers), message=lambda: str(chain.letters(handler)))
    return items


def _wait_gone(chain: Deployment, handler: str, left: int = 0) -> None:
    wait_for(
        lambda: len(chain.letters(handler)) == left and not any("replay" in each for each in chain.letters(handler)),
        PATIENCE_SECONDS,
        lambda: str(chain.letters(handler)),
    )


def _spans(chain: Deployment, handler: str) -> list[tuple[int, int, Document]]:
    """When a handler has begun and ended, in the order of the beginnings."""
    ends = {(each["key"], each["n"], each["fence"]): each["at"] for each in chain.facts["end"].find()}
    starts = chain.facts["start"].find({"handler": handler}).sort("at")
    where = [(each, (each["key"], each["n"], each["fence"])) for each in starts]
    return [(each["at"], ends[place], each) for each, place in where if place in ends]


def _copy_of(chain: Deployment, handler: str, key: str) -> int | None:
    found = chain.data["copies"].find_one({"_id": f"{handler}/{key}"})
    return None if found is None else int(found["n"])


def _replayed(chain: Deployment) -> Sequence[tuple[str, int]]:
    return [(each["key"], each["n"]) for each in chain.facts["end"].find({"replayed": True}).sort("at")]


def test_letters_are_replayed_in_the_order_of_their_keys_beside_live_changes(make_chain: Make) -> None:
    """
    P2, P3, P12: one at a time with the changes of their partition; a fence for each, behind those of before.

    P6: a replay has the retries of its handler, which are counted for the letter alone.
    """
    chain = make_chain("copied", "retried", lease_ttl=20)
    chain.both()
    failed = _fail(chain, "copied", "late", 1, 2, 3)
    _fail(chain, "copied", "other", 1)
    (again,) = _fail(chain, "retried", "key", 1, times=6)
    fences = {(letter["key"], letter["seq"]): letter["fencingToken"] for letter in chain.letters("copied")}
    asked = _letters(chain, "replay", "copied", "--yes")
    assert (asked["done"], asked["count"], asked["leads"]) == (4, 4, True)
    assert _letters(chain, "replay", "retried", "--yes")["done"] == 1
    live = [chain.write("copied", f"live{n}", n, seconds=0.05) for n in range(1, 9)]
    _wait_gone(chain, "copied")
    _wait_gone(chain, "retried")
    chain.wait_done()

    assert [each for each in _replayed(chain) if each[0] == "late"] == [("late", 1), ("late", 2), ("late", 3)]
    assert (_copy_of(chain, "copied", "late"), _copy_of(chain, "copied", "other")) == (3, 1)
    spans = _spans(chain, "copied")
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(spans)), "one at a time"
    assert [len(chain.starts(item)) for item in (*failed, *live)] == [2] * len(failed) + [1] * len(live)
    for _, _, fact in spans:
        if fact["replayed"]:
            (fence,) = [fence for (key, seq), fence in fences.items() if seq == fact["seq"]]
            assert fence < fact["fence"] <= fence + REPLAYS_MAX
    starts = chain.starts(again)
    assert [each.retries for each in starts] == [0, 1, 2, 3, 0, 1, 2], "Celery's three retries, and those of the replay"
    assert [each.fence for each in starts] == sorted({each.fence for each in starts}), "each has a fence of its own"
    assert chain.of(again)["retry"] is None


def test_older_data_never_goes_over_newer_unless_it_is_asked_for(make_chain: Make) -> None:
    """P3: the fence sees it: the letter stays, and says what can be done."""
    chain = make_chain("copied")
    chain.both()
    _fail(chain, "copied", "key", 1)
    chain.write("copied", "key", 2)
    chain.wait_done()

    _letters(chain, "replay", "copied", "--yes")
    wait_for(lambda: chain.letters("copied")[0]["error"] == f"StaleFencingTokenError: {OUTDATED}")
    _wait_gone(chain, "copied", left=1)
    assert _copy_of(chain, "copied", "key") == 2

    _letters(chain, "replay", "copied", "--over-newer", "--yes")
    _wait_gone(chain, "copied")
    assert _copy_of(chain, "copied", "key") == 1
    chain.write("copied", "key", 3)
    wait_for(lambda: _copy_of(chain, "copied", "key") == 3)


def test_a_worker_that_dies_in_a_replay_loses_nothing_and_charges_no_change(make_chain: Make) -> None:
    """
    P3, P14: it is started again when its claim has lapsed; the death counts for the letter alone.

    A transactional replay takes effect once: its writes and the end of the letter are one transaction.
    """
    chain = make_chain("copied", "copied_once", max_crashes=3)
    _, worker = chain.both()
    (item,) = _fail(chain, "copied", "key", 1, late_gate="hold")
    (once,) = _fail(chain, "copied_once", "key", 1, late_gate="hold")
    for handler, each in (("copied", item), ("copied_once", once)):
        _letters(chain, "replay", handler, "--yes")
        chain.wait_started(each, 2)
    behind = chain.write("copied", "live", 1)
    started = [(each["replays"], each["replay"]["state"]) for each in chain.letters("copied")]
    assert started == [(1, "started")], "recorded before it began"
    worker.send_group(signal.SIGKILL)
    chain.worker(name="second")
    chain.wait_started(item, 3)
    (letter,) = chain.letters("copied")
    assert (letter["replays"], letter["replay"]["crashes"]) == (2, 1)
    chain.open_gate("hold")
    _wait_gone(chain, "copied")
    _wait_gone(chain, "copied_once")
    chain.wait_done()

    assert _copy_of(chain, "copied", "key") == 1
    assert chain.data["copies"].find_one({"_id": "copied_once/key"}) == {"_id": "copied_once/key", "n": 1, "times": 1}
    assert len(chain.starts(behind)) == 1
    assert chain.of(item)["retry"] is None
    fences = [each.fence for each in chain.starts(item)]
    assert fences == sorted(set(fences))


def test_a_listener_that_dies_in_a_replay_leaves_it_to_the_next(make_chain: Make) -> None:
    """P1, P7: behind the dispatch; in order all the same."""
    chain = make_chain("copied")
    first = chain.listener("first")
    chain.worker()
    _fail(chain, "copied", "bad", 1, times=9)
    _fail(chain, "copied", "bad", 2)
    (held,) = _fail(chain, "copied", "held", 1, late_gate="hold")
    first.terminate()
    point = '{"at": "RunPublisher.publish", "behind": true, "once": "Replays.read"}'
    doomed = chain.listener("doomed", awaited="", SCRIPTED_POINT=point)
    doomed.wait_for_output("reading from")
    _letters(chain, "replay", "copied", "--yes")
    wait_for(lambda: not doomed.running, message=lambda: doomed.text)
    chain.listener("next")
    chain.open_gate("hold")
    _wait_gone(chain, "copied", left=2)

    assert _replayed(chain) == [("held", 1)]
    assert len(chain.starts(held)) == 2, "its handler has ended once, and was not started again"


@pytest.mark.slow
def test_letters_of_an_older_layout_are_replayed_where_their_keys_are_now(make_chain: Make) -> None:
    """P2: in the partition of their key, and at the place that they had."""
    chain = make_chain("copied")
    listener, worker = chain.both()
    _fail(chain, "copied", "key", 1)
    _fail(chain, "copied", "newer", 1)
    listener.terminate()
    worker.terminate()
    chain.listener("five", options={"partitions": 5})
    chain.worker(name="five_worker", options={"partitions": 5})
    wait_for(lambda: len(chain.changes("status")["handlers"][0]["partitions"]) == 5)
    chain.write("copied", "newer", 2)
    wait_for(lambda: _copy_of(chain, "copied", "newer") == 2)
    _letters(chain, "replay", "copied", "--yes")
    _wait_gone(chain, "copied", left=1)
    assert _copy_of(chain, "copied", "key") == 1
    assert _copy_of(chain, "copied", "newer") == 2
    assert chain.letters("copied")[0]["error"] == f"StaleFencingTokenError: {OUTDATED}"
