"""Scenarios of two-phase commit with markers, and what each broken rule breaks."""

from __future__ import annotations

from tests.property.scenarios import Scenarios, Sound, caught
from tests.property.twophase_search import TWOPHASE_MODEL, Broken, World

SOUND = (
    Sound(World("a freeze, a lost answer", freezes=1, losses=1), 2_500),
    Sound(World("a freeze, a cancel", freezes=1, cancels=1), 6_500),
    Sound(World("a cancel, a recovery without need", cancels=1, takers=1), 12_000),
    Sound(World("another transaction, a freeze", others=1, freezes=1), 4_500),
    Sound(World("a participant written back, a freeze", replacements=1, freezes=1), 3_500),
    Sound(World("a participant written back, a cancel, a lost answer", replacements=1, cancels=1, losses=1), 3_500),
    Sound(World("a rule that fails, a freeze, a recovery without need", unmet=1, freezes=1, takers=1), 28_000),
    Sound(World("a freeze, a recovery without need", freezes=1, takers=1), 34_000),
    Sound(World("two freezes", freezes=2), 54_000),
    Sound(World("a cancel, a recovery without need, a lost answer", cancels=1, takers=1, losses=1), 100_000),
    Sound(World("another transaction, a freeze, a cancel", others=1, freezes=1, cancels=1), 73_000),
    Sound(World("a participant written back, another transaction, a freeze", replacements=1, others=1, freezes=1),
        45_000),
)  # fmt: skip

FREEZE = World("a freeze", freezes=1)
TAKEN = World("a recovery without need", takers=1)
CANCELED = World("a cancel", cancels=1)

CAUGHT = (
    caught(Broken.TUTORIAL, TAKEN, "once"),
    caught(Broken.NOT_PROVED, TAKEN, "once"),
    caught(Broken.NOT_GIVEN, TAKEN, "once"),
    caught(Broken.SETTLED_AS_IS, TAKEN, "once"),
    caught(Broken.UNDONE_AS_IS, CANCELED, "whole"),
    caught(Broken.REPLACED_UNSEEN, World("a participant written back, a freeze", replacements=1, freezes=1), "once"),
    caught(Broken.CANCELED_LATE, CANCELED, "whole"),
    caught(Broken.DONE_FIRST, FREEZE, "clean"),
    caught(Broken.APPLIED_FIRST, FREEZE, "whole"),
    caught(Broken.MOVED_UNGUARDED, CANCELED, "whole"),
)

TWOPHASE = Scenarios(model=TWOPHASE_MODEL, broken=Broken, large=20_000, sound=SOUND, caught=CAUGHT)
