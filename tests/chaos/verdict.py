"""The verdict on a run: all checks, and the figures of its table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tests.chaos import checks
from tests.chaos.checks import Longest
from tests.chaos.facts import Fact, Fault, Let, Parked
from tests.chaos.plan import healthy_partitions
from tests.chaos.setting import FLOWS
from tests.rig import history as common
from tests.rig.history import NONE, Due, Effect, SetAside, Started, Wrote

_LEAST_STOP = 0.5


@dataclass(frozen=True, slots=True)
class Judgement:
    """
    What a run has shown.

    Attributes:
        wrong: for each promise what is wrong, a sentence each.
        counts: how many writes, starts, effects, repeated starts, changes set aside and stored.
        times: how often each kind of fault happened.
        longest: for each kind, the longest time without progress.
        longest_stop: of a healthy partition, in seconds.
    """

    wrong: Mapping[str, Sequence[str]]
    counts: Mapping[str, int]
    times: Mapping[str, int]
    longest: Mapping[str, Longest]
    longest_stop: float = 0.0

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not any(self.wrong.values())


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    What there is to judge.

    Attributes:
        history: in the order of the oplog.
        acknowledged: what the writer knows to be written.
        status: what the bridge says of itself in the end.
        load: how many processes wanted each core of the machine.
        announced: by versions, who has said that it leads with them.
        ends: by names, how listeners have ended that nobody had ended.
        troubles: what the runner itself could not do.
        discarded: the changes whose letters a person has told to discard.
        parked: the partitions in which a key is parked in the end.
        unlike: writes of the bridge's state that the models do not allow.
        steps: how many others there were.
    """

    history: Sequence[Fact]
    acknowledged: Sequence[Due]
    faults: Sequence[Fault]
    _: KW_ONLY
    status: Mapping[str, Any]
    load: float
    announced: Mapping[int, str]
    ends: Mapping[str, Sequence[int]]
    troubles: Sequence[str]
    discarded: Collection[Due]
    parked: Sequence[str]
    unlike: Sequence[str]
    steps: int


def judge(evidence: Evidence) -> Judgement:
    """Judge a run that has come to rest, or has not within its time: then what is missing counts as lost."""
    history, faults = evidence.history, evidence.faults
    shared: list[common.Fact] = [fact for fact in history if isinstance(fact, common.Fact)]
    gone: list[common.Fact] = [SetAside(fact.due) for fact in history if isinstance(fact, Let)]
    parking = [fact for fact in shared if isinstance(fact, Effect) and FLOWS[fact.handler].parks]
    repeats, too_often = checks.repeated(history, faults)
    stops = checks.stops(history, healthy_partitions(), least=_LEAST_STOP)
    all_stops = checks.gaps(history, healthy_partitions(), least=_LEAST_STOP)
    wrong = {
        "lost": [*checks.not_found(history, evidence.acknowledged), *common.lost([*shared, *gone], NONE)],
        "invented": common.invented(shared),
        "out of order": [*common.out_of_sequence(shared), *common.went_back(parking)],
        "parked keys": [
            *checks.parked(history, evidence.discarded),
            *(f"a key of {where} is parked in the end" for where in evidence.parked),
        ],
        "stale": [*common.stale(shared), *common.weak_tokens(shared)],
        "unlike the models": list(evidence.unlike),
        "leases": checks.phantom_terms(history, evidence.announced),
        "innocents charged": checks.charged_innocents(history, faults),
        "healthy partitions stopped": checks.stopped(stops, faults, evidence.load),
        "everything stopped": checks.stopped(all_stops, faults, evidence.load),
        "repeated too often": too_often,
        "listeners ended": [f"{name} ended with {ends}" for name, ends in evidence.ends.items()],
        "status": checks.untrue(evidence.status),
        "the run itself": list(evidence.troubles),
    }
    kinds = {
        "written": Wrote,
        "started": Started,
        "effects": Effect,
        "set aside": SetAside,
        "parked": Parked,
    }
    return Judgement(
        wrong,
        {name: sum(isinstance(fact, kind) for fact in history) for name, kind in kinds.items()}
        | {"duplicates": repeats, "steps of the state": evidence.steps},
        dict(sorted(Counter(fault.name for fault in faults).items())),
        checks.longest_gaps(all_stops, faults),
        max((stop.seconds for stop in stops), default=0.0),
    )
