"""What the cells came to: kept from run to run, as a table for a terminal and for the documentation, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.versions.matrix import CELLS
from tests.versions.run import Outcome

BEGIN, END = "<!-- python -m tests.versions writes from here -->", "<!-- to here -->"
_COLUMNS = ("on", "Python", "MongoDB", "Celery", "kombu", "PyMongo", "broker", "passed", "skipped", "failed")


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """A table for a terminal."""
    table = Table("cell", *_COLUMNS)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    return table


def keep(outcome: Outcome, folder: Path, files: str) -> None:
    """Keep what a cell came to with these files, over what it came to before."""
    plain = {**_plain(outcome), "files": files}
    (folder / f"{outcome.cell.name}.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")


def is_done(name: str, folder: Path, files: str) -> bool:
    """Whether a cell has run with these files, and no test failed."""
    file = folder / f"{name}.json"
    plain = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return bool(plain.get("good")) and plain.get("files") == files


def kept(folder: Path) -> list[Outcome]:
    """What the cells came to when they were last run, in the order of the matrix."""
    found = []
    for name, cell in CELLS.items():
        file = folder / f"{name}.json"
        if file.exists():
            plain = json.loads(file.read_text(encoding="utf-8"))
            del plain["good"], plain["files"]
            found.append(Outcome(**{**plain, "cell": cell, "failed": tuple(plain["failed"])}))
    return found


def record(outcomes: Sequence[Outcome], page: Path) -> None:
    """Write the table into a page, between its two marks; cells that are not among the outcomes keep their rows."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {name: f"| {' | '.join(_row(Outcome(cell, '', missing='not yet')))} |" for name, cell in CELLS.items()}
    rows |= {name: row for row in old.splitlines() if row.startswith("| `") and (name := row.split("`")[1]) in rows}
    rows |= {outcome.cell.name: f"| {' | '.join(_row(outcome))} |" for outcome in outcomes}
    table = "\n".join([f"| cell | {' | '.join(_COLUMNS)} |", f"|---{'|---' * len(_COLUMNS)}|", *rows.values()])
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def as_json(outcomes: Sequence[Outcome]) -> str:
    """One object: `cells`, a list with what each of them came to."""
    return json.dumps({"cells": [_plain(outcome) for outcome in outcomes]}, indent=2)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "cell": outcome.cell.name, "good": outcome.good}


def _row(outcome: Outcome) -> list[str]:
    cell, found = outcome.cell, outcome.versions
    if outcome.missing:
        return [f"`{cell.name}`", outcome.on, f"not run: {outcome.missing}", *[""] * (len(_COLUMNS) - 2)]
    server = "Valkey" if cell.redis.startswith("valkey") else "Redis"
    broker = f"{server} {found['redis-server']}"
    if cell.broker != "redis":
        broker = f"RabbitMQ {found['rabbitmq']}, {cell.broker} queues"
    ran = (outcome.on, found["python"], found["mongod"], found["celery"], found["kombu"], found["pymongo"], broker)
    return [f"`{cell.name}`", *ran, str(outcome.passed), str(len(outcome.skipped)), str(len(outcome.failed))]
