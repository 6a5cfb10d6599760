"""Bulk handlers in real workers: retries, dead letters and effects of single changes of a list."""

from __future__ import annotations

from collections import Counter

from tests.rig.deployment import MakeDeployment
from tests.rig.history import violations

_KEYS = [f"k{number}" for number in range(8)]
_MORE = [f"m{number}" for number in range(8)]


def test_exactly_the_changes_that_fail_are_retried_and_set_aside(deployment: MakeDeployment) -> None:
    """
    P1, P2, P6: lists of a handler that says which change has failed, and of one in transactions that does not.

    The first is given nothing twice but what is retried, the second has each effect once.
    """
    names = ["listed", "listed_together"]
    chain = deployment(*names, options={"partitions": 1})
    chain.listener()
    told = chain.write_many("listed", _KEYS, 2)
    again = chain.allow(chain.write("listed", "again", 1, act="raise"))
    bad = chain.give_up(chain.write("listed", "bad", 1, act="raise", times=9))
    chain.allow(bad)
    told += chain.write_many("listed", _MORE, 2)
    together = chain.write_many("listed_together", _KEYS, 2)
    worse = chain.give_up(chain.write("listed_together", "bad", 1, act="raise", after=True, times=99))
    together += chain.write_many("listed_together", _MORE, 1)
    chain.worker(concurrency=1)
    chain.wait_done()

    starts = Counter(each.due for each in chain.starts())
    assert {starts[each] for each in (again, bad)} == {2}
    assert [each.retries for each in chain.starts(again)] == [0, 1]
    for handler, failed in (("listed", bad), ("listed_together", worse)):
        (letter,) = chain.letters(handler)
        assert letter["change"]["fullDocument"]["_id"] == failed.key
        assert "WantedError" in letter["error"]
    effects = Counter(each.due for each in chain.effects())
    assert set(effects) == {*told, again, *together}
    assert set(effects.values()) == {1}
    assert max(each["count"] for each in chain.facts["list"].find({"handler": "listed"})) == 8
    assert max(each["count"] for each in chain.facts["list"].find({"handler": "listed_together"})) == 8
    assert {starts[item] for item in told} == {1}
    found = violations(chain.history(), spare=20)
    # Halves of a list are given again by one execution: that is what its transactions are for.
    assert [each for each in found if not (each.startswith(names[1]) and "under one token" in each)] == []
