"""The one way by which commands change something: they show a plan, ask, run it, and report the result."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, JSON, REASON, YES, one_bridge, one_sentence_errors, say
from mongo_celery.plan import Plan

HANDLER = click.argument("handler")
PARTITION = click.argument("partition", type=click.IntRange(min=0), required=False)


def acting(make_plan: Callable[..., Plan]) -> Callable[..., None]:
    """
    Make a function from a bridge's operations and its own options to a plan a command.

    The command has `--reason`, `--yes`, `--dry-run`, `--bridge` and `--json`, too. It ends with status 1 if something
    was refused.
    """

    @REASON
    @YES
    @DRY_RUN
    @BRIDGE
    @JSON
    @click.pass_context
    @functools.wraps(make_plan)
    def command(ctx: click.Context, /, bridge: str | None, **given: Any) -> None:
        from mongo_celery.bridge.operations.operations import Operations
        from mongo_celery.cli.apps import line_of

        wiring = one_bridge(ctx, bridge)
        how = {name: given.pop(name) for name in ("yes", "dry_run", "as_json")}
        with one_sentence_errors():
            plan = make_plan(Operations(wiring, line=line_of(ctx, wiring)), **given)
        carry_out(ctx, plan, **how)

    made: Callable[..., None] = command
    return made


def carry_out(
    ctx: click.Context,
    plan: Plan,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    errors: Callable[[], Any] = one_sentence_errors,
) -> None:
    """
    Show a plan, ask, run it and print the result; end with status 1 if something was refused.

    What is asked about goes to standard error, also with `--yes`: it may be the only trace of what is given up.
    """
    is_run = plan.act is not None and not dry_run
    if not is_run and as_json:
        click.echo(json.dumps(plan.plain()))
    elif plan.question is not None or not is_run:
        for line in (*plan.refused, *plan.lines, *plan.contents):
            say(line, err=is_run)
    result = None
    if is_run:
        if plan.question is not None and not yes:
            click.confirm(plan.question, abort=True, err=True)
        with errors():
            result = plan.run()
        if as_json:
            click.echo(json.dumps(plan.plain(result)))
        else:
            for line in (*result.refused, *result.lines):
                say(line)
    ctx.exit(1 if (plan if result is None else result).refused else 0)
