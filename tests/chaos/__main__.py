"""`python -m tests.chaos`."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click

from tests.chaos.broken import BROKEN, directed
from tests.chaos.facts import Plan
from tests.chaos.plan import draw
from tests.chaos.run import BROKEN_REST_SECONDS, run

_EVIDENCE = "mongo-celery-chaos-"
_SENTENCES = 5


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
    caught = [_run(plan, keep=keep, is_broken=broken is not None) for plan in plans]
    if not all(caught):
        raise SystemExit(1)


def _run(plan: Plan, *, keep: bool, is_broken: bool) -> bool:
    directory, began = Path(tempfile.mkdtemp(prefix=_EVIDENCE)), time.monotonic()

    def say(line: str) -> None:
        click.echo(f"[{time.monotonic() - began:6.1f}] {line}", err=True)

    say(f"{'broken build' if is_broken else 'seed'} {plan.seed}, in {directory}")
    if is_broken:
        judgement = run(plan, directory, say, broken=str(plan.seed), rest=BROKEN_REST_SECONDS)
    else:
        judgement = run(plan, directory, say)
    click.echo(f"{plan.seed}: {', '.join(f'{count:,} {name}' for name, count in judgement.counts.items())}")
    for promise, sentences in judgement.wrong.items():
        for sentence in sentences[:_SENTENCES]:
            click.echo(f"  {promise}: {sentence}")
        if len(sentences) > _SENTENCES:
            click.echo(f"  {promise}: and {len(sentences) - _SENTENCES} more")
    is_right = judgement.good is not is_broken
    click.echo(f"{plan.seed}: {'right' if is_right else 'WRONG'}")
    if keep or not is_right:
        click.echo(f"{plan.seed}: the evidence is in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return is_right


if __name__ == "__main__":
    chaos()
