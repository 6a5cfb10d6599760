"""
The verdict: what the writer recorded against what was read back. Pure.

- *lost*: a write for which no handler started, or whose effect is missing in the end.
- *out of order*: handlers of one key started, or effects on one document were seen, with an older number
  after a newer one. Starts are put in the order of their fencing tokens, since that is the order in which the
  right to run was granted; effects stand in the order of the server's oplog.
- *unexpected*: a handler ran, or an effect exists, for something that nobody wrote.
- *duplicates*: starts beyond the first one of a change. Faults may cause them; they are counted, not judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mongo_celery.demo.setting import NAME_FROM_CUSTOMER, NAME_INTO_ORDER, SUMMARISE

Copy = tuple[int, str]
"""A customer's version and name."""

_Write = tuple[str, str, int]
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WrittenOrder:
    """An order as the writer wrote it: its customer, and its numbers in the order of writing."""

    customer: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """
    What the writer recorded after each acknowledged write.

    Attributes:
        orders: by key.
        customers: versions and names by key, in the order of writing.
    """

    orders: Mapping[str, WrittenOrder]
    customers: Mapping[str, tuple[Copy, ...]]

    @property
    def count(self) -> int:
        """How many writes these are."""
        return sum(len(order.numbers) for order in self.orders.values()) + sum(map(len, self.customers.values()))

    def expected(self) -> Iterator[_Write]:
        """For each write the handlers that must run: handler, key, number."""
        for key, order in self.orders.items():
            for number in order.numbers:
                yield SUMMARISE, key, number
            yield NAME_INTO_ORDER, key, order.numbers[0]
        for key, copies in self.customers.items():
            for version, _ in copies:
                yield NAME_FROM_CUSTOMER, key, version


@dataclass(frozen=True, slots=True)
class Start:
    """A handler began with a change: the journal's entry."""

    handler: str
    key: str
    number: int
    fence: int


@dataclass(frozen=True, slots=True)
class Effect:
    """A number appeared on a document that handlers write: `summary` or `name`."""

    target: str
    key: str
    number: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    What was read back.

    Attributes:
        starts: journal entries, in the order of the oplog.
        effects: changes of summaries and of names in orders, in the order of the oplog.
        summaries: the last number in each order's summary.
        copies: the customer's version and name in each order, None where there is none.
        refused: how many fenced writes were refused.
    """

    starts: Sequence[Start]
    effects: Sequence[Effect]
    summaries: Mapping[str, int]
    copies: Mapping[str, Copy | None]
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
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


def judge(written: Written, evidence: Evidence) -> Verdict:
    """Compare what was written with what was read back."""
    expected = set(written.expected())
    runs = Counter((start.handler, start.key, start.number) for start in evidence.starts)
    lost = {write: f"{_text(write)} was written, but no handler started" for write in expected - runs.keys()}
    for write, text in _missing_effects(written, evidence):
        lost.setdefault(write, text)
    return Verdict(
        lost=tuple(lost[write] for write in sorted(lost)),
        out_of_order=tuple(_steps_back(evidence)),
        unexpected=tuple(_unexpected(written, evidence, runs.keys() - expected)),
        duplicates=sum(count - 1 for count in runs.values()),
        stale_writes_refused=evidence.refused,
    )


def _missing_effects(written: Written, evidence: Evidence) -> Iterator[tuple[_Write, str]]:
    for key, order in written.orders.items():
        last, found = order.numbers[-1], evidence.summaries.get(key)
        if found != last:
            yield (SUMMARISE, key, last), f"the summary of {key} shows n={found}, but n={last} was written"
        copies = written.customers.get(order.customer)
        if copies and evidence.copies.get(key) != copies[-1]:
            shown = evidence.copies.get(key)
            yield (NAME_INTO_ORDER, key, -1), f"{key} shows {shown} of {order.customer}, but {copies[-1]} was written"


def _steps_back(evidence: Evidence) -> Iterator[str]:
    by_fence = sorted(evidence.starts, key=lambda start: start.fence)  # stable: equal ones stay in oplog order
    starts = (((start.handler, start.key), start.number) for start in by_fence)
    for (handler, key), number, newest in _backward(starts):
        yield f"{handler} started {key} n={number} after n={newest}"
    effects = (((effect.target, effect.key), effect.number) for effect in evidence.effects)
    for (target, key), number, newest in _backward(effects):
        yield f"the {target} of {key} went back from n={newest} to n={number}"


def _backward(numbers: Iterable[tuple[_Key, int]]) -> Iterator[tuple[_Key, int, int]]:
    newest: dict[_Key, int] = {}
    for key, number in numbers:
        if number < newest.get(key, number):
            yield key, number, newest[key]
        newest[key] = max(number, newest.get(key, number))


def _unexpected(written: Written, evidence: Evidence, starts: Iterable[_Write]) -> Iterator[str]:
    for write in sorted(starts):
        yield f"a handler started {_text(write)}, which nobody wrote"
    numbers = defaultdict(set, {key: set(order.numbers) for key, order in written.orders.items()})
    for effect in evidence.effects:
        if effect.target == "summary" and effect.number not in numbers[effect.key]:
            yield f"the summary of {effect.key} showed n={effect.number}, which nobody wrote"
    for key in sorted(evidence.summaries.keys() - written.orders.keys()):
        yield f"there is a summary of {key}, which nobody wrote"


def _text(write: _Write) -> str:
    handler, key, number = write
    return f"{key} n={number} ({handler})"
