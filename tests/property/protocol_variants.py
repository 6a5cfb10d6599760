"""The scenarios in which the protocol must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.protocol_model import MARK, PROTOCOL_MODEL, Broken, Commit, Fault, Policy, World
from tests.property.scenarios import NARROWER, WIDER, Scenarios, caught, sound

LOCKS = frozenset({Fault.LOCK, Fault.LAPSE})
EVERY = frozenset(Fault) - {Fault.LOCK}
LAPSE = frozenset({Fault.LAPSE})


FAULTY = World("a fault", (0, 0), terms=1, budget=1, faults=EVERY)
LAPSING = World("one partition, a lapse", (0, 0), terms=1, budget=1, faults=LAPSE)
LOCKING = World("a lock", (0, 0), terms=2, budget=1, faults=LOCKS)

SOUND = (
    sound(120_000, FAULTY, "two changes, two terms, two faults", terms=2, budget=2),
    sound(18_000, FAULTY, "two changes, three faults", budget=3),
    sound(19_000, FAULTY, "one change, three terms, one fault", stream=(0,), terms=3),
    sound(100_000, FAULTY, "two partitions, three changes, two faults", stream=(0, 1, 0), budget=2),
    sound(33_000, LAPSING, "two changes, three terms", terms=3, budget=0),
    sound(18_000, FAULTY, "a dead letter", terms=2, policy=Policy.DEAD_LETTER),
    sound(3_500, FAULTY, "a skipped change, two faults", budget=2, policy=Policy.SKIP),
    sound(85_000, FAULTY, "a later term matches more", stream=(0, 0, 0), terms=2, matches=WIDER),
    sound(80_000, FAULTY, "a later term matches less", stream=(0, 0, 0), terms=2, matches=NARROWER),
    sound(23_000, LAPSING, "a rewind", rewind=True),
    sound(200_000, LAPSING, "a rewind, two terms", terms=2, budget=0, rewind=True),
    sound(2_000, FAULTY, "inline, two changes, two faults", budget=2, commit=Commit.INLINE),
    sound(10_000, FAULTY, "inline, two changes, two terms, a fault", terms=2, commit=Commit.INLINE),
    sound(1_300, FAULTY, "inline, three changes, a mark, a fault", stream=(0, MARK, 0, 0), commit=Commit.INLINE),
    sound(3_400, FAULTY, "inline, two partitions, a fault", stream=(0, 1, 0), commit=Commit.INLINE),
    sound(50_000, FAULTY, "inline, a later term matches more", stream=(0, 0, 0), terms=2, commit=Commit.INLINE,
        matches=WIDER),
    sound(1_300, FAULTY, "inline, a rewind", budget=0, commit=Commit.INLINE, rewind=True),
    sound(30_000, FAULTY, "inline, a rewind, a fault", commit=Commit.INLINE, rewind=True),
    sound(2_000, LAPSING, "a rewind, no fault", budget=0, rewind=True),
    sound(2_000, FAULTY, "inline, a dead letter, two faults", budget=2, policy=Policy.DEAD_LETTER,
        commit=Commit.INLINE),
    sound(17_000, FAULTY, "inline or chain, two terms, a fault", terms=2, commit=Commit.EITHER),
    sound(7_500, LOCKING, "inline, a locked partition", commit=Commit.INLINE),
    sound(40_000, LAPSING, "a run of two changes, two terms, a lapse", terms=2, runs=True),
    sound(1_500, FAULTY, "a dead letter in a run of two", policy=Policy.DEAD_LETTER, runs=True),
    sound(13_000, FAULTY, "inline, runs of two of three changes, a fault", stream=(0, 0, 0), commit=Commit.INLINE,
        runs=True),
    sound(1_700, FAULTY, "inline or chain, a run of two changes, a fault", commit=Commit.EITHER, runs=True),
    sound(14_000, FAULTY, "inline, a run of two changes, two faults", budget=2, commit=Commit.INLINE, runs=True),
    sound(450_000, LAPSING, "a rewind in a run of two", rewind=True, runs=True),
    sound(40_000, LOCKING, "a locked partition, two changes, two terms", budget=2),
    sound(120_000, LOCKING, "a locked partition beside another, a mark, two terms", stream=(0, MARK, 1)),
    sound(35_000, LOCKING, "a locked partition, a later term matches more", stream=(0, 0, 0), matches=WIDER),
    sound(25_000, LOCKING, "a locked partition and a rewind", terms=1, rewind=True),
)  # fmt: skip


ONE = World("one partition", (0, 0), terms=1)
TWO_TERMS = World("one partition, two terms", (0, 0), terms=2)
REWOUND = World("a rewind", (0, 0), terms=1, rewind=True)
LOCKED = World("two partitions, one of them locked", (0, 1), terms=2, budget=1, faults=LOCKS)
INLINE = World("inline", (0, 0), terms=1, commit=Commit.INLINE)
TAKEN_BACK = INLINE._replace(name="inline, a failover", budget=1, faults=frozenset({Fault.ROLLBACK}))
COMMIT_TAKEN_BACK = TAKEN_BACK._replace(name="a chain, a failover", commit=Commit.CHAIN)
MATCHES_MORE = World("a later term matches more", (0, 0, 0), terms=2, matches=WIDER)
RUNS = World("a run of two changes, a lapse", (0, 0), terms=1, budget=1, faults=LAPSE, runs=True)
FAILING_RUN = RUNS._replace(name="a run of two changes, a retry", faults=frozenset({Fault.RETRY}))
FAILURE = frozenset({Fault.FAILURE})
DEAD_LETTER_RUN = RUNS._replace(name="a dead letter in a run of two", faults=FAILURE, policy=Policy.DEAD_LETTER)
SKIPPING = World("a skip and a lapse", (0, 0), terms=1, budget=2, faults=FAILURE | LAPSE, policy=Policy.SKIP)

CAUGHT = (
    caught(Broken.FENCE_IS_LEASE_VERSION, LAPSING, "P3"),
    caught(Broken.FENCE_IS_LEASE_VERSION, LAPSING, "P2", watched="P2"),
    caught(Broken.WATERMARK_IS_MAXIMUM, ONE._replace(stream=(0, 1)), "P5"),
    caught(Broken.MARK_BESIDE_WINDOW, ONE._replace(stream=(0, MARK)), "P5"),
    caught(Broken.CLAIM_IGNORES_HANDLED, ONE, "P6"),
    caught(Broken.OUTCOME_WITHOUT_FENCE, LAPSING, "P3"),
    caught(Broken.OUTCOME_WITHOUT_FENCE, LAPSING, "P4", watched="P1 P2 P4 P5"),
    caught(Broken.OUTCOME_WITHOUT_FENCE, LAPSING._replace(name="inline, a lapse", commit=Commit.INLINE), "P3"),
    caught(Broken.INLINE_BEFORE_SUCCESS, INLINE, "P1"),
    caught(Broken.LOOK_BEFORE_MAJORITY, TAKEN_BACK, "P5"),
    caught(Broken.LOOK_BEFORE_MAJORITY, COMMIT_TAKEN_BACK, "P5"),
    caught(Broken.CLAIM_BEFORE_MAJORITY, TAKEN_BACK, "P3"),
    caught(Broken.CLAIM_BEFORE_MAJORITY, COMMIT_TAKEN_BACK, "P3"),
    caught(Broken.TAKE_OVER_CLEARS_CLAIMS, TWO_TERMS, "P6"),
    caught(Broken.TWO_IMAGES, REWOUND, "P5"),
    caught(Broken.WATERMARK_IGNORES_EPOCH, REWOUND, "P5"),
    caught(Broken.CLAIM_IGNORES_EPOCH, REWOUND, "P1"),
    caught(Broken.CLAIM_IGNORES_EPOCH, MATCHES_MORE, "P1"),
    caught(Broken.WATERMARK_PASSES_LOCKED, LOCKED, "P5"),
    caught(Broken.PROGRESS_WITHOUT_FENCE, RUNS, "P3"),
    caught(Broken.PROGRESS_ENDS_CLAIM, RUNS, "P6"),
    caught(Broken.PROGRESS_BEFORE_SUCCESS, RUNS, "P1"),
    caught(Broken.FAILURE_BEFORE_PROGRESS, FAILING_RUN, "P6"),
    caught(Broken.FAILURE_BEFORE_PROGRESS, DEAD_LETTER_RUN, "P1"),
    caught(Broken.FAILURE_BEFORE_PROGRESS, DEAD_LETTER_RUN._replace(commit=Commit.INLINE), "P1"),
    caught(Broken.OUTCOME_WITHOUT_FENCE, SKIPPING, "P3"),
    caught(Broken.REWIND_IN_TWO_WRITES, REWOUND, "P1", watched="P1"),
    caught(Broken.REWIND_COUNTS_ALONE, TWO_TERMS._replace(rewind=True), "P1"),
)

PROTOCOL = Scenarios(
    model=PROTOCOL_MODEL,
    broken=Broken,
    large=13_000,
    sound=SOUND,
    caught=CAUGHT,
    unsearched=(LOCKED,),
)
