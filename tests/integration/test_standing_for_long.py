"""An hour of standing, in which time is told and not waited for: nothing of the listener grows with it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import bson
import pytest

from tests.fixtures.mongo import MakeClient, sparse
from tests.integration.storing_rig import Term, terms

Begin = Callable[..., Term]

_SECONDS = 3600
_EARLY = 600
_REFUSED_EVERY = 2
_PADDING = 300
_NOT_OURS = (type, ModuleType, FunctionType, BuiltinFunctionType)


@pytest.fixture
def begin(make_client: MakeClient, state_database: str) -> Iterator[Begin]:
    """Give what begins a term, whatever the one before is doing."""
    yield from terms(make_client(), state_database)


def key_of_some(event: Mapping[str, Any]) -> Any:
    """A partition rule that fails now and then, where changes flow: where they stand that would hold the watermark."""
    n = event["fullDocument"]["n"]
    if n % 2 == 1 and n // 2 % _REFUSED_EVERY == 0:
        raise LookupError(n)
    return event["documentKey"]["_id"]


class Hour:
    """A term with a partition that halts at its first change, and one that flows; each gets a change a second."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.second = 0

    def run_to(self, second: int) -> None:
        """Let time go by, with a watermark that is stored every ten seconds."""
        while self.second < second:
            self.second += 1
            self.term.read(2 * self.second, padding=_PADDING)
            self.term.read(2 * self.second + 1, index=1, padding=_PADDING)
            self.term.turn()
            for run in self.term.dispatch():
                self.term.halt(run) if run.index == 0 else self.term.run(run)
            self.term.turn(1.0)
            if self.second % 10 == 0:
                self.term.flush()

    def settle(self) -> None:
        """Wait until all of the halted partition is stored, and nothing of the other."""
        self.term.turn_until(lambda: not self.term.led.window.count, later=0.3)
        self.term.flush()  # up to there what was refused in the other partition is removed
        self.term.turn_until(lambda: self.term.documents.count_documents({}) == self.second, later=1.0)

    def grown(self) -> dict[str, int]:
        """Return what it has: objects in memory, their bytes, what is reported, and the document of its watermark."""
        objects, size = _reachable(self.term.led, self.term.storing)
        document = sparse(self.term.rig.database["handlers"]).find_one({}) or {}
        return {
            "objects": objects,
            "bytes": size,
            "report": len(str(self.term.storing.report())),
            "document": len(bson.encode(document)),
        }


def _reachable(*roots: object) -> tuple[int, int]:
    """How many objects can be reached from these, and how many bytes they have."""
    seen: set[int] = set()
    left, size = list(roots), 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _NOT_OURS):
            continue
        seen.add(id(each))
        size += sys.getsizeof(each)
        left += gc.get_referents(each)
    return len(seen), size


@pytest.mark.slow
def test_an_hour_of_standing_costs_no_memory(begin: Begin) -> None:
    """P12, P13: all of the halted partition is stored, the watermark follows, and memory and its document stay flat."""
    hour = Hour(begin(partition_by=key_of_some))
    hour.run_to(_EARLY)
    hour.settle()
    early = hour.grown()

    hour.run_to(_SECONDS)
    hour.settle()

    late = hour.grown()
    term = hour.term
    assert len(term.stored()) == _SECONDS, "all of the halted partition"
    assert len(term.ran) == _SECONDS, "all of the other"
    assert term.flush() == term.led.window.seen, "the watermark is behind all that was read"
    slack = {"objects": 500, "bytes": 100_000, "report": 100, "document": 10}
    assert {name: late[name] - early[name] for name in late if late[name] - early[name] > slack[name]} == {}
