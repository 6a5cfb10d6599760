"""`python -m tests.mutants`: break each rule in a copy of the checkout, and run the tests that must fail then."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tests.fixtures.forked import ROOT
from tests.mutants.mutants import MUTANTS, PROMISES, Mutant

_COPIED = ("mongo_celery", "tests", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
_SECONDS_MAX = 600.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """
    What became of a mutant.

    Args:
        broken: the tests that have failed.
        survived: those that should have.
        seconds: how long that took.
    """

    mutant: Mutant
    broken: Sequence[str]
    survived: Sequence[str]
    seconds: float


@click.command()
@click.option("--only", help="Those of which promises or rule contain this text.")
@click.option("--check", is_flag=True, help="Only look whether each rule is where its mutant expects it.")
def mutate(only: str | None, *, check: bool) -> None:
    """Break one rule after the other. Exit status 1: a test passes that should fail, or fails without a mutant."""
    chosen = [each for each in MUTANTS if only is None or only in f"{each.promises} {each.rule}"]
    lost = [each.rule for each in chosen if (ROOT / "mongo_celery" / each.file).read_text().count(each.old) != 1]
    lost += sorted(PROMISES.keys() - {name for each in MUTANTS for name in each.promises.split()})
    for rule in lost:
        click.echo(f"It is not in the code, or not once, or has no mutant: {rule}", err=True)
    if lost or check:
        sys.exit(bool(lost))
    with tempfile.TemporaryDirectory(prefix="mongo-celery-mutants-") as directory:
        copy = Path(directory)
        for name in _COPIED:
            _copy(ROOT / name, copy / name)
        unsound = run_tests(copy, sorted({test for each in chosen for test in each.tests}))
        if unsound:
            click.echo(f"These fail without a mutant: {', '.join(unsound)}", err=True)
            sys.exit(1)
        outcomes = list(_try_all(copy, chosen))
    click.echo("\n".join(describe(outcomes)))
    sys.exit(any(each.survived for each in outcomes))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _try_all(copy: Path, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
    for each in mutants:
        began, file = time.monotonic(), copy / "mongo_celery" / each.file
        text = file.read_text()
        file.write_text(text.replace(each.old, each.new))
        failed = run_tests(copy, each.tests)
        file.write_text(text)
        broken, survived = ([test for test in each.tests if (test in failed) is is_so] for is_so in (True, False))
        yield Outcome(each, broken, survived, time.monotonic() - began)
        click.echo(f"{each.promises}: {each.rule}: {'survived' if survived else 'caught'}", err=True)


def run_tests(directory: Path, tests: Sequence[str]) -> set[str]:
    """Run tests in a copy of the checkout, and return those that fail. All, if they do not end."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "0", "-rfE", "-m", ""]
    environment = ["env", f"PYTHONPATH={directory}"]
    try:
        done = subprocess.run(
            [*environment, *command, *tests],
            check=False,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=_SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return set(tests)
    failed = {each.partition("[")[0] for each in _FAILED.findall(done.stdout)}
    return failed if done.returncode in (0, 1) else set(tests)


def describe(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a table, as the page has it."""
    yield "| promise | broken rule | tests that fail |"
    yield "|---|---|---|"
    for mutant, broken, survived, _ in outcomes:
        tests = [*(f"`{each}`" for each in broken), *(f"**not** `{each}`" for each in survived)]
        names = ", ".join(f"{name} {PROMISES[name]}" for name in mutant.promises.split())
        yield f"| {names} | {mutant.rule} | {', '.join(tests)} |"


if __name__ == "__main__":
    mutate()
