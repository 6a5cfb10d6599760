"""Two-phase commits and locked documents: transfers per second, and how soon they recover from a kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.database import Database

from mongo_celery import TwoPhaseCommit, select_for_update, select_many_for_update, transactional
from mongo_celery.bench.stage import BenchError, Scene, Stage, pause
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.embedded.processes import ChildProcess
from tests.benchmarks.answers import answers, give_sign, ready
from tests.benchmarks.readings import RATE, SECONDS, Reading, reading
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.transfer_programs import APPLICATION

_PROGRAMS = "tests.benchmarks.transfer_programs"
_OPLOG_MB = 2048
_BALANCE = 1_000_000_000
CONTENTION = {"low": 1000, "high": 2}
"""Accounts among which the processes transfer."""

KINDS_ACROSS = ("plain_across", "across")
"""Over two clusters."""

_REFERENCES = {"plain": None, "two_phase": "plain", "locked": "plain", "plain_across": None, "across": "plain_across"}
_AT_ONCE = 100
_OPEN = ["pending", "applied", "canceling"]
_TRANSFERRED = 40
_KILLS_MAX = 20
_OLDER_THAN = 1.0
_LOOK_SECONDS = 0.05
_SLACK_SECONDS = 90.0


@dataclass(slots=True)
class TransactionResults:
    """
    What the suite has found.

    Attributes:
        transfers: per second by all processes together; the ratio is to two plain updates in the same clusters.
        many: how often a second one process changes a hundred documents at once, plainly and after locking them.
        recovery: seconds from the SIGKILL of all processes until `recover` has brought everything to an end, with
            `older_than` of one second.
        left: how many two-phase transactions were under way, by repetition.
        lock: seconds from the SIGKILL of a holder until another has locked its document; None where the server's
            parameter is not ours to set.
        lock_lifetime: the server's transactionLifetimeLimitSeconds meanwhile.
        accounts: among which the processes transferred, by contention.
    """

    transfers: list[Reading] = field(default_factory=list)
    many: list[Reading] = field(default_factory=list)
    recovery: Reading | None = None
    left: list[int] = field(default_factory=list)
    lock: Reading | None = None
    lock_lifetime: int = 0
    accounts: Mapping[str, int] = field(default_factory=lambda: CONTENTION)


def run_transactions(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> TransactionResults:
    """Measure transactions."""
    results = TransactionResults(lock_lifetime=sizes.lock_lifetime)
    with MongoReplicaSet(oplog_mb=_OPLOG_MB) as other:
        for contention in CONTENTION:
            results.transfers += _transfers(stage, other.url, contention, sizes, announce)
    announce("a hundred documents at once")
    results.many = _many(stage, sizes)
    announce("recovery of two-phase commits")
    results.recovery, results.left = _recoveries(stage, sizes)
    if sizes.lock_lifetime and "mongod" in stage.server_pids:
        announce("the lock of a killed holder")
        results.lock = _lock_release(stage, sizes)
    return results


def _transfers(
    stage: Stage, other: str, contention: str, sizes: Sizes, announce: Callable[[str], None]
) -> list[Reading]:
    """All kinds in turn, so that what else the machine does falls on all of them."""
    rates: dict[str, list[float]] = {kind: [] for kind in _REFERENCES}
    for number in range(sizes.rounds):
        for kind, found in rates.items():
            announce(f"transfers, {kind}, {contention} contention, round {number + 1} of {sizes.rounds}")
            found.append(_rate(stage, kind, CONTENTION[contention], sizes, other if kind in KINDS_ACROSS else ""))
    return [
        reading(f"{kind}_{contention}", RATE, rates[kind], None if to is None else (f"{to}_{contention}", rates[to]))
        for kind, to in _REFERENCES.items()
    ]


def _rate(stage: Stage, kind: str, accounts: int, sizes: Sizes, other: str) -> float:
    """Transfers per second of all processes together, from the first one's start to the last one's end."""
    with stage.scene(f"transfers-{kind.replace('_', '-')}") as scene, _places(scene, other) as places:
        _open_accounts(places, accounts)
        arguments = [kind, str(accounts), str(sizes.transfers), *([other] if other else [])]
        processes = [scene.program(_PROGRAMS, "transfers", *arguments) for _ in range(sizes.processes)]
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
    """Where accounts are: in the scene's own cluster, and in the other, if there is one."""
    if not other:
        yield [scene.data]
        return
    with MongoClient[dict[str, Any]](other) as client:
        yield [scene.data, client[scene.setting.database]]
        client.drop_database(scene.setting.database)


