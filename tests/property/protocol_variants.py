"""The scenarios in which the protocol must hold, and the broken variants that must each be caught."""

from __future__ import annotations

from tests.property.protocol_model import MARK, Broken, Commit, Fault, Policy, Rewind, World
from tests.property.protocol_search import PROTOCOL_MODEL
from tests.property.scenarios import NARROWER, WIDER, Scenarios, Sound, caught

LOCKS = frozenset({Fault.LOCK, Fault.LAPSE})
EVERY = frozenset(Fault) - {Fault.LOCK}
LAPSE = frozenset({Fault.LAPSE})


def sound(floor: int, name: str, stream: tuple[int, ...], terms: int, lapses: int = 0) -> Sound[World]:
    """Return a scenario in which claims may lapse, but no other fault happens."""
    return Sound(World(name, stream, terms, budget=lapses, faults=LAPSE), floor)


def faulty(floor: int, name: str, stream: tuple[int, ...], terms: int, faults: int) -> Sound[World]:
    """Return a scenario in which a number of faults of any kind may happen."""
    return Sound(World(name, stream, terms, budget=faults, faults=EVERY), floor)


def locked(floor: int, name: str, stream: tuple[int, ...], terms: int, faults: int) -> Sound[World]:
    """Return a scenario in which partitions are locked at take-overs, and claims may lapse."""
    return Sound(World(name, stream, terms, budget=faults, faults=LOCKS), floor)


def also(
    base: Sound[World],
    *,
    matches: tuple[frozenset[int], ...] = (),
    rewind: Rewind = Rewind.NEVER,
    policy: Policy = Policy.HALT,
    commit: Commit = Commit.CHAIN,
) -> Sound[World]:
    """Return a scenario with something more: other matches in a later term, a rewind, a policy, other commits."""
    more = base.world._replace(matches=matches, rewind=rewind, policy=policy, commit=commit)
    return base._replace(world=more)


def together(base: Sound[World]) -> Sound[World]:
    """Return a scenario in which a run carries two changes, and its position may move between them."""
    return base._replace(world=base.world._replace(runs=True))


SOUND = (
    faulty(120_000, "two changes, two terms, two faults", (0, 0), terms=2, faults=2),
    faulty(13_000, "three changes, two faults", (0, 0, 0), terms=1, faults=2),
    faulty(18_000, "two changes, three faults", (0, 0), terms=1, faults=3),
    faulty(19_000, "one change, three terms, one fault", (0,), terms=3, faults=1),
    faulty(100_000, "two partitions, three changes, two faults", (0, 1, 0), terms=1, faults=2),
    sound(33_000, "two changes, three terms", (0, 0), terms=3),
    sound(85_000, "two partitions, a mark, two terms, a lapse", (0, MARK, 1), terms=2, lapses=1),
    also(faulty(18_000, "a dead letter", (0, 0), terms=2, faults=1), policy=Policy.DEAD_LETTER),
    also(faulty(3_500, "a skipped change, two faults", (0, 0), terms=1, faults=2), policy=Policy.SKIP),
    also(faulty(85_000, "a later term matches more", (0, 0, 0), terms=2, faults=1), matches=WIDER),
    also(faulty(80_000, "a later term matches less", (0, 0, 0), terms=2, faults=1), matches=NARROWER),
    also(sound(23_000, "a rewind, number kept", (0, 0), terms=1, lapses=1), rewind=Rewind.NUMBER_KEPT),
    also(sound(50_000, "a rewind of the number, two terms", (0, 0), terms=2), rewind=Rewind.NUMBER_BACK),
    also(faulty(2_000, "inline, two changes, two faults", (0, 0), terms=1, faults=2), commit=Commit.INLINE),
    also(faulty(10_000, "inline, two changes, two terms, a fault", (0, 0), terms=2, faults=1), commit=Commit.INLINE),
    also(
        faulty(1_300, "inline, three changes, a mark, a fault", (0, MARK, 0, 0), terms=1, faults=1),
        commit=Commit.INLINE,
    ),
    also(faulty(70_000, "inline, two changes, two terms, two faults", (0, 0), terms=2, faults=2), commit=Commit.INLINE),
    also(faulty(3_400, "inline, two partitions, a fault", (0, 1, 0), terms=1, faults=1), commit=Commit.INLINE),
    also(
        faulty(50_000, "inline, a later term matches more", (0, 0, 0), terms=2, faults=1),
        commit=Commit.INLINE,
        matches=WIDER,
    ),
    also(
        faulty(9_000, "inline, a rewind of the number, a fault", (0, 0), terms=1, faults=1),
        commit=Commit.INLINE,
        rewind=Rewind.NUMBER_BACK,
    ),
    also(
        faulty(2_000, "inline, a dead letter, two faults", (0, 0), terms=1, faults=2),
        commit=Commit.INLINE,
        policy=Policy.DEAD_LETTER,
    ),
    also(faulty(17_000, "inline or chain, two terms, a fault", (0, 0), terms=2, faults=1), commit=Commit.EITHER),
    also(locked(7_500, "inline, a locked partition", (0, 0), terms=2, faults=1), commit=Commit.INLINE),
    together(faulty(15_000, "a run of two changes, two faults", (0, 0), terms=1, faults=2)),
    together(faulty(13_000, "runs of two of three changes, a fault", (0, 0, 0), terms=1, faults=1)),
    together(sound(40_000, "a run of two changes, two terms, a lapse", (0, 0), terms=2, lapses=1)),
    also(
        together(faulty(1_500, "a dead letter in a run of two", (0, 0), terms=1, faults=1)),
        policy=Policy.DEAD_LETTER,
    ),
    also(
        together(faulty(13_000, "inline, runs of two of three changes, a fault", (0, 0, 0), terms=1, faults=1)),
        commit=Commit.INLINE,
    ),
    also(
        together(faulty(1_700, "inline or chain, a run of two changes, a fault", (0, 0), terms=1, faults=1)),
        commit=Commit.EITHER,
    ),
    also(
        together(faulty(80_000, "inline, a run of two changes, two terms, a fault", (0, 0), terms=2, faults=1)),
        commit=Commit.INLINE,
    ),
    also(
        together(faulty(14_000, "inline, a run of two changes, two faults", (0, 0), terms=1, faults=2)),
        commit=Commit.INLINE,
    ),
    also(together(sound(85_000, "a rewind in a run of two", (0, 0), terms=1, lapses=1)), rewind=Rewind.NUMBER_BACK),
    locked(40_000, "a locked partition, two changes, two terms", (0, 0), terms=2, faults=2),
    locked(120_000, "a locked partition beside another, a mark, two terms", (0, MARK, 1), terms=2, faults=1),
    also(locked(35_000, "a locked partition, a later term matches more", (0, 0, 0), terms=2, faults=1), matches=WIDER),
    also(locked(5_000, "a locked partition and a rewind", (0, 0), terms=1, faults=1), rewind=Rewind.NUMBER_BACK),
)


