"""The command line of the versions."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from rich.console import Console

from tests.versions.environment import PROJECT, fingerprint
from tests.versions.matrix import CELLS, SHORT
from tests.versions.report import as_json, as_table, is_done, keep, kept, record
from tests.versions.run import Outcome, run_cell

PAGE = PROJECT / "tests" / "versions" / "README.md"
_FOLDER = Path(tempfile.gettempdir()) / "mongo_celery_versions"


@click.command()
@click.argument("cells", nargs=-1, type=click.Choice(list(CELLS)))
@click.option("--short", is_flag=True, help="The oldest and the newest of everything, and a few files of tests.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=_FOLDER,
    show_default=True,
    help="For servers, environments and outputs; kept, so that a second run needs no network.",
)
@click.option("-n", "processes", default="2", show_default=True, help="Processes of pytest, or `auto`.")
@click.option("-k", "chosen", help="As pytest takes it; then nothing is kept for `--record`.")
@click.option("--resume", is_flag=True, help="Leave out cells that have run well with package and tests as they are.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--record", "wants_record", is_flag=True, help="Write what all have last come to into tests/versions/README.md."
)
def versions(
    cells: tuple[str, ...],
    short: bool,
    folder: Path,
    processes: str,
    chosen: str | None,
    resume: bool,
    wants_json: bool,
    wants_record: bool,
) -> None:
    """
    Run the core of the tests against every version that is promised, or those CELLS that are named.

    Each cell has an environment and servers of its own, from the package index and from Debian's archive; nothing is
    installed on the machine. Ends with 1 if a test failed or a cell that was named could not be run.
    """
    names = cells or (SHORT if short else tuple(CELLS))
    arguments = ("-n", processes, *(("-k", chosen) if chosen else ()))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    for name in names:
        files = fingerprint()
        if resume and is_done(name, folder, files):
            continue
        console.print(f"{name} ...")
        outcome = run_cell(CELLS[name], folder.absolute(), arguments)
        console.print(_sentence(outcome, folder), markup=False)
        if not chosen:
            keep(outcome, folder, files if files == fingerprint() else "changed meanwhile")
        outcomes.append(outcome)
    if wants_record:
        record(kept(folder), PAGE)
    if wants_json:
        click.echo(as_json(outcomes))
    else:
        Console(width=None).print(as_table(outcomes))
    if any(not outcome.good and (cells or not outcome.missing) for outcome in outcomes):
        raise SystemExit(1)


def _sentence(outcome: Outcome, folder: Path) -> str:
    if outcome.missing:
        return f"  not run: {outcome.missing}"
    counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    failed = "".join(f"\n    {name}" for name in outcome.failed[:20])
    return f"  {counts} in {outcome.seconds:.0f} s; {folder}/{outcome.cell.name}.txt{failed}"
