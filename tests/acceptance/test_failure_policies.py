"""What happens to a change that fails for good: halt, dead letter, skip, discard; and what counts as failing."""

from __future__ import annotations

from typing import Any

import pytest
from bson import Decimal128, Int64, Timestamp

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    handlers = ("plain", "letters", "halting", "skipping", "discarding", "soft", "hard")
    return shared_deployment(*handlers, start="both")


def _letter(chain: Deployment, item: Due) -> Document:
    (letter,) = [each for each in chain.letters(item.handler) if each["change"]["documentKey"] == {"_id": item.key}]
    return letter


@pytest.mark.needs_mongodb(5, 0)
def test_a_dead_letter_keeps_the_exact_change_with_error_traceback_and_attempts(chain: Deployment) -> None:
    """P1: nothing of the change is lost, whatever types it has."""
    exact = {
        "big": Int64(2**40),
        "money": Decimal128("1.10"),
        "time": Timestamp(5, 6),
        "$odd": {"a.b": [None, b"\x00"]},
    }
    item = chain.write("letters", "exact", 1, act="raise", times=9, text="poison", exact=exact)
    chain.give_up(item)
    chain.wait_done()
    letter = _letter(chain, item)
    document = letter["change"]["fullDocument"]
    assert document == {"_id": "exact", "n": 1, "do": {"act": "raise", "times": 9, "text": "poison", "exact": exact}}
    assert type(document["do"]["exact"]["big"]) is Int64
    assert letter["change"]["_id"] == letter["resumeToken"]
    assert letter["error"] == "WantedError: poison"
    assert "in _raise" in letter["traceback"]
    assert letter["attempts"] == 1
    assert letter["at"] is not None
    assert letter["key"] == f"{chain.data.name}.letters insert 'exact'"
    chain.judge()


def test_skip_passes_over_and_keeps_what_it_skips(chain: Deployment) -> None:
    """The successor goes on; what was skipped is a dead letter that says so. Discard keeps nothing."""
    asked = {"skipping": "raise", "discarding": "raise", "letters": "ignore"}
    for handler, act in asked.items():
        keys = chain.keys(handler, 0, "passed")
        bad = chain.give_up(chain.write(handler, next(keys), 1, act=act, times=9))
        good = chain.write(handler, next(keys), 1)
        chain.wait_done()
        assert len(chain.starts(bad)) == len(chain.starts(good)) == 1
        kept = [letter["cause"] for letter in chain.letters(handler) if bad.key in letter["key"]]
        assert kept == (["skipped"] if handler == "skipping" else [])
    chain.judge()


def test_what_a_chain_cannot_do_goes_to_the_policy(chain: Deployment) -> None:
    """
    `Reject` would drop or requeue the message, `replace` and `add_to_chord` would break the chain.

    P12: and Celery would end a worker whose task raises MemoryError.
    """
    acts = {
        "reject": "WantedError",
        "replace": "HandlerUsageError",
        "join_chord": "HandlerUsageError",
        "exhaust": "MemoryError",
    }
    items = {act: chain.give_up(chain.write("letters", f"act-{act}", 1, act=act, times=9)) for act in acts}
    chain.write("letters", "behind", 1)
    chain.wait_done()
    chain.judge()
    assert {act: _letter(chain, item)["error"].partition(":")[0] for act, item in items.items()} == acts
    assert not [name for name, text in chain.logs.items() if "Unrecoverable error" in text]


def test_a_change_that_kills_its_worker_is_caught_by_the_policy(chain: Deployment) -> None:
    """P6, P9: after `max_crashes` deaths one more ends in the policy; its partition goes on, nobody else is charged."""
    ways: list[Document] = [{"act": "leave"}, {"act": "die"}]
    ways += [{"act": "signal", "signal": name} for name in ("SIGKILL", "SIGSEGV")]
    bad, good = [], []
    for index, asked in enumerate(ways):
        keys = chain.keys("letters", index, "crash")
        bad.append(chain.give_up(chain.allow(chain.write("letters", next(keys), 1, times=9, **asked))))
        good.append(chain.write("letters", next(keys), 1))
    chain.wait_done()
    chain.judge()
    for item in bad:
        letter = _letter(chain, item)
        assert (letter["error"].partition(":")[0], letter["attempts"]) == ("HandlerCrashedError", 2)
    assert len(chain.starts(*good)) == len(ways)


def test_only_the_guilty_change_of_a_run_is_charged(deployment: MakeDeployment) -> None:
    """P6: after a crash inside a run the changes run one by one, until the guilty one is passed."""
    chain = deployment("letters", options={"run_size": 10, "run_seconds": 5, "partitions": 1})
    chain.both()
    chain.wait_started(chain.write("letters", "first", 1, gate="first"))
    items = [chain.write("letters", "run", n, **({"act": "die", "times": 9} if n == 3 else {})) for n in range(1, 7)]
    for item in items[:2]:
        chain.allow(item)
    guilty = chain.give_up(chain.allow(items[2], 2))
    chain.open_gate("first")
    chain.wait_done()
    chain.judge()
    assert [letter["change"]["fullDocument"]["n"] for letter in chain.letters("letters")] == [3]
    # The crash inside the run is its own already where a slow run had recorded that those before it were done.
    assert len(chain.starts(guilty)) in {2, 3}
