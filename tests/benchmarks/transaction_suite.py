"""Two-phase commits and locked documents, beside plain updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.bench.stage import BenchError, Scene, Stage
from mongo_celery.embedded import MongoReplicaSet
from tests.benchmarks.answers import answers, give_sign, ready
from tests.benchmarks.readings import RATE, Reading, Tables, readings
from tests.benchmarks.sizes import Sizes

_PROGRAMS = "tests.benchmarks.transfer_programs"
_OPLOG_MB = 2048
_BALANCE = 1_000_000_000
CONTENTION = {"low": 1000, "high": 2}
"""Accounts among which the processes transfer."""

_REFERENCES = {"plain": None, "two_phase": "plain", "locked": "plain", "plain_across": None, "across": "plain_across"}


def run_transactions(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    found: dict[str, list[Reading]] = {}
    with MongoReplicaSet(oplog_mb=_OPLOG_MB) as other:
        for contention, accounts in CONTENTION.items():
            title = f"Transfers per second among {accounts:,} accounts, {sizes.processes} processes together"
            found[title] = _transfers(stage, other.url, contention, sizes, announce)
    return found


def _transfers(
    stage: Stage, other: str, contention: str, sizes: Sizes, announce: Callable[[str], None]
) -> list[Reading]:
    """Measure all kinds in turn, so that other load of the machine falls on all of them."""
    rates: dict[str, list[float]] = {kind: [] for kind in _REFERENCES}
    for number in range(sizes.rounds):
        for kind, found in rates.items():
            announce(f"transfers, {kind}, {contention} contention, round {number + 1} of {sizes.rounds}")
            found.append(_rate(stage, kind, CONTENTION[contention], sizes, other if "across" in kind else ""))
    return readings(RATE, rates, _REFERENCES)


def _rate(stage: Stage, kind: str, accounts: int, sizes: Sizes, other: str) -> float:
    """Return the transfers per second of all processes, from the first one's start to the last one's end."""
    with stage.scene(f"transfers-{kind.replace('_', '-')}") as scene, _places(scene, other) as places:
        _open_accounts(places, accounts)
        arguments = [kind, str(accounts), str(sizes.transfers), *([other] if other else [])]
        processes = [scene.program(_PROGRAMS, *arguments) for _ in range(sizes.processes)]
        scene.wait("the processes", lambda: ready(scene.setting) == len(processes))
        give_sign(scene.setting)
        done = scene.laps("transferred")
        scene.wait("the transfers", lambda: len(answers(scene.setting)) == len(processes), done.count)
        found = answers(scene.setting)
        _check_sum(places, accounts, kind)
        began, ended = min(each["began"] for each in found), max(each["ended"] for each in found)
        return len(processes) * sizes.transfers / float(ended - began)


@contextmanager
def _places(scene: Scene, other: str) -> Iterator[list[Database[dict[str, Any]]]]:
    """Yield the databases with accounts: in the scene's own cluster, and in the other, if there is one."""
    if not other:
        yield [scene.data]
        return
    with MongoClient[dict[str, Any]](other) as client:
        yield [scene.data, client[scene.setting.database]]
        client.drop_database(scene.setting.database)


def _open_accounts(places: Sequence[Database[dict[str, Any]]], accounts: int) -> None:
    for place in places:
        place["accounts"].insert_many(
            [{"_id": number, "balance": _BALANCE, "pendingTransactions": []} for number in range(accounts)]
        )


def _check_sum(places: Sequence[Database[dict[str, Any]]], accounts: int, kind: str) -> None:
    """A figure of transfers that lose money is worth nothing."""
    total = sum(account["balance"] for place in places for account in place["accounts"].find({}, {"balance": 1}))
    wrong = total - len(places) * accounts * _BALANCE
    if wrong:
        raise BenchError(f"{kind} transfers have changed the sum of all balances by {wrong}.")
