"""What the cells came to, as a table for a terminal, for the documentation, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.versions.run import Outcome

BEGIN, END = "<!-- python -m tests.versions writes from here -->", "<!-- to here -->"
_COLUMNS = ("Python", "MongoDB", "Celery", "kombu", "PyMongo", "broker", "passed", "skipped", "failed")


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """A table for a terminal."""
    table = Table("cell", *_COLUMNS)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    return table


def as_markdown(outcomes: Sequence[Outcome], date: str) -> str:
    """The table of docs/versions.md."""
    lines = [f"| cell, on {date} | {' | '.join(_COLUMNS)} |", f"|---{'|---' * len(_COLUMNS)}|"]
    lines += [f"| {' | '.join(_row(outcome))} |" for outcome in outcomes]
    return "\n".join(lines)


def record(outcomes: Sequence[Outcome], date: str, page: Path) -> None:
    """Write the table into a page, between its two marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{as_markdown(outcomes, date)}\n{END}{after}", encoding="utf-8")


def as_json(outcomes: Sequence[Outcome]) -> str:
    """One object: `cells`, a list with what each of them came to."""
    return json.dumps({"cells": [_plain(outcome) for outcome in outcomes]}, indent=2)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "cell": outcome.cell.name, "good": outcome.good}


def _row(outcome: Outcome) -> list[str]:
    cell, found = outcome.cell, outcome.versions
    if outcome.missing:
        return [f"`{cell.name}`", f"not run: {outcome.missing}", *[""] * (len(_COLUMNS) - 1)]
    broker = f"Redis {found['redis-server']}" if cell.broker == "redis" else f"RabbitMQ, {cell.broker} queues"
    ran = (found["python"], found["mongod"], found["celery"], found["kombu"], found["pymongo"], broker)
    return [f"`{cell.name}`", *ran, str(outcome.passed), str(len(outcome.skipped)), str(len(outcome.failed))]
