"""The scenarios in which spill must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property import stores
from tests.property.scenarios import NARROWER, WIDER, Scenarios, caught, sound
from tests.property.spill_model import SPILL_MODEL, Broken, Decision, Fault, Late, World

SWITCHING = frozenset(Late)
ANY_WRITE = SWITCHING | frozenset(stores.Late)
LATE_INSERT = frozenset({stores.Late.INSERT})
LATE_REMOVAL = frozenset({stores.Late.REMOVE})
HALT = frozenset({Fault.HALT})

ONE = World("two changes", (0, 0), terms=1)
TWO_TERMS = World("two changes, two terms", (0, 0), terms=2)
HALTING = World("a halt", (0, 0), terms=1, faults=HALT, budget=1, operator=True)
BACK = World("a rewind", (0, 0), terms=1, rewind=0)
BACK_LATE = World("a rewind and a late removal", (0, 0), terms=1, rewind=0, late=LATE_REMOVAL, delays=1)
LAPSE_BACK = World("a rewind and a lapse", (0, 0), terms=1, rewind=0, faults=frozenset({Fault.LAPSE}), budget=1)
HALT_BACK = World("a halt and a rewind", (0, 0), terms=1, rewind=0, faults=HALT, budget=1, operator=True)
ROLLED_BACK = World("a rewind and a rolling oplog", (0, 0), terms=1, rolls=(2,), rewind=0)
BACK_LOST = World("a rewind, lost history, from now", (0, 0), terms=1, rolls=(2,), rewind=0, decision=Decision.NOW)
BACK_LATE_LOST = BACK_LOST._replace(name="a rewind, lost history, a late removal", late=LATE_REMOVAL, delays=1)
ROLLED_BACK_TWO = World(
    "two partitions, a rewind and a rolling oplog", (0, 1), 1, partitions=(2,), rolls=(2,), rewind=0
)
MATCHES_MORE = World("a later term matches more", (0, 0, 0), terms=2, matches=WIDER)
ROLLED_MORE = World(
    "history lost, and a later term matches more", (0, 0, 0), terms=2,
    matches=(frozenset({1, 3}), frozenset({1, 2, 3})), rolls=(2,), decision=Decision.OLDEST
)  # fmt: skip
FULL_BACK = World("a full store and a rewind", (0, 0, 0), terms=1, buffer=1, bound=1, rewind=0)
LATE_MARK = World("a late mark", (0, 0), terms=1, late=frozenset({stores.Late.MARK}), delays=1)
LATE_CLEAR = World("a late clear", (0, 0), terms=1, late=frozenset({stores.Late.CLEAR}), delays=1)
ROLLBACK = World("a rollback of handled", (0, 0), terms=1, faults=frozenset({Fault.ROLLBACK}), budget=1)
BREAKING = World("a stream that breaks", (0, 0), terms=1, faults=frozenset({Fault.REOPEN}), budget=1)
FULL_HALT = World(
    "a full store and a halt", (0, 1, 0, 1), terms=2, partitions=(2,), buffer=1, bound=1, faults=HALT, budget=1,
    operator=True
)  # fmt: skip

MERGED = World("two partitions become one", (0, 1), terms=2, partitions=(2, 2, 1))
SPLIT = World("one partition becomes two", (0, 1), terms=2, partitions=(1, 1, 2))
TURNED_BACK = World("a later term wants the old number", (0, 1), terms=2, partitions=(2, 1, 2))
MERGED_HALT = MERGED._replace(name="two partitions, one of them halted, become one", faults=HALT, budget=1)
MERGED_LOST = MERGED._replace(name="two partitions become one, a rolling oplog", rolls=(2,))
LATE_SWITCH = TURNED_BACK._replace(name="a late switch, and back", late=frozenset({Late.SWITCH}), delays=1)
LATE_DISCARD = TURNED_BACK._replace(name="a late removal, and back", late=frozenset({Late.DISCARD}), delays=1)
MERGED_FULL = World(
    "two partitions become one, a halt and a full store", (0, 0, 1), terms=2, partitions=(2, 2, 1), buffer=2, bound=1,
    faults=HALT, budget=1
)  # fmt: skip

SOUND = (
    sound(8_000, TWO_TERMS, "three changes, two terms", keys=(0, 0, 0)),
    sound(5_000, BACK, "a rewind and a late write", late=ANY_WRITE, delays=1),
    sound(8_000, HALT_BACK, "three changes, a halt, a rewind to the first", keys=(0, 0, 0), rewind=1),
    sound(4_000, MATCHES_MORE, "a later term matches more, a halt", faults=HALT, budget=1),
    sound(6_000, MATCHES_MORE, "a later term matches less", matches=NARROWER),
    sound(15_000, ROLLED_MORE, "history lost, from the oldest", matches=(), rolls=(3,)),
    sound(10_000, ROLLED_MORE, "history lost, from now", rolls=(3,), decision=Decision.NOW),
    sound(5_000, ROLLED_BACK, "history lost behind a rewind", keys=(0, 0, 0), decision=Decision.OLDEST),
    sound(1_000, FULL_BACK),
    sound(6_000, FULL_HALT, terms=1),
    sound(20_000, HALTING, "two partitions, a halt", keys=(0, 1, 0), partitions=(2,)),
    sound(15_000, HALTING, "a halt that stores its change, late", terms=2, storing=True, late=LATE_INSERT, delays=1),
    sound(5_000, ROLLBACK, terms=2),
    sound(2_000, BREAKING, terms=2),
    sound(5_000, MERGED),
    sound(1_000, MERGED, "one change, two partitions become one, any late write", keys=(1,), late=ANY_WRITE, delays=1),
    sound(2_500, SPLIT),
    sound(8_000, MERGED, "two partitions become one, a rewind", rewind=0),
    sound(10_000, MERGED_LOST, "two partitions become one, lost history", decision=Decision.OLDEST),
    sound(7_000, SPLIT, "one partition becomes two, halts, and a later term matches less", faults=HALT, budget=1,
        operator=True, storing=True, matches=(frozenset({1, 2}), frozenset({2}))),
    sound(14_000, MERGED_FULL),
    sound(60_000, TWO_TERMS, "two changes, two terms, two late writes", late=ANY_WRITE, delays=2),
    sound(40_000, MATCHES_MORE, "a later term matches more, a late write", late=ANY_WRITE, delays=1),
    sound(10_000, ROLLED_BACK, "four changes, lost history behind a rewind", keys=(0,) * 4),
    sound(50_000, MERGED_HALT, "a halt, a rewind, two partitions become one", rewind=1, operator=True),
    sound(60_000, MERGED, "two partitions become one, any fault", faults=frozenset(Fault),
        budget=1, operator=True),
    sound(35_000, TURNED_BACK, "a switch and back, any late write", late=ANY_WRITE, delays=1),
    sound(100_000, MERGED_HALT, "two switches, a halt", terms=3, partitions=(2, 2, 1, 2), operator=True),
    sound(50_000, MERGED, "two partitions become one, and a later term matches less", keys=(0, 1, 0),
        matches=(frozenset({1, 2, 3}), frozenset({2, 3}))),
)  # fmt: skip


CAUGHT = (
    caught(stores.Broken.MARK_BEFORE_INSERT, ONE, "P5"),
    caught(Broken.WATERMARK_BEFORE_MARK, ONE, "P5"),
    caught(Broken.TRUSTS_DOCUMENTS, BACK_LATE, "P5"),
    caught(Broken.TRUSTS_BARE_DOCUMENTS, TWO_TERMS, "P5"),
    caught(Broken.MARK_SKIPS, MATCHES_MORE, "P5"),
    caught(Broken.COLLECTION_AT_ONCE, MATCHES_MORE, "P5"),
    caught(Broken.COLLECTION_AT_ONCE, LAPSE_BACK, "P2", watched="P2"),
    caught(Broken.BUFFER_FIRST, TWO_TERMS, "P12"),
    caught(Broken.BUFFER_FIRST, BREAKING, "P1 P5"),
    caught(Broken.RUNS_BEFORE_STORED_AGAIN, MATCHES_MORE, "P1"),
    caught(Broken.RUNS_BEFORE_STORED_AGAIN, BACK_LATE, "P13", watched="P13"),
    caught(stores.Broken.DUPLICATE_DOES_NOTHING, BACK_LATE, "P5"),
    caught(stores.Broken.MARK_IGNORES_GROWTH, LATE_MARK, "P5"),
    caught(stores.Broken.CLEAR_IGNORES_MARK, LATE_CLEAR, "P5"),
    caught(stores.Broken.REMOVAL_IGNORES_TERM, BACK_LATE, "P5"),
    caught(stores.Broken.REMOVAL_UP_TO_HANDLED, ROLLBACK, "P5"),
    caught(stores.Broken.REMOVAL_FOLLOWS_MARK, TWO_TERMS, "P12"),
    caught(Broken.BOUND_REFUSES_AGAIN, FULL_BACK, "P12"),
    caught(Broken.DECISION_RUNS_ALL, ROLLED_MORE, "P5"),
    caught(Broken.DECISION_TRUSTS_DOCUMENTS, BACK_LATE_LOST, "P5"),
    caught(Broken.DECISION_KEEPS_MARK, BACK_LOST, "P12"),
    caught(Broken.REWIND_BELOW_OPLOG, ROLLED_BACK, "P4"),
    caught(Broken.REWIND_MOVES_FORWARD, ROLLED_BACK_TWO, "P4"),
    caught(Broken.REWIND_KEEPS_HEAD, HALT_BACK, "P1"),
    caught(Broken.SWITCH_IGNORES_STORED, MERGED, "P5"),
    caught(Broken.SWITCH_IGNORES_BUFFER, MERGED, "P5"),
    caught(Broken.SWITCH_BEFORE_READ, MERGED, "P6"),
    caught(Broken.SWITCH_IGNORES_TERM, LATE_SWITCH, "P12"),
    caught(Broken.SWITCH_UNGUARDED, LATE_SWITCH, "P6"),
    caught(Broken.DISCARDS_ALL_OTHERS, LATE_DISCARD, "P5"),
    caught(Broken.FORMER_STAY, MERGED, "P12"),
)

SPILL = Scenarios(model=SPILL_MODEL, broken=(*stores.Broken, *Broken), large=6_000, sound=SOUND, caught=CAUGHT)
