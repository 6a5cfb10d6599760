"""The scenarios in which parked keys must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.park_model import PARK_MODEL, Broken, Command, Fault, World
from tests.property.scenarios import Scenarios, Sound, caught, sound

LAPSE = frozenset({Fault.LAPSE})
CRASH = frozenset({Fault.CRASH})
EVERY = frozenset(Fault)
DISCARD = frozenset({Command.DISCARD})
DISCARD_ALL = frozenset({Command.DISCARD_ALL})
ANY = frozenset(Command)

ONE = World("one key, a replay", (0, 0))
LAPSING = World("one key, a replay, a lapse", (0, 0), faults=LAPSE, budget=1)
CRASHING = World("one key, a replay, a crash", (0, 0), faults=CRASH, budget=1)
RETRYING = World("one key, a replay, two retries", (0, 0), faults=frozenset({Fault.RETRY}), budget=2)
DISCARDED = World("one key, a letter discarded", (0, 0), person=DISCARD)
DISCARDED_TWICE = DISCARDED._replace(name="one key, two letters discarded", commands=2)
DISCARDED_ALL = World("one key, all letters discarded", (0, 0), person=DISCARD_ALL)
RUNS = World("two keys in one run", (0, 1, 0), length=2)
REDIRECTED = World("the second letter replayed, the first discarded", (0, 0), commands=2, person=ANY - DISCARD_ALL)

SOUND = (
    Sound(World("three changes, a replay, two failures", (0, 0, 0), failures=2), 580),
    Sound(World("three changes, any two commands", (0, 0, 0), commands=2, person=ANY), 18_000),
    Sound(World("two changes, a replay, a fault", (0, 0), faults=EVERY, budget=1), 2_000),
    Sound(World("two changes, a replay, two faults", (0, 0), faults=EVERY, budget=2), 45_000),
    Sound(World("two keys, any two commands", (0, 1, 0), commands=2, person=ANY), 2_200),
    sound(5_500, RUNS, "two keys in runs, any fault", faults=EVERY, budget=1),
    Sound(World("four changes, two commands, two failures", (0, 0, 0, 0), failures=2, commands=2, person=ANY), 210_000),
    Sound(World("two keys, any two commands, two failures", (0, 1, 0, 1), failures=2, commands=2, person=ANY), 60_000),
    Sound(World("two changes, any three commands, two failures", (0, 0), failures=2, commands=3, person=ANY), 43_000),
    Sound(World("two changes, any two commands, two failures, a fault", (0, 0), failures=2, commands=2, person=ANY,
        faults=EVERY, budget=1), 98_000),
)  # fmt: skip


CAUGHT = (
    caught(Broken.LETTER_LATER, ONE, "P1"),
    caught(Broken.PARKED_LATER, ONE, "P2"),
    caught(Broken.BEHIND_UNASKED, DISCARDED, "P12"),
    caught(Broken.RUN_GOES_ON, RUNS, "P2"),
    caught(Broken.OUTCOME_WITHOUT_FENCE, LAPSING, "P3"),
    caught(Broken.TOKENS_NOT_KEPT, RETRYING, "P3"),
    caught(Broken.START_UNCHECKED, ONE, "P2"),
    caught(Broken.ASKED_LATER, CRASHING, "P12"),
    caught(Broken.RELEASED_LATER, CRASHING, "P12"),
    caught(Broken.REMOVED_UNWRITTEN, DISCARDED_TWICE, "P12"),
    caught(Broken.DISCARD_FORWARD, DISCARDED_ALL, "P6"),
    caught(Broken.LATER_DISCARD_ASKS, DISCARDED, "P6"),
    caught(Broken.DISCARD_ASKS_NOBODY, DISCARDED, "P12"),
    caught(Broken.DISCARD_IGNORES_CLAIM, REDIRECTED, "P6"),
    caught(Broken.REDIRECT_AS_READ, REDIRECTED, "P12"),
    caught(Broken.STARTS_FORGOTTEN, LAPSING, "P3"),
)

PARK = Scenarios(model=PARK_MODEL, broken=Broken, large=10_000, sound=SOUND, caught=CAUGHT)
