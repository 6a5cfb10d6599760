"""The relation of stored documents allows what the models do, and complains of what broken ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.property import limits_model, park_model, protocol_model, spill_model, stores
from tests.property.exploration import Model, Move
from tests.property.limits_model import LIMITS_MODEL
from tests.property.limits_variants import LAPSING as LAPSING_LIMIT
from tests.property.limits_variants import TWO_TERMS as LIMITED_TERMS
from tests.property.park_model import PARK_MODEL
from tests.property.park_variants import LAPSING as LAPSING_REPLAY
from tests.property.park_variants import ONE as PARKED_KEY
from tests.property.protocol_model import PROTOCOL_MODEL
from tests.property.protocol_variants import LAPSING, LOCKED, REWOUND, TWO_TERMS
from tests.property.relation import (
    FLOWING,
    HALTED,
    PAUSED,
    STEPS,
    Claim,
    Documents,
    Handled,
    Handler,
    Lease,
    Letter,
    Partition,
    StoredChange,
    Write,
    judge,
)
from tests.property.spill_model import SPILL_MODEL
from tests.property.spill_variants import HALTING, LATE_MARK, ONE

_LONG = 1000
"""The last change of a run, where a model does not say it."""

Project = Callable[[Any, Any], Documents]


def _claim(owner: Any, first: int, *, live: bool, last: int = _LONG) -> Claim:
    return Claim(owner, first, last, 1.0 if live else 0.0)


def of_protocol(_: protocol_model.World, state: protocol_model.State) -> Documents:
    """Return what the model of the protocol has stored. A halted partition knows its head as what comes next."""
    partitions = {}
    for index, each in enumerate(state.partitions):
        claim, handled = each.claim, each.handled
        partitions[f"b/h/0/{index}"] = Partition(
            each.epoch, each.fence, each.committed, each.token, 0,
            claim=claim and _claim(claim.owner, each.committed + 1, live=claim.live),
            handled=handled and Handled(claim and claim.owner, handled.last, handled.token),
            state=HALTED if each.halted else FLOWING, head=each.token + 0.5 if each.halted else None,
        )  # fmt: skip
    return {
        "leases": {"b": Lease(state.version, frozenset(range(state.version + 1)), state.holder or None)},
        "handlers": {"b/h": Handler(state.epoch, state.watermark)},
        "partitions": partitions, "backlog": {}, "dead_letters": {},
    }  # fmt: skip


def of_spill(world: spill_model.World, state: spill_model.State) -> Documents:
    """Return what the model of stored changes has stored. Its numbers are those of the changes of a partition."""
    count, partitions = len(state.partitions), {}
    for index, each in enumerate(state.partitions):
        mine = [token for token in range(1, len(world.keys) + 1) if world.keys[token - 1] % count == index]
        committed, claim = sum(token <= each.token for token in mine), each.claim
        number = committed + 1
        partitions[f"b/h/{state.generation}/{index}"] = Partition(
            each.epoch, None, committed, each.token, each.spilled,
            claim=claim and _claim(sum(state.starts), number, live=claim.live),
            handled=Handled(sum(state.starts), number, claim.item.token) if claim and claim.handled else None,
            state=HALTED if each.head else FLOWING, head=each.head and each.head.token,
        )  # fmt: skip
    stored = {
        f"b/h/{each.generation}/{each.partition}/{each.item.token}": StoredChange(each.term, each.item.token)
        for each in state.documents
    }
    return {
        "leases": {"b": Lease(state.epoch, frozenset(range(state.epoch + 1)), "somebody")},
        "handlers": {"b/h": Handler(state.epoch, state.watermark, state.generation)},
        "partitions": partitions, "backlog": stored, "dead_letters": {},
    }  # fmt: skip


def of_park(world: park_model.World, state: park_model.State) -> Documents:
    """Return what the model of parked keys has stored. The change of a number is at that place."""
    each = state.stored.partition
    claim = each.claim and _claim(
        each.claim.owner, each.committed + 1, live=each.claim.live, last=each.committed if each.claim.letter else _LONG
    )
    letters = {f"b/h/{one.number}": Letter(one.number, world.key(one.number)) for one in state.stored.letters}
    partition = Partition(0, each.fence, each.committed, each.committed, 0, claim=claim, parked=each.parked)
    return {
        "leases": {"b": Lease(0, frozenset({0}), "somebody")},
        "handlers": {"b/h": Handler(0, 0)},
        "partitions": {"b/h/0/0": partition}, "backlog": {}, "dead_letters": letters,
    }  # fmt: skip


def of_limits(_: limits_model.World, state: limits_model.State) -> Documents:
    """Return what the model of limits has stored. A position is the number of the last change."""
    partitions = {
        f"b/h/0/{index}": Partition(
            each.term, each.fence, each.committed, each.committed, 0,
            claim=each.claim and _claim(each.claim.owner, each.committed + 1, live=each.claim.live),
            state=PAUSED if each.paused else FLOWING,
        )
        for index, each in enumerate(state.partitions)
    }  # fmt: skip
    return {
        "leases": {"b": Lease(state.epoch, frozenset(range(state.epoch + 1)), state.epoch or None)},
        "handlers": {"b/h": Handler(state.epoch, 0)},
        "partitions": partitions, "backlog": {}, "dead_letters": {},
    }  # fmt: skip


def changes(world: Any, state: Any) -> dict[str, list[int]]:
    """Return which changes each partition of a model is to handle, where all terms want all of them."""
    if isinstance(world, protocol_model.World):
        mine = [*enumerate(world.stream, 1)]
        return {f"b/h/0/{index}": [place for place, each in mine if each == index] for index in {*world.stream} - {-1}}
    if isinstance(world, spill_model.World):
        count = len(state.partitions)
        mine = [(place, key % count) for place, key in enumerate(world.keys, 1)]
        return {f"b/h/{state.generation}/{n}": [place for place, each in mine if each == n] for n in range(count)}
    return {}


_MODELS: dict[str, tuple[Model[Any, Any], Project]] = {
    "protocol": (PROTOCOL_MODEL, of_protocol), "spill": (SPILL_MODEL, of_spill), "park": (PARK_MODEL, of_park),
    "limits": (LIMITS_MODEL, of_limits),
}  # fmt: skip


def judge_moves(name: str, taken: set[str]) -> Model[Any, Any]:
    """Return a model of which each move is judged by the relation, and by nothing else. `taken` are its steps."""
    model, project = _MODELS[name]
    known: dict[int, tuple[Any, Documents]] = {}

    def see(world: Any, state: Any) -> Documents:
        if known.get(id(state), (None,))[0] is not state:
            known.clear()
            known[id(state)] = state, project(world, state)
        return known[id(state)][1]

    def relate(move: Move[Any, Any]) -> Iterator[str]:
        before, after = see(move.world, move.before), project(move.world, move.after)
        written = [
            ((name, id_), after[name].get(id_))
            for name in after
            for id_ in before[name].keys() | after[name].keys()
            if before[name].get(id_) != after[name].get(id_)
        ]
        found = judge(Write(before, written, 0.0, changes(move.world, move.before)))
        taken.update(found.steps)
        yield from found.complaints

    return model._replace(oracles={"relation": (relate,)}, at_rest={})


_RUNS = TWO_TERMS._replace(name="a run of two changes", runs=True, terms=1)
_FAULTS = frozenset(protocol_model.Fault) - {protocol_model.Fault.ROLLBACK, protocol_model.Fault.LOCK}
_LATE = frozenset({*stores.Late, *spill_model.Late})
_SOUND: dict[str, list[Any]] = {
    "protocol": [
        TWO_TERMS,
        REWOUND,
        TWO_TERMS._replace(name="faults", terms=1, budget=1, faults=_FAULTS),
        _RUNS,
        _RUNS._replace(name="inline", commit=protocol_model.Commit.INLINE),
    ],
    "spill": [ONE._replace(name="two changes, a late write", late=_LATE, delays=1), HALTING],
    "park": [PARKED_KEY, LAPSING_REPLAY],
    "limits": [LIMITED_TERMS, LAPSING_LIMIT],
}
_PRODUCT_ALONE = {
    "renew", "raise", "give up history", "repartition", "store again", "change a letter",
}  # fmt: skip
"""Steps that no model has, or that the scenarios here do not reach."""

_BROKEN = [
    ("protocol", LAPSING, protocol_model.Broken.FENCE_IS_LEASE_VERSION),
    ("protocol", LAPSING, protocol_model.Broken.OUTCOME_WITHOUT_FENCE),
    ("protocol", TWO_TERMS, protocol_model.Broken.CLAIM_IGNORES_HANDLED),
    ("protocol", TWO_TERMS, protocol_model.Broken.TAKE_OVER_CLEARS_CLAIMS),
    ("protocol", LOCKED, protocol_model.Broken.WATERMARK_PASSES_LOCKED),
    ("protocol", TWO_TERMS._replace(stream=(0, 1)), protocol_model.Broken.WATERMARK_IS_MAXIMUM),
    ("protocol", REWOUND, protocol_model.Broken.REWIND_COUNTS_ALONE),
    ("spill", ONE, stores.Broken.MARK_BEFORE_INSERT),
    ("spill", ONE, spill_model.Broken.WATERMARK_BEFORE_MARK),
    ("spill", LATE_MARK, stores.Broken.MARK_IGNORES_GROWTH),
    ("park", PARKED_KEY, park_model.Broken.LETTER_LATER),
    ("park", PARKED_KEY, park_model.Broken.PARKED_LATER),
]


def test_each_move_of_a_model_is_a_step() -> None:
    """P1-P6: what the searches have proved of models is said of documents as the product stores them."""
    taken: set[str] = set()
    for name, worlds in _SOUND.items():
        for world in worlds:
            finding = judge_moves(name, taken).search(world).finding
            assert finding is None, f"{world.name}: {finding}"
    assert {name for steps in STEPS.values() for name in steps} - taken == _PRODUCT_ALONE


@pytest.mark.slow
def test_each_move_beside_a_locked_partition_is_a_step() -> None:
    """P1-P6, P12: two partitions, of which a take-over wins one later."""
    assert judge_moves("protocol", set()).search(LOCKED).finding is None


@pytest.mark.parametrize(("name", "world", "broken"), _BROKEN, ids=lambda each: str(getattr(each, "name", each)))
def test_a_move_of_a_broken_model_is_none(name: str, world: Any, broken: Any) -> None:
    """What the relation allows is not more than the rules do, as far as what is stored shows it."""
    assert judge_moves(name, set()).search(world._replace(broken=broken)).finding is not None
