"""What the suites have found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mongo_celery.bench.command import describe_machine
from tests.benchmarks.backlog_suite import Backlog, BacklogResults
from tests.benchmarks.handlers_suite import HandlersResults, Shared
from tests.benchmarks.latency_suite import LatencyResults
from tests.benchmarks.outbox_suite import OutboxResults
from tests.benchmarks.parts_suite import PartsResults
from tests.benchmarks.pending_query import PendingQuery
from tests.benchmarks.processes import PROCESSES, with_pool
from tests.benchmarks.readings import Reading
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.snapshot_suite import SnapshotResults, Waited
from tests.benchmarks.spill_suite import SpillResults
from tests.benchmarks.stream_suite import StreamResults
from tests.benchmarks.transaction_suite import TransactionResults

_WHOLE = 100  # from here on digits behind the point say nothing


@dataclass(slots=True)
class SuiteResults:
    """What each suite has found; None for one that was not asked for."""

    seconds: float = 0.0
    outbox: OutboxResults | None = None
    transactions: TransactionResults | None = None
    stream: StreamResults | None = None
    spill: SpillResults | None = None
    snapshot: SnapshotResults | None = None
    parts: PartsResults | None = None
    backlog: BacklogResults | None = None
    handlers: HandlersResults | None = None
    latency: LatencyResults | None = None


def as_json(results: SuiteResults, sizes: Sizes) -> dict[str, Any]:
    """One object, with one key for each suite."""
    found: dict[str, Any] = {"seconds": round(results.seconds, 1), "machine": describe_machine()}
    if results.outbox is not None:
        found["outbox"] = {"rounds": sizes.rounds, **_outbox(results.outbox, sizes)}
    if results.transactions is not None:
        found["transactions"] = {"rounds": sizes.rounds, **_transactions(results.transactions, sizes)}
    if results.stream is not None:
        found["stream"] = {
            "rounds": sizes.rounds,
            "entries": results.stream.entries,
            "scanned": _plain(results.stream.scanned),
        }
    if results.spill is not None:
        found["spill"] = {"rounds": sizes.rounds, **_spill(results.spill)}
    if results.snapshot is not None:
        found["snapshot"] = {"rounds": sizes.snapshots, **_snapshot(results.snapshot)}
    if results.parts is not None:
        found["parts"] = {
            "rounds": sizes.rounds,
            "event_bytes": results.parts.event_bytes,
            "cpu": _plain(results.parts.parts),
        }
    if results.backlog is not None:
        found["backlog"] = [_rounded(each) for each in results.backlog.backlogs]
    if results.handlers is not None:
        found["handlers"] = {"rounds": sizes.rounds, "shared": [_rounded(each) for each in results.handlers.shared]}
    if results.latency is not None:
        latency = results.latency
        found["latency"] = {
            "rounds": sizes.rounds,
            "lease_ttl": latency.lease_ttl,
            "waits": _plain(latency.waits),
            "take_overs": _plain(latency.take_overs),
        }
    return found


def show(results: SuiteResults, console: Console) -> None:
    """Tables and sentences."""
    if results.outbox is not None:
        _show_outbox(results.outbox, console)
    if results.transactions is not None:
        _show_transactions(results.transactions, console)
    if results.stream is not None:
        title = f"Oplog entries that a stream passes per second, {results.stream.entries:,} of a neighbour"
        console.print(_table(title, results.stream.scanned))
    if results.spill is not None:
        _show_spill(results.spill, console)
    if results.snapshot is not None:
        _show_snapshot(results.snapshot, console)
    if results.parts is not None:
        title = f"CPU time of a change of {results.parts.event_bytes:,} bytes, part by part"
        console.print(_table(title, results.parts.parts))
    if results.backlog is not None:
        _show_backlog(results.backlog, console)
    if results.handlers is not None:
        _show_handlers(results.handlers, console)
    if results.latency is not None:
        console.print(_table("From a write to the start of its handler", results.latency.waits))
        title = f"From a leader's end to the next term's first message, lease_ttl={results.latency.lease_ttl:g}"
        console.print(_table(title, results.latency.take_overs))
    console.print(f"{results.seconds:.0f} s in all")


def _outbox(results: OutboxResults, sizes: Sizes) -> dict[str, Any]:
    costs = results.costs
    return {
        "costs": {**_plain(costs.readings), "undelivered": costs.undelivered},
        "aims": {
            name: {"ratio": round(ratio, 3), "aim": aim, "met": ratio <= aim} for name, ratio, aim in costs.aims()
        },
        "writes": _plain(results.writes),
        "entries": _plain(results.entries),
        "sweep_query": None if results.query is None else _query(results.query),
        "recovery": None
        if results.recovery is None
        else {
            **results.recovery.plain(),
            "left_pending": results.left,
            "claim_ttl": sizes.claim_ttl,
            "sweep_after": sizes.sweep_after,
        },
    }


def _query(query: PendingQuery) -> dict[str, Any]:
    return {
        "documents": query.documents,
        "pending": query.pending,
        "index": query.index,
        "keys_examined": query.keys_examined,
        "documents_examined": query.documents_examined,
        **_plain(query.readings),
    }


def _transactions(results: TransactionResults, sizes: Sizes) -> dict[str, Any]:
    return {
        "processes": sizes.processes,
        "accounts": dict(results.accounts),
        "transfers": _plain(results.transfers),
        "many": _plain(results.many),
        "recovery": None if results.recovery is None else {**results.recovery.plain(), "left_open": results.left},
        "lock_released": None
        if results.lock is None
        else {**results.lock.plain(), "transaction_lifetime_limit": results.lock_lifetime},
    }


def _spill(results: SpillResults) -> dict[str, Any]:
    return {
        "beside": results.beside,
        "standing": results.standing,
        "others": _plain(results.others),
        "backlogs": {keys: asdict(backlog) for keys, backlog in results.backlogs.items()},
        "cost_us": {
            str(size): {
                name: {process: round(used) for process, used in part.items()} for name, part in asdict(cost).items()
            }
            for size, cost in results.costs.items()
        },
        "handovers": [
            {
                "stored": each.stored,
                "take_over_seconds": round(each.take_over, 3),
                "listener_memory_mb": {name: round(size, 1) for name, size in each.memory_mb.items()},
            }
            for each in results.handovers
        ],
    }


def _snapshot(results: SnapshotResults) -> dict[str, Any]:
    return {
        "documents": results.documents,
        "delivered": _plain(results.delivered),
        "cpu_us": {
            name: {process: round(us, 1) for process, us in used.items()} for name, used in results.cpu_us.items()
        },
        "live_ms": {
            "alone": {name: _waits(waited) for name, waited in results.alone.items()},
            "beside": {name: _waits(waited) for name, waited in results.beside.items()},
        },
    }


def _waits(waited: Waited) -> dict[str, float]:
    return {name: round(value, 1) for name, value in asdict(waited).items()}


def _plain(readings: Sequence[Reading]) -> dict[str, Any]:
    return {each.name: each.plain() for each in readings}


def _show_outbox(results: OutboxResults, console: Console) -> None:
    console.print(_table("A write with its tasks beside a plain one and delay()", results.costs.readings))
    for name, ratio, aim in results.costs.aims():
        console.print(f"{name}: {ratio:.2f}, aim {aim:.2f}: {'met' if ratio <= aim else 'not met'}")
    console.print(f"left after the broker was back: {results.costs.undelivered} documents")
    console.print(_table("A write with what follows it", results.writes))
    console.print(_table("Entries per second", results.entries))
    if results.query is not None:
        query = results.query
        console.print(
            f"the sweep's query on {query.documents:,} documents, {query.pending} pending: index {query.index}, "
            f"{query.keys_examined} keys and {query.documents_examined} documents examined"
        )
        console.print(_table("", query.readings))
    if results.recovery is not None:
        left = ", ".join(map(str, results.left))
        console.print(f"a killed writer's entries ({left}) were delivered after {_seconds(results.recovery)}")


def _show_transactions(results: TransactionResults, console: Console) -> None:
    console.print(_table("Transfers per second, all processes together", results.transfers))
    console.print(_table("A hundred documents changed at once, per second by one process", results.many))
    if results.recovery is not None:
        left = ", ".join(map(str, results.left))
        console.print(
            f"two-phase commits under way at a kill ({left}) were recovered after {_seconds(results.recovery)}"
        )
    if results.lock is not None:
        console.print(
            f"a killed holder's lock was free after {_seconds(results.lock)} with "
            f"transactionLifetimeLimitSeconds={results.lock_lifetime}"
        )


def _show_spill(results: SpillResults, console: Console) -> None:
    title = f"Changes per second of the others, {results.beside:,} beside {results.standing:,} of what stands"
    console.print(_table(title, results.others))
    for keys, backlog in results.backlogs.items():
        console.print(
            f"a backlog of {backlog.changes:,} changes of {keys}, of which the buffer can have some "
            f"{backlog.buffered:,}: {backlog.inserted:,} were stored"
        )
    for size, cost in results.costs.items():
        for words, used in (("storing", cost.storing), ("reading back", cost.reading_back)):
            parts = ", ".join(f"{process} {microseconds:,.0f} us" for process, microseconds in used.items())
            console.print(f"{words} a change of {size:,} bytes: {parts}")
    for each in results.handovers:
        memory = ", ".join(f"{name} {size:.0f}" for name, size in each.memory_mb.items())
        console.print(
            f"with {each.stored:,} stored changes: take-over {each.take_over:.1f} s; listener's memory in MB: {memory}"
        )


def _show_snapshot(results: SnapshotResults, console: Console) -> None:
    title = f"Documents per second, {results.documents:,} of a snapshot and as many live inserts"
    console.print(_table(title, results.delivered))
    for name, used in results.cpu_us.items():
        parts = ", ".join(f"{process} {us:,.0f} us" for process, us in used.items())
        console.print(f"processor time of a document, {name}: {parts}")
    for words, found in (("alone", results.alone), ("beside a snapshot", results.beside)):
        for name, waited in found.items():
            console.print(
                f"live changes of the {name}, {words}: median {waited.p50:,.0f} ms, 99 % {waited.p99:,.0f} ms, "
                f"longest {waited.longest:,.0f} ms ({waited.samples:,} changes)"
            )


def _rounded(figures: Backlog | Shared) -> dict[str, Any]:
    found = asdict(figures)
    used = {process: round(us, 1) for process, us in figures.cpu_us.items()}
    numbers = {name: round(value, 1) for name, value in found.items() if isinstance(value, float)}
    return {**found, **numbers, "cpu_us": used}


def _show_backlog(results: BacklogResults, console: Console) -> None:
    table = Table(title="CPU us of a change, and the listener's memory, by backlog")
    for column in ("changes", "1/s", *PROCESSES, "start MB", "peak MB"):
        table.add_column(column, justify="right")
    for each in results.backlogs:
        memory = (f"{size:.0f}" for size in (each.started_mb, each.peak_mb))
        table.add_row(f"{each.changes:,}", f"{each.rate:,.0f}", *_by_process(each.cpu_us), *memory)
    console.print(table)


def _show_handlers(results: HandlersResults, console: Console) -> None:
    table = Table(title="CPU us of a change, and its share of the oplog, for each handler that gets it")
    for column in ("", "handlers", "1/s", *PROCESSES, "oplog bytes", "peak MB"):
        table.add_column(column, justify="right" if column else "left")
    for each in results.shared:
        row = (each.kind, str(each.handlers), f"{each.executions:,.0f}")
        written = "" if each.oplog_bytes is None else f"{each.oplog_bytes:,.0f}"
        table.add_row(*row, *_by_process(each.cpu_us), written, f"{each.listener_mb:.0f}")
    console.print(table)


def _by_process(cpu_us: Mapping[str, float]) -> Iterator[str]:
    """Empty for a server that was given: its processor time is not known."""
    used = with_pool(cpu_us)
    for process in PROCESSES:
        yield _number(used[process]) if process in used else ""


def _seconds(reading: Reading) -> str:
    return f"{reading.value:.1f} s (longest {max(reading.rounds):.1f} s)"


def _table(title: str, readings: Sequence[Reading]) -> Table:
    table = Table(title=title or None)
    table.add_column("", no_wrap=True)
    for column in ("median", "lowest", "highest", "ratio", "to"):
        table.add_column(column, justify="left" if column == "to" else "right")
    for each in readings:
        median, lowest, highest = (_number(value) for value in (each.value, min(each.rounds), max(each.rounds)))
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.name, f"{median} {each.unit}", lowest, highest, ratio, each.ratio_to or "")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:,.2f}"
