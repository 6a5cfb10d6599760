"""The command line of the chaos runs."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from tests.chaos.broken import BROKEN, directed
from tests.chaos.plan import Plan, draw
from tests.chaos.report import merged, show, show_caught
from tests.chaos.run import BROKEN_REST_SECONDS, run
from tests.chaos.verdict import Judgement

_EVIDENCE = "mongo-celery-chaos-"


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Of the first run's plan.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How many runs, a seed each.")
@click.option("--seconds", type=click.FloatRange(min=1), default=180.0, show_default=True, help="Of writing, a run.")
@click.option("--members", type=click.Choice(["1", "3"]), default="1", show_default=True, help="Of the replica set.")
@click.option("--broken", type=click.Choice([*BROKEN, "all"]), help="Run a build that is broken on purpose.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the plans and run nothing.")
@click.option("--keep", is_flag=True, help="Keep logs and history of good runs too.")
def chaos(
    seed: int,
    seeds: int,
    seconds: float,
    members: str,
    broken: str | None,
    only_plan: bool,
    keep: bool,
) -> None:
    """
    Let everything happen at once to a bridge under load, and judge what became of each change.

    The plan of a run is drawn from its seed. Exit status 1: a promise was broken, and the evidence is kept. With
    --broken each build has a plan of its own, and the status is 1 where one is not caught.
    """
    plans = [draw(each, seconds, int(members)) for each in range(seed, seed + seeds)]
    if broken is not None:
        plans = [directed(name) for name in (BROKEN if broken == "all" else [broken])]
    if only_plan:
        for plan in plans:
            click.echo("\n".join(plan.lines()))
        return
    console = Console(width=120)
    judgements = {str(plan.seed): _run(plan, console, keep=keep, is_broken=broken is not None) for plan in plans}
    if len(plans) > 1 and broken is None:
        show(merged(list(judgements.values())), console)
    if broken is not None:
        show_caught(judgements, console)
    if any(judgement.good is (broken is not None) for judgement in judgements.values()):
        raise SystemExit(1)


def _run(plan: Plan, console: Console, *, keep: bool, is_broken: bool) -> Judgement:
    directory, began = Path(tempfile.mkdtemp(prefix=_EVIDENCE)), time.monotonic()

    def say(line: str) -> None:
        click.echo(f"[{time.monotonic() - began:6.1f}] {line}", err=True)

    say(f"{'broken build' if is_broken else 'seed'} {plan.seed}, in {directory}")
    judgement = (
        run(plan, directory, say, broken=str(plan.seed), rest=BROKEN_REST_SECONDS)
        if is_broken
        else run(plan, directory, say)
    )
    show(judgement, console)
    if keep or judgement.good is is_broken:
        click.echo(f"{plan.seed}: the evidence is in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return judgement
