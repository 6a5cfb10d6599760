"""The scenarios in which limits must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.limits_model import LIMITS_MODEL, Broken, Fault, World
from tests.property.scenarios import Scenarios, Sound, caught

EVERY = frozenset(Fault)

RETRYING = World("a retry", faults=frozenset({Fault.RETRY}), budget=1)
TWO_TERMS = World("two terms", terms=2)
LOCKED = World("a locked partition", terms=2, faults=frozenset({Fault.LOCK}), budget=1)
LAPSING = World("a lapse and a pause", faults=frozenset({Fault.LAPSE, Fault.PAUSE}), budget=2)
PAUSING = World("a pause", faults=frozenset({Fault.PAUSE}), budget=1)
UNANSWERED = World("a message without an answer", faults=frozenset({Fault.UNANSWERED}), budget=1)

SOUND = (
    Sound(World("two terms, any fault", terms=2, faults=EVERY, budget=1), 9_000),
    Sound(World("one term, any two faults", faults=EVERY, budget=2), 2_000),
    Sound(World("two of three, two terms", (1, 1, 1), terms=2, most=2), 3_000),
    Sound(World("two terms, any two faults", terms=2, faults=EVERY, budget=2), 80_000),
    Sound(World("two changes, two terms, any fault", (2, 1), terms=2, faults=EVERY, budget=1), 17_000),
)

CAUGHT = (
    caught(Broken.MESSAGE_WITHOUT_TOKEN, RETRYING, "running"),
    caught(Broken.ADOPTED_NOT_COUNTED, TWO_TERMS, "running"),
    caught(Broken.LOCKED_NOT_COUNTED, LOCKED, "running"),
    caught(Broken.LAPSED_NOT_COUNTED, LAPSING, "running"),
    caught(Broken.PAUSED_NOT_COUNTED, PAUSING, "running"),
    caught(Broken.NOTED_WHEN_SENT, UNANSWERED, "running"),
    caught(Broken.NEVER_VOIDED, PAUSING, "P17"),
)

LIMITS = Scenarios(model=LIMITS_MODEL, broken=Broken, large=14_000, sound=SOUND, caught=CAUGHT)
