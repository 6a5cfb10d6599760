"""Two-phase commits and locked documents: transfers per second, and how soon they recover from a kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pymongo import WriteConcern

from mongo_celery import TwoPhaseCommit, select_for_update, select_many_for_update, transactional
from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.embedded.crew import ChildProcess
from tests.benchmarks.answers import answers, give_sign, ready
from tests.benchmarks.readings import RATE, SECONDS, Reading, reading
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.transfer_programs import APPLICATION

_PROGRAMS = "tests.benchmarks.transfer_programs"
_BALANCE = 1_000_000_000
CONTENTION = {"low": 1000, "high": 2}
"""Accounts among which the processes transfer."""

KINDS = ("plain", "two_phase", "locked")
_REFERENCE = "plain"
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
        transfers: per second by all processes together; the ratio is to two plain updates.
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
    for contention, accounts in CONTENTION.items():
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(sizes.rounds):
            for kind, found in rates.items():
                announce(f"transfers, {kind}, {contention} contention, round {number + 1} of {sizes.rounds}")
                found.append(_rate(stage, kind, accounts, sizes))
        for kind, found in rates.items():
            beside = None if kind == _REFERENCE else (f"{_REFERENCE}_{contention}", rates[_REFERENCE])
            results.transfers.append(reading(f"{kind}_{contention}", RATE, found, beside))
    announce("a hundred documents at once")
    results.many = _many(stage, sizes)
    announce("recovery of two-phase commits")
    results.recovery, results.left = _recoveries(stage, sizes)
    if sizes.lock_lifetime and "mongodb" in stage.server_pids:
        announce("the lock of a killed holder")
        results.lock = _lock_release(stage, sizes)
    return results


def _rate(stage: Stage, kind: str, accounts: int, sizes: Sizes) -> float:
    """Transfers per second of all processes together, from the first one's start to the last one's end."""
    with stage.scene(f"transfers-{kind.replace('_', '-')}") as scene:
        _open_accounts(scene, accounts)
        processes = [
            scene.program(_PROGRAMS, "transfers", kind, str(accounts), str(sizes.transfers))
            for _ in range(sizes.processes)
        ]
        scene.wait("the processes", lambda: ready(scene.setting) == len(processes))
        give_sign(scene.setting)
        done = scene.laps("transferred")
        scene.wait("the transfers", lambda: len(answers(scene.setting)) == len(processes), done.count)
        found = answers(scene.setting)
        _check_sum(scene, accounts, kind)
        began, ended = min(each["began"] for each in found), max(each["ended"] for each in found)
        return len(processes) * sizes.transfers / float(ended - began)


def _many(stage: Stage, sizes: Sizes) -> list[Reading]:
    """By one process, round about: what both ways write is the same, but for the lock."""
    rates: dict[str, list[float]] = {"plain_hundred": [], "locked_hundred": []}
    with stage.scene("locked-many") as scene:
        _open_accounts(scene, _AT_ONCE)
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


def _open_accounts(scene: Scene, accounts: int) -> None:
    scene.data["accounts"].insert_many(
        [{"_id": number, "balance": _BALANCE, "pendingTransactions": []} for number in range(accounts)]
    )


def _check_sum(scene: Scene, accounts: int, kind: str) -> None:
    """A figure of transfers that lose money is worth nothing."""
    total = sum(account["balance"] for account in scene.data["accounts"].find({}, {"balance": 1}))
    if total != accounts * _BALANCE:
        raise BenchError(f"{kind} transfers have changed the sum of all balances by {total - accounts * _BALANCE}.")


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
        _open_accounts(scene, accounts)
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
        _check_sum(scene, accounts, "recovered")
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
                _open_accounts(scene, 1)
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
