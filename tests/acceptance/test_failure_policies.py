"""What happens to a change that fails for good: halt, dead letter, skip, discard; and what counts as failing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from bson import Decimal128, Int64, Timestamp

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give one listener and one worker; a change may crash once."""
    handlers = ("plain", "letters", "halting", "skipping", "discarding", "soft", "hard")
    return shared_deployment(*handlers, start="both")


def _letter(chain: Deployment, item: Due) -> Document:
    (letter,) = [each for each in chain.letters(item.handler) if each["change"]["documentKey"] == {"_id": item.key}]
    return letter


def test_halt_stops_one_partition_loudly_and_records_its_head(chain: Deployment) -> None:
    """P1, P9: the default policy; the other partitions of the handler flow."""
    keys = chain.keys("halting", 0, "halt")
    bad = chain.stand(chain.write("halting", next(keys), 1, act="raise", times=9, text="cannot go on"))
    behind = chain.stand(chain.write("halting", next(keys), 1))
    state = chain.wait_state(bad, lambda state: state["state"] == "halted")
    elsewhere = chain.write("halting", next(chain.keys("halting", 1, "halt")), 1)
    chain.wait_done(handlers=["halting"])
    assert len(chain.starts(elsewhere)) == 1
    assert state["halted"]["key"] == f"{chain.data.name}.halting insert {bad.key!r}"
    assert state["halted"]["resumeToken"]["_data"]
    assert state["retry"]["error"] == "WantedError: cannot go on"
    assert state["claim"] is None
    worker = next(text for name, text in chain.logs.items() if "worker" in name)
    assert re.search(r"ERROR.*has failed permanently .failure_policy halt.: WantedError: cannot go on", worker)
    assert chain.starts(behind) == []
    chain.judge()


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
    """The successor goes on; what was skipped is a dead letter that says so, and an ERROR in the log."""
    keys = chain.keys("skipping", 0, "skip")
    bad = chain.give_up(chain.write("skipping", next(keys), 1, act="raise", times=9))
    good = chain.write("skipping", next(keys), 1)
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(bad)) == len(chain.starts(good)) == 1
    assert [(letter["cause"], letter["key"]) for letter in chain.letters("skipping")] == [
        ("skipped", f"{chain.data.name}.skipping insert {bad.key!r}")
    ]
    assert any(
        f"skipping insert {bad.key!r} has failed permanently (failure_policy skip)" in text
        for text in chain.logs.values()
    )


def test_discard_logs_and_keeps_nothing(chain: Deployment) -> None:
    """The successor goes on; there is no letter."""
    keys = chain.keys("discarding", 0, "discard")
    bad = chain.give_up(chain.write("discarding", next(keys), 1, act="raise", times=9))
    good = chain.write("discarding", next(keys), 1)
    chain.wait_done()
    chain.judge()
    assert len(chain.starts(bad)) == len(chain.starts(good)) == 1
    assert chain.letters("discarding") == []
    said = f"discarding insert {bad.key!r} has failed permanently (failure_policy discard)"
    assert any(said in text for text in chain.logs.values())


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("reject", "WantedError: rejected"),
        ("replace", "HandlerUsageError: A change handler cannot replace itself"),
        ("join_chord", "HandlerUsageError: A change handler cannot join a chord"),
    ],
)
def test_what_a_chain_cannot_do_goes_to_the_policy(chain: Deployment, act: str, error: str) -> None:
    """`Reject` would drop or requeue the message, `replace` and `add_to_chord` would break the chain."""
    item = chain.give_up(chain.write("letters", f"act-{act}", 1, act=act, times=9))
    chain.wait_done()
    chain.judge()
    assert _letter(chain, item)["error"].startswith(error)


def test_a_handler_that_ignores_its_change_is_done_with_it(chain: Deployment) -> None:
    """`Ignore` counts as success, with a log line."""
    keys = chain.keys("letters", 0, "ignore")
    item = chain.give_up(chain.write("letters", next(keys), 1, act="ignore", times=9))
    chain.write("letters", next(keys), 1)
    chain.wait_done()
    chain.judge()
    assert any(
        f"the handler ignored {chain.data.name}.letters insert {item.key!r}" in text for text in chain.logs.values()
    )
    assert all(letter["change"]["documentKey"]["_id"] != item.key for letter in chain.letters("letters"))


@pytest.mark.parametrize(
    "act", ["leave", "kill", pytest.param("die", marks=pytest.mark.slow), pytest.param("segv", marks=pytest.mark.slow)]
)
def test_a_change_that_kills_its_worker_is_caught_by_the_policy(chain: Deployment, act: str) -> None:
    """P6, P9: after `max_crashes` deaths one more ends in the policy; its partition goes on, nobody else is charged."""
    asked = {"kill": {"act": "signal", "signal": "SIGKILL"}, "segv": {"act": "signal", "signal": "SIGSEGV"}}
    keys = chain.keys("letters", 1, f"crash-{act}")
    bad = chain.write("letters", next(keys), 1, times=9, **asked.get(act, {"act": act}))
    chain.give_up(chain.allow(bad))
    good = chain.write("letters", next(keys), 1)
    chain.wait_done()
    chain.judge()
    letter = _letter(chain, bad)
    assert letter["error"].startswith("HandlerCrashedError: The worker ended 2 times while handling")
    assert letter["attempts"] == 2
    assert len(chain.starts(good)) == 1


def test_a_handler_without_memory_fails_and_its_worker_lives(chain: Deployment) -> None:
    """P12: Celery ends a worker whose task raises MemoryError."""
    keys = chain.keys("letters", 1, "exhausted")
    chain.give_up(chain.write("letters", next(keys), 1, act="exhaust", times=9))
    chain.write("letters", next(keys), 1)
    chain.wait_done()
    chain.judge()
    assert not [name for name, text in chain.logs.items() if "Unrecoverable error" in text]


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
