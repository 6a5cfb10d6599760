"""
What happens when in a run, drawn from its seed. Pure: the same seed gives the same plan, on every machine.

A plan has steps of three sorts: faults (`faults`), poison (a document that its subscription cannot simply handle), and
what a person does to partitions meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.chaos.facts import Plan, Step
from tests.chaos.faults import KINDS, Kind
from tests.chaos.setting import BROKEN_TEXT, FLOWS, HARMLESS, HOT, PARTITIONS, POISON, STANDING_PARTITIONS, keys_in

_CALM_SECONDS = 4.0
_PAUSE_SECONDS = 0.5, 3.0
_TOGETHER = 0.3
_POISON_UNTIL = 0.7
"""Poison comes in the first part of a run, so that it stands while faults happen."""


def draw(seed: int, seconds: float, members: int = 1) -> Plan:
    chance = random.Random(f"chaos/{seed}/{seconds}/{members}")
    steps = [*_faults(chance, seconds, members), *_poison(chance, seconds), *_person(chance, seconds)]
    return Plan(seed, seconds, members, tuple(sorted(steps, key=lambda step: (step.at, step.does))))


def _faults(chance: random.Random, seconds: float, members: int) -> Iterator[Step]:
    """Each kind once, in any order, and again; some while another lasts, none beside one on the same thing."""
    kinds = [kind for kind in KINDS.values() if kind.members <= members and not (kind.alone and members > 1)]
    free: dict[str, float] = {}
    at = _CALM_SECONDS
    for kind in _shuffled(chance, kinds):
        at = max(at, free.get(kind.on, 0.0))
        if at >= seconds:
            return
        lasts = round(chance.uniform(*kind.lasts), 1)
        yield Step(round(at, 2), kind.name, lasts, choice=chance.random())
        # A network that is lost hides what happens to the servers behind it.
        free[kind.on] = at + lasts + kind.bound / 2
        at += (
            chance.uniform(*_PAUSE_SECONDS) if chance.random() < _TOGETHER else lasts + chance.uniform(*_PAUSE_SECONDS)
        )


def _shuffled(chance: random.Random, kinds: Sequence[Kind]) -> Iterator[Kind]:
    while True:
        deck = list(kinds)
        chance.shuffle(deck)
        yield from deck


POISONS = {
    "raises": ("quick", "letters", "together", "listed"),
    "kills its process": ("quick", "letters", "listed"),
    "broken UTF-8": ("slow", "together", "listed"),
    "year 20000": ("quick", "slow", "letters", "together", "listed"),
    "no partition": ("letters",),
    "huge": ("quick",),
    "retries in 30 000 years": ("slow", "together", "listed"),
}
"""For each poison, the subscriptions that may meet it."""

HARMLESS_POISONS = {"year 20000"}
"""What is to be handled like any other change."""


def _poison(chance: random.Random, seconds: float) -> Iterator[Step]:
    """Each of them once, wherever it may be, in partitions that may stand."""
    for name, places in POISONS.items():
        for where in places:
            at = round(chance.uniform(_CALM_SECONDS / 2, seconds * _POISON_UNTIL), 2)
            partition = chance.choice(STANDING_PARTITIONS)
            prefix = HARMLESS if name in HARMLESS_POISONS else POISON
            text = BROKEN_TEXT if name == "broken UTF-8" else name.replace(" ", "-")
            key = next(keys_in(where, partition, f"{prefix}{text}"))
            yield Step(at, f"poison: {name}", where=where, partition=partition, key=key)


_LETTERS = (
    (0.2, "replay letters"),
    (0.35, "discard a letter"),
    (0.5, "replay letters"),
    (0.65, "discard a letter"),
    (0.8, "replay letters"),
)
"""What a person does with the letters of parked keys, at which share of a run."""


def _person(chance: random.Random, seconds: float) -> Iterator[Step]:
    """Partitions that are paused and resumed, halted ones that are retried, letters of parked keys, and a hot key."""
    for where in chance.sample(list(FLOWS), 2):
        at, partition = chance.uniform(_CALM_SECONDS, seconds / 2), chance.choice(STANDING_PARTITIONS)
        yield Step(round(at, 2), "person: pause", where=where, partition=partition)
        yield Step(round(at + seconds / 4, 2), "person: resume", where=where, partition=partition)
    for share in (0.5, 0.8):
        yield Step(round(seconds * share, 2), "person: cure and retry", where="quick", partition=STANDING_PARTITIONS[0])
    for share, does in _LETTERS:
        yield Step(round(seconds * share, 2), f"person: {does}", where="parking", choice=chance.random())
    where = chance.choice(["quick", "slow"])
    yield Step(round(chance.uniform(_CALM_SECONDS, seconds / 2), 2), "person: burst", where=where, key=HOT)


def healthy_partitions() -> set[tuple[str, int]]:
    """Those in which no plan puts poison, and which no person stops."""
    return {(name, index) for name in FLOWS for index in range(PARTITIONS) if index not in STANDING_PARTITIONS}