def _many(stage: Stage, sizes: Sizes) -> list[Reading]:
    """By one process, round about: what both ways write is the same, but for the lock."""
    rates: dict[str, list[float]] = {"plain_hundred": [], "locked_hundred": []}
    with stage.scene("locked-many") as scene:
        _open_accounts([scene.data], _AT_ONCE)
        accounts = scene.data["accounts"].with_options(write_concern=WriteConcern("majority"))
        change = {"$inc": {"balance": 1}}

        @transactional(stage.client)
        def locked(*, session: Any) -> None:
            found = select_many_for_update(accounts, {}, session=session)
            accounts.update_many({"_id": {"$in": [each["_id"] for each in found]}}, change, session=session)

        ways: dict[str, Callable[[], object]] = {
            "plain_hundred": lambda: accounts.update_many({}, change),
            "locked_hundred": locked,
        }
        for _ in range(sizes.rounds):
            for name, way in ways.items():
                way()
                began = time.monotonic()
                for _ in range(sizes.transfers):
                    way()
                rates[name].append(sizes.transfers / (time.monotonic() - began))
    plain = ("plain_hundred", rates["plain_hundred"])
    return [
        reading("plain_hundred", RATE, rates["plain_hundred"], None),
        reading("locked_hundred", RATE, rates["locked_hundred"], plain),
    ]


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


def _recoveries(stage: Stage, sizes: Sizes) -> tuple[Reading, list[int]]:
    taken: list[float] = []
    left: list[int] = []
    for _ in range(_KILLS_MAX):
        if len(taken) == sizes.kills:
            return Reading(name="recovery", unit=SECONDS, rounds=tuple(taken)), left
        seconds, open_ones = _recovery(stage, sizes)
        if open_ones:
            taken.append(seconds)
            left.append(open_ones)
    raise BenchError("processes were killed again and again, and hardly ever in the middle of a transfer.")


def _recovery(stage: Stage, sizes: Sizes) -> tuple[float, int]:
    """Seconds from the kill until nothing is under way any more, and how much was."""
    accounts = CONTENTION["low"]
    with stage.scene("two-phase-kill") as scene:
        _open_accounts([scene.data], accounts)
        transactions = scene.data["transactions"]
        bank = TwoPhaseCommit(None, transactions, application=APPLICATION, protocol="documents")
        processes = [scene.program(_PROGRAMS, "transfer_on", str(accounts)) for _ in range(sizes.processes)]
        done = scene.laps("transferred")
        scene.wait("some transfers", lambda: done.count() >= _TRANSFERRED, done.count)
        killed = _kill(scene, processes)
        under_way = {"state": {"$in": _OPEN}}
        left = transactions.count_documents(under_way)
        while transactions.count_documents(under_way, limit=1):
            if time.monotonic() - killed > _SLACK_SECONDS:
                raise BenchError(f"{transactions.count_documents(under_way)} transactions were not recovered.")
            pause(_LOOK_SECONDS)
            bank.recover(older_than=_OLDER_THAN)
        seconds = time.monotonic() - killed
        _check_sum([scene.data], accounts, "recovered")
        return seconds, left


def _kill(scene: Scene, processes: list[ChildProcess]) -> float:
    for process in processes:
        process.send(signal.SIGKILL)
    killed = time.monotonic()
    for process in processes:
        scene.stop(process)
    return killed


def _lock_release(stage: Stage, sizes: Sizes) -> Reading:
    taken = []
    with _lifetime(stage, sizes.lock_lifetime):
        for _ in range(sizes.kills):
            with stage.scene("lock-kill") as scene:
                _open_accounts([scene.data], 1)
                held = scene.laps("held")
                holder = scene.program(_PROGRAMS, "hold")
                scene.wait("a holder", held.count)
                killed = _kill(scene, [holder])
                with_time = transactional(stage.client, timeout=sizes.lock_lifetime + _SLACK_SECONDS)
                with_time(select_for_update)(scene.data["accounts"], {"_id": 0})
                taken.append(time.monotonic() - killed)
    return Reading(name="lock_released", unit=SECONDS, rounds=tuple(taken))


@contextmanager
def _lifetime(stage: Stage, seconds: int) -> Iterator[None]:
    """Let the embedded server end transactions after so long."""
    name = "transactionLifetimeLimitSeconds"
    before = stage.client.admin.command({"getParameter": 1, name: 1})[name]
    stage.client.admin.command({"setParameter": 1, name: seconds})
    try:
        yield
    finally:
        stage.client.admin.command({"setParameter": 1, name: before})
