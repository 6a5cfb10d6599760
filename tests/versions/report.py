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


def keep(outcome: Outcome, folder: Path) -> None:
    """Keep what a cell came to, over what it came to before."""
    (folder / f"{outcome.cell.name}.json").write_text(json.dumps(_plain(outcome), indent=2), encoding="utf-8")


def kept(folder: Path) -> list[Outcome]:
    """What the cells came to when they were last run, in the order of the matrix."""
    found = []
    for name, cell in CELLS.items():
        file = folder / f"{name}.json"
        if file.exists():
            plain = json.loads(file.read_text(encoding="utf-8"))
            plain.pop("good")
            found.append(Outcome(**{**plain, "cell": cell, "failed": tuple(plain["failed"])}))
    return found


def record(outcomes: Sequence[Outcome], page: Path) -> None:
    """Write the table into a page, between its two marks."""
    lines = [f"| cell | {' | '.join(_COLUMNS)} |", f"|---{'|---' * len(_COLUMNS)}|"]
    lines += [f"| {' | '.join(_row(outcome))} |" for outcome in outcomes]
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
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
    broker = f"Redis {found['redis-server']}" if cell.broker == "redis" else f"RabbitMQ, {cell.broker} queues"
    ran = (outcome.on, found["python"], found["mongod"], found["celery"], found["kombu"], found["pymongo"], broker)
    return [f"`{cell.name}`", *ran, str(outcome.passed), str(len(outcome.skipped)), str(len(outcome.failed))]
