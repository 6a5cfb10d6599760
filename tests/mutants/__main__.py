"""`python -m tests.mutants`: break each rule in a copy of the checkout, and run the tests that must fail then."""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tests.fixtures.forked import ROOT
from tests.mutants.mutants import MUTANTS, PROMISES, Mutant

_COPIED = ("mongo_celery", "tests", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
_SECONDS_MAX = 1800.0
_COPIES = 2
"""Of the checkout: so many mutants are tried at a time."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)


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
    with tempfile.TemporaryDirectory(prefix="mongo-celery-mutants-") as directory, ThreadPoolExecutor(_COPIES) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(_COPIES):
            copies.put(Path(directory) / str(number))
            for name in _COPIED:
                _copy(ROOT / name, Path(directory) / str(number) / name)
        unsound = run_tests(Path(directory) / "0", sorted({test for each in chosen for test in each.tests}))
        if unsound:
            click.echo(f"These fail without a mutant: {', '.join(unsound)}", err=True)
            sys.exit(1)
        failures = list(pool.map(lambda each: _break(copies, each), chosen))
    click.echo("| promise | broken rule | tests that fail |\n|---|---|---|")
    for mutant, failed in zip(chosen, failures, strict=True):
        tests = ", ".join(f"{'' if each in failed else '**not** '}`{each}`" for each in mutant.tests)
        promises = ", ".join(f"{name} {PROMISES[name]}" for name in mutant.promises.split())
        click.echo(f"| {promises} | {mutant.rule} | {tests} |")
    sys.exit(any(not failed.issuperset(each.tests) for each, failed in zip(chosen, failures, strict=True)))


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source, target)


def _break(copies: queue.Queue[Path], mutant: Mutant) -> set[str]:
    """Break a copy that nobody has now, and return the tests that fail."""
    copy = copies.get()
    file = copy / "mongo_celery" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    failed = run_tests(copy, mutant.tests)
    file.write_text(text)
    copies.put(copy)
    survived = not failed.issuperset(mutant.tests)
    click.echo(f"{mutant.promises}: {mutant.rule}: {'survived' if survived else 'caught'}", err=True)
    return failed


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


if __name__ == "__main__":
    mutate()
