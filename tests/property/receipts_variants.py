"""The scenarios in which receipts must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.receipts_model import Broken, Own, World
from tests.property.receipts_search import INVARIANTS
from tests.property.scenarios import Caught, Sound

ANY = frozenset(range(4))

OWN_FIRST = World("the own branch and one", 1, Own.FIRST, drivers=2, cancelers=1, refusing=ANY)
OWN_LAST = World("one branch and the own", 1, Own.LAST, drivers=2, cancelers=1, refusing=ANY)
TWO = World("two branches", 2, drivers=2, cancelers=1, refusing=ANY)
TWO_AND_OWN = World("two branches and the own", 2, Own.LAST, drivers=2, cancelers=1, refusing=ANY)
MARKED_FIRST = World(
    "one branch with markers, one with a receipt", 2, marked=frozenset({0}), drivers=2, cancelers=1, refusing=ANY
)
MARKED_LAST = World(
    "the own branch, one with a receipt, one with markers",
    2,
    Own.FIRST,
    marked=frozenset({1}),
    drivers=2,
    cancelers=1,
    refusing=ANY,
)
MARKED_OWN = World(
    "one branch with markers and the own", 1, Own.LAST, marked=frozenset({0}), drivers=2, cancelers=1, refusing=ANY
)
REPLACED = World("two branches, one replaced", 2, drivers=2, replaced=True)

SOUND = (
    Sound(OWN_FIRST, 2_000),
    Sound(OWN_FIRST._replace(name="the own branch and one, two recover, one dies", drivers=3, kills=1), 12_000),
    Sound(OWN_LAST, 1_500),
    Sound(TWO, 15_000),
    Sound(TWO_AND_OWN, 11_000),
    Sound(REPLACED, 500),
    Sound(MARKED_FIRST, 14_000),
    Sound(MARKED_LAST, 8_000),
    Sound(MARKED_OWN, 1_500),
)
SLOW = (
    Sound(World("the own branch and two, two recover, one dies", 2, Own.FIRST, 3, 1, ANY, kills=1), 120_000),
    Sound(World("two branches, two recover, one dies", 2, Own.NONE, 3, 1, ANY, kills=1), 120_000),
    Sound(World("two branches, two recover and two cancel", 2, Own.NONE, 3, 2, ANY), 120_000),
    Sound(World("two branches and the own, two recover, one dies", 2, Own.LAST, 3, 1, ANY, kills=1), 50_000),
    Sound(World("three branches", 3, Own.NONE, 2, 1, ANY), 85_000),
    Sound(World("three branches and the own", 3, Own.LAST, 2, 1, ANY), 60_000),
    Sound(World("three branches, two recover", 3, Own.NONE, 3, 1, ANY), 400_000),
    Sound(MARKED_OWN._replace(name="one with markers and the own, two recover, one dies", drivers=3, kills=1), 15_000),
    Sound(MARKED_LAST._replace(name="the own, one with a receipt, one with markers, two recover", drivers=3), 50_000),
    Sound(MARKED_FIRST._replace(name="one with markers, one with a receipt, two recover", drivers=3), 110_000),
    Sound(MARKED_FIRST._replace(name="two branches with markers", marked=frozenset({0, 1})), 9_000),
)
"""Larger scenarios, minutes of them."""


def caught(broken: Broken, world: World, breaks: str, watched: str = " ".join(INVARIANTS)) -> Caught[World]:
    """Return a scenario with one rule broken, the invariants it breaks and those judged, as words."""
    return Caught(world._replace(broken=broken), frozenset(breaks.split()), frozenset(watched.split()))


CAUGHT = (
    caught(Broken.RECEIPT_OUTSIDE, OWN_FIRST, "once"),
    caught(Broken.RECEIPT_IN_DOCUMENT, REPLACED, "once"),
    caught(Broken.NO_DEADLINE, TWO, "once"),
    caught(Broken.NO_DEADLINE, OWN_FIRST, "once"),
    caught(Broken.UNDO_DELETES, TWO, "all-or-none"),
    caught(Broken.UNDO_LEAVES_NOTHING, TWO, "all-or-none"),
    caught(Broken.UNDO_LEAVES_NOTHING, TWO_AND_OWN, "all-or-none"),
    caught(Broken.UNDO_REVERTS_SETTLED, TWO, "all-or-none"),
    caught(Broken.VOID_STAYS, OWN_FIRST, "ends"),
    caught(Broken.TTL_FROM_CREATION, OWN_FIRST, "all-or-none told"),
    caught(Broken.TTL_FROM_CREATION, TWO_AND_OWN, "all-or-none"),
    caught(Broken.SETTLED_BEFORE_APPLIED, OWN_FIRST, "all-or-none told"),
    caught(Broken.PURGED_BEFORE_DEADLINE, OWN_FIRST, "once"),
    caught(Broken.DECIDER_SETTLED_FIRST, TWO, "all-or-none"),
    caught(Broken.DECIDER_UNASKED, OWN_FIRST, "told"),
    caught(Broken.CANCEL_STANDS, OWN_FIRST, "ends"),
    caught(Broken.OWN_APART, OWN_FIRST, "all-or-none"),
    caught(Broken.OWN_LAST_UNGUARDED, OWN_LAST, "once"),
    caught(Broken.MARKED_UNPROVED, MARKED_FIRST, "all-or-none"),
    caught(Broken.MARKED_UNSEEN, MARKED_FIRST, "all-or-none"),
    caught(Broken.MARKED_KEPT, MARKED_FIRST, "all-or-none"),
    caught(Broken.MARKED_DECIDES, MARKED_LAST, "all-or-none told"),
    caught(Broken.RELEASED_EARLY, TWO, "told"),
    caught(Broken.SETTLED_UNASKED, OWN_FIRST, "all-or-none told"),
    caught(Broken.LATE_ASKS_FIRST, TWO, "all-or-none"),
)
