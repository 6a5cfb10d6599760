"""The scenarios in which delays must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.delay_model import DELAY_MODEL, Broken, World
from tests.property.scenarios import Scenarios, caught, sound

PLAIN = World("three changes, without coalescing", ((0, 0), (1, 1), (1, 0)), coalesces=False)
BURST = World("a burst", ((0, 0), (1, 0)))
TWO = World("two keys, bursts that overlap", ((0, 0), (1, 1), (1, 0), (2, 1)))
BESIDE = World("a quiet key behind a busy one", ((0, 0), (0, 1), (2, 0)))
CHAIN = World("overlapping bursts", ((0, 0), (1, 1), (2, 0), (2, 2), (3, 1), (4, 2), (5, 1)), length=9)
PAIR = World("a burst inside of another", ((0, 0), (1, 1), (1, 0), (4, 1)), delay=3)
LONG = World("a key that never becomes quiet", tuple((time, 0) for time in range(10)), length=20)
STORED = BURST._replace(name="a burst, stored", stores=True)

SOUND = (
    sound(400, PLAIN),
    sound(40_000, PLAIN, "without coalescing, stored, two take-overs, a crash", stores=True, terms=2, crashes=1),
    sound(80, BURST),
    sound(5_000, TWO, "overlapping bursts, stored, a take-over, two crashes", stores=True, terms=1, crashes=2),
    sound(2_000, BESIDE, "a busy key, stored, two take-overs", stores=True, terms=2),
    sound(1_000, CHAIN, "overlapping bursts, a take-over", terms=1),
    sound(1_000, LONG),
    sound(1_000, LONG, "runs that are shorter than a burst, a take-over", changes=LONG.changes[:6], length=2, terms=1),
)

CAUGHT = (
    caught(Broken.CLIENT_CLOCK, PLAIN, "P10"),
    caught(Broken.RUN_NOT_CUT, PLAIN, "P10"),
    caught(Broken.FIRST_DECIDES, BURST, "P6"),
    caught(Broken.LATER_OUTSIDE, BESIDE, "P1", watched="P1"),
    caught(Broken.QUIET_AHEAD, BESIDE, "P2", watched="P2"),
    caught(Broken.UNREAD_IS_QUIET, BURST, "P6"),
    caught(Broken.TAIL_STAYS, STORED, "P6"),
    caught(Broken.SPLIT_SOON, PAIR, "P6"),
    caught(Broken.NO_SPLIT, CHAIN, "P17"),
    caught(Broken.NO_BOUND, LONG, "P17"),
    caught(Broken.WAIT_FORGOTTEN, PLAIN, "P12"),
)

DELAY = Scenarios(model=DELAY_MODEL, broken=Broken, large=50_000, sound=SOUND, caught=CAUGHT)
