"""
Listeners that end, or sleep and wake too late, between any two writes of storing, running and clearing.

P2, order; P3 and P6, nothing twice; P13: what was read is not lost, and nothing is left behind in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mongo_celery.bridge.state.backlog import Backlog
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.errors import LeaseLostError
from tests.fixtures.mongo import MakeClient
from tests.fixtures.samples import token_data
from tests.rig.storing import RefusedError, StoringTerm, terms
from tests.rig.term import KilledError, around

Begin = Callable[..., StoringTerm]
STEPS: list[tuple[type, str]] = [
    (Backlog, "insert"),
    (Partitions, "mark_stored"),
    (Subscriptions, "advance_all"),
    (Backlog, "outline"),
    (Partitions, "clear_stored"),
]
_NAMES = [name for _, name in STEPS]
_FIRST, _LAST = 12, 20
_BEGUN = 6.0


@pytest.fixture
def begin(make_client: MakeClient, state_database: str) -> Iterator[Begin]:
    """Give what begins a term, whatever the one before is doing."""
    yield from terms(make_client(), state_database)


class Life:
    """
    Some changes of a partition that halts at the first of them, from their reading to the last removal.

    Each term reads from the stored watermark on, as the stream does.

    Attributes:
        ran: what workers have run, by all terms.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self.ran: list[int] = []
        term = self.next()
        term.read(*range(1, _FIRST + 1))
        (run,) = term.dispatch()
        term.halt(run)
        self.first = term

    def next(self) -> StoringTerm:
        """The next term, as it begins."""
        term = self._begin(run_size=5)
        term.ran = self.ran
        return term

    def live(self, term: StoringTerm) -> None:
        """Do in one term all that is left to be done: store, let it be retried, run, clear and remove."""
        self._store(term)
        term.look()
        if term.image().state == "halted":
            term.retry()
        term.read(*range(_FIRST + 1, _LAST + 1))
        if not self.ran or self.ran[-1] < _LAST:
            term.work(until=_LAST)
        term.turn_until(lambda: term.marked() is None and not term.stored())
        term.flush()
        term.look()

    def _store(self, term: StoringTerm) -> None:
        seen = term.watermark or ""
        term.read(*[number for number in range(1, _FIRST + 1) if token_data(number) > max(seen, term.image().data)])
        term.turn()
        term.turn_until(lambda: term.image().state != "halted" or term.marked(), later=_BEGUN)
        term.flush()

    def judge(self) -> None:
        """Everything has run once and in order, and nothing is left."""
        assert self.ran == list(range(1, _LAST + 1))
        last = self.next()
        last.turn_until(lambda: not last.stored())
        assert (last.marked(), last.watermark) == (None, token_data(_LAST))


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_is_killed_at_any_step_has_lost_and_doubled_nothing(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], behind: bool
) -> None:
    """P2, P6, P13: the next one ends what it began."""
    life = Life(begin)

    def kill() -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        around(patch, step, kill, behind=behind)
        with pytest.raises(KilledError):
            life.live(life.first)
    life.live(life.next())
    life.judge()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
def test_a_listener_that_wakes_at_any_step_harms_nothing(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], behind: bool
) -> None:
    """P3, P13: its successor has stored, run and removed all of it; what it writes late is refused, or removed."""
    life = Life(begin)

    def succeed() -> None:
        life.live(life.next())

    with monkeypatch.context() as patch:
        around(patch, step, succeed, behind=behind)
        with pytest.raises((LeaseLostError, RefusedError)):
            life.live(life.first)
    life.judge()
