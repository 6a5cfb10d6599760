"""
The verdict: what the writer recorded against what was read back. Pure.

- *lost*: a write for which no handler started, or whose effect is missing in the end.
- *out of order*: handlers of one key were granted the right to run, or effects on one document were seen, with an
  older number after a newer one.
- *unexpected*: a handler ran, or an effect exists, for something that nobody wrote.
- *duplicates*: starts beyond the first one of a change. Faults may cause them; they are counted, not judged.

The checks are those of `history`. A handler that was overtaken leaves no effect, so the effects owe the last number
of each document only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mongo_celery.demo.history import (
    NONE,
    Effect,
    Started,
    Wrote,
    granted_out_of_order,
    invented,
    missing,
    went_back,
)
from mongo_celery.demo.plan import PlannedWrite
from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE

WRONG = -1
"""The number of a copy that is no version of its customer."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    What was read back.

    Attributes:
        started: journal entries, in the order of the oplog.
        effects: changes of summaries (by `summarise`) and of names in orders (by `name_into_order`), in the order
            of the oplog.
        final: what the documents show in the end, in the same form.
        refused: how many fenced writes were refused.
    """

    started: Sequence[Started]
    effects: Sequence[Effect]
    final: Sequence[Effect]
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """The findings, each a sentence; see the module."""

    lost: tuple[str, ...]
    out_of_order: tuple[str, ...]
    unexpected: tuple[str, ...]
    duplicates: int
    stale_writes_refused: int

    @property
    def good(self) -> bool:
        """Whether the promise was kept."""
        return not (self.lost or self.out_of_order or self.unexpected)


def judge(writes: Sequence[PlannedWrite], evidence: Evidence) -> Judgement:
    """Compare what was written, in the order of writing for each key, with what was read back."""
    owed, shown = list(handled(writes)), list(_shown(writes))
    last = {(value.handler, value.key): value for value in shown}
    missed = missing([*owed, *evidence.started], NONE, Started)
    missed += missing([*last.values(), *evidence.final], NONE, Effect)
    unexpected = [*invented([*owed, *evidence.started]), *invented([*shown, *evidence.effects, *evidence.final])]
    return Judgement(
        lost=tuple(f"{due.handler} lost {due.key} n={due.n}" for due in sorted(set(missed))),
        out_of_order=(*granted_out_of_order(evidence.started), *went_back(evidence.effects)),
        unexpected=tuple(dict.fromkeys(unexpected)),
        duplicates=len(evidence.started) - len({start.due for start in evidence.started}),
        stale_writes_refused=evidence.refused,
    )


def handled(writes: Sequence[PlannedWrite]) -> Iterator[Wrote]:
    """For each write the handlers that must run."""
    for write in writes:
        if write.customer is None:
            yield Wrote(write.key, write.number, handler=NAME_FROM_CUSTOMER)
        else:
            yield Wrote(write.key, write.number, handler=SUMMARISE)
            if write.number == 0:
                yield Wrote(write.key, write.number, handler=NAME_INTO_ORDER)


def _shown(writes: Sequence[PlannedWrite]) -> Iterator[Wrote]:
    """What summaries, and names in orders, may show; the last of each they must show in the end."""
    versions: dict[str, list[int]] = {}
    for write in writes:
        if write.customer is None:
            versions.setdefault(write.key, []).append(write.number)
        else:
            yield Wrote(write.key, write.number, handler=SUMMARISE)
    for write in writes:
        if write.customer is not None and write.number == 0:
            for version in versions.get(write.customer, ()):
                yield Wrote(write.key, version, handler=NAME_INTO_ORDER)