ONE = World("one partition", (0, 0), terms=1)
TWO_TERMS = World("one partition, two terms", (0, 0), terms=2)
LAPSING = World("one partition, a lapse", (0, 0), terms=1, budget=1, faults=LAPSE)
KEPT = World("a rewind that keeps the number", (0, 0), terms=1, rewind=Rewind.NUMBER_KEPT)
BACK = World("a rewind of the number", (0, 0), terms=1, rewind=Rewind.NUMBER_BACK)
LOCKED = World("two partitions, one of them locked", (0, 1), terms=2, budget=1, faults=LOCKS)
INLINE = World("inline", (0, 0), terms=1, commit=Commit.INLINE)
TAKEN_BACK = INLINE._replace(name="inline, a failover", budget=1, faults=frozenset({Fault.ROLLBACK}))
COMMIT_TAKEN_BACK = TAKEN_BACK._replace(name="a chain, a failover", commit=Commit.CHAIN)
MATCHES_MORE = World("a later term matches more", (0, 0, 0), terms=2, matches=WIDER)
RUNS = World("a run of two changes, a lapse", (0, 0), terms=1, budget=1, faults=LAPSE, runs=True)
FAILING_RUN = RUNS._replace(name="a run of two changes, a retry", faults=frozenset({Fault.RETRY}))
MOVING = World("two partitions, a key that changes", (0, 1), terms=2, moved=(1, 1))

CAUGHT = (
    caught(Broken.FENCE_IS_LEASE_VERSION, LAPSING, "P3"),
    caught(Broken.FENCE_IS_LEASE_VERSION, LAPSING, "P2", watched="P2"),
    caught(Broken.COMMIT_BELIEVES_MESSAGE, MATCHES_MORE, "P1"),
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
    caught(Broken.TWO_IMAGES, KEPT, "P5"),
    caught(Broken.TWO_IMAGES, BACK, "P1", watched="P1"),
    caught(Broken.WATERMARK_IGNORES_EPOCH, KEPT, "P5"),
    caught(Broken.CLAIM_IGNORES_EPOCH, KEPT, "P1"),
    caught(Broken.CLAIM_IGNORES_EPOCH, MATCHES_MORE, "P1"),
    caught(Broken.NUMBERED_AT_READING, MATCHES_MORE, "P1"),
    caught(Broken.KEY_CHANGES, MOVING, "P6"),
    caught(Broken.KEY_CHANGES, MOVING, "P5", watched="P1 P2 P3 P4 P5"),
    caught(Broken.WATERMARK_PASSES_LOCKED, LOCKED, "P5"),
    caught(Broken.PROGRESS_WITHOUT_FENCE, RUNS, "P3"),
    caught(Broken.PROGRESS_ENDS_CLAIM, RUNS, "P6"),
    caught(Broken.PROGRESS_BEFORE_SUCCESS, RUNS, "P1"),
    caught(Broken.FAILURE_BEFORE_PROGRESS, FAILING_RUN, "P6"),
    caught(Broken.FAILURE_CUTS_RUN, FAILING_RUN, "P6"),
    caught(Broken.REWIND_IN_TWO_WRITES, KEPT, "P1", watched="P1"),
    caught(Broken.REWIND_COUNTS_ALONE, TWO_TERMS._replace(rewind=Rewind.NUMBER_BACK), "P1"),
)

PROTOCOL = Scenarios(
    model=PROTOCOL_MODEL,
    broken=Broken,
    large=13_000,
    sound=SOUND,
    caught=CAUGHT,
    unsearched=(MOVING,),
)
