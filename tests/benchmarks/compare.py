"""
`python -m tests.benchmarks.compare BASE [HEAD]`: the bench of two commits, side by side in one run.

Each round measures every mode on both commits, one after the other, so that a slower machine slows both. A difference
is outside of the noise if every round of one commit is better than every round of the other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.table import Table

from mongo_celery.bench.command import describe_machine
from mongo_celery.bench.run import MODES
from tests.benchmarks.readings import MICROSECONDS, Reading
from tests.fixtures.process import ROOT

_BENCH = "from mongo_celery.cli.tools import main; main()"
_WORDS = {True: "cheaper", False: "more expensive", None: "within the noise"}


def judge(base: Sequence[float], head: Sequence[float]) -> bool | None:
    """Return True if every round of `head` costs less than every round of `base`, False for more, None for noise."""
    if max(head) < min(base):
        return True
    return False if min(head) > max(base) else None


@click.command()
@click.argument("base")
@click.argument("head", default="HEAD")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True, help="Rounds of both commits.")
@click.option("--only", multiple=True, type=click.Choice(list(MODES)), help="Measure only this mode. May be repeated.")
@click.option("--json", "file", type=click.File("w"), help="Also write all rounds to this file.")
def compare(base: str, head: str, rounds: int, only: Sequence[str], file: TextIO | None) -> None:
    """
    Compare the processor time of a change between two commits, for each mode of `mongo-celery bench`.

    The exit status is 1 if a mode costs more, outside of the noise. All modes and five rounds take 10 minutes.
    """
    commits = [_git("rev-parse", "--short", each) for each in (base, head)]
    found: dict[str, list[Reading]] = {name: [] for name in only or MODES}
    with Console(stderr=True).status("") as status, _trees(commits) as trees:
        costs: dict[tuple[str, Path], list[float]] = {}
        for number in range(rounds):
            for tree in trees if number % 2 == 0 else trees[::-1]:
                status.update(f"round {number + 1} of {rounds}: {tree.name}")
                for name, mode in _measure(tree, only).items():
                    costs.setdefault((name, tree), []).append(mode["cpu_us"])
        for (name, tree), values in costs.items():
            found[name].append(Reading(name=tree.name, unit=MICROSECONDS, rounds=tuple(values)))
    verdicts = {name: judge(pair[0].rounds, pair[1].rounds) for name, pair in found.items()}
    _show(found, verdicts)
    if file is not None:
        modes = {name: {each.name: each.plain() for each in pair} for name, pair in found.items()}
        json.dump({"machine": describe_machine(), "base": commits[0], "head": commits[1], "modes": modes}, file)
    sys.exit(any(verdict is False for verdict in verdicts.values()))


@contextmanager
def _trees(commits: Sequence[str]) -> Iterator[list[Path]]:
    """Check out commits beside each other for the block."""
    with tempfile.TemporaryDirectory(prefix="mongo_celery_compare_") as folder:
        trees = [Path(folder) / f"{place}-{commit}" for place, commit in zip(("base", "head"), commits, strict=True)]
        try:
            for tree, commit in zip(trees, commits, strict=True):
                _git("worktree", "add", "--detach", str(tree), commit)
            yield trees
        finally:
            for tree in trees:
                _git("worktree", "remove", "--force", str(tree))


def _measure(tree: Path, only: Sequence[str]) -> dict[str, Any]:
    modes = [word for name in only for word in ("--only", name)]
    ended = subprocess.run(
        [sys.executable, "-c", _BENCH, "bench", "--rounds", "1", "--json", *modes],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    modes_found: dict[str, Any] = json.loads(ended.stdout)["modes"]
    return modes_found


def _show(found: dict[str, list[Reading]], verdicts: dict[str, bool | None]) -> None:
    columns = ("mode", "base, us", "rounds", "head, us", "rounds", "ratio", "head is")
    table = Table(*columns, title="Processor time of a change", box=None)
    for name, (base, head) in found.items():
        cells = [f"{each.value:,.0f}|{min(each.rounds):,.0f}-{max(each.rounds):,.0f}" for each in (base, head)]
        ratio = statistics.median(mine / other for other, mine in zip(base.rounds, head.rounds, strict=True))
        table.add_row(name, *"|".join(cells).split("|"), f"{ratio:.2f}", _WORDS[verdicts[name]])
    Console().print(table)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    compare()
