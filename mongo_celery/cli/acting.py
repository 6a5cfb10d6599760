"""The common form of commands that change state: show a plan, ask, run it, and report the result."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, REASON, YES, one_bridge, one_sentence_errors, say
from mongo_celery.plan import Plan

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.operations import Operations

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the plan, or its result.")
HANDLER = click.argument("handler")


class PartitionIndex(click.IntRange):
    """The number of a partition."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a value from the command line to the number of a partition."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            from mongo_celery.command_line import CommandLine

            app = ctx.find_root().params.get("app") if ctx is not None else None
            line = CommandLine(app) if isinstance(app, str) else CommandLine()
            listed = line.changes("status", "--all")
            text = f"{value!r} is not a partition. Partitions are numbered from 0. To see them, run: {listed}"
            raise click.BadParameter(text, ctx, param) from None


PARTITION = click.argument("partition", type=PartitionIndex(min=0), required=False)


def acting_on(
    name: str, option: Callable[[Any], Any], choose: Callable[[click.Context, str | None], Any]
) -> Callable[[Callable[..., Plan]], Callable[..., None]]:
    """
    Return a decorator for commands with `--yes`, `--dry-run`, `--json`, and an option that selects the target.

    The function takes the target and its own options, and returns a plan. The command ends with status 1 if something
    was refused.

    Args:
        name: the name of the option that selects the target.
        option: the option.
        choose: returns the target.
    """

    def decorate(make_plan: Callable[..., Plan]) -> Callable[..., None]:
        @YES
        @DRY_RUN
        @option
        @JSON
        @click.pass_context
        @functools.wraps(make_plan)
        def command(ctx: click.Context, /, **given: Any) -> None:
            how = {name: given.pop(name) for name in ("yes", "dry_run", "as_json")}
            chosen = choose(ctx, given.pop(name))
            with one_sentence_errors():
                plan = make_plan(chosen, **given)
            carry_out(ctx, plan, **how)

        made: Callable[..., None] = command
        return made

    return decorate


def _choose_operations(ctx: click.Context, name: str | None) -> Operations:
    from mongo_celery.bridge.operations.operations import Operations
    from mongo_celery.cli.apps import line_of

    wiring = one_bridge(ctx, name)
    return Operations(wiring, line=line_of(ctx, wiring))


def acting(make_plan: Callable[..., Plan]) -> Callable[..., None]:
    """Make a command of a function that plans bridge operations. Add `--reason` and `--bridge`."""
    return REASON(acting_on("bridge", BRIDGE, _choose_operations)(make_plan))


def carry_out(
    ctx: click.Context,
    plan: Plan,
    *,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """
    Show a plan, ask, run it and print the result. End with status 1 if something was refused.

    The plan goes to standard error, even with `--yes`: it may be the only record of abandoned data.
    """
    is_run = plan.act is not None and not dry_run
    if not is_run and as_json:
        click.echo(json.dumps(plan.plain()))
    elif plan.question is not None or not is_run:
        for sentence in plan.refused:
            say(f"Error: {sentence}", err=True)
        for line in (*plan.lines, *plan.contents):
            say(line, err=is_run)
    result = None
    if is_run:
        if plan.question is not None and not yes:
            click.confirm(plan.question, abort=True, err=True)
        with one_sentence_errors():
            result = plan.run()
        if as_json:
            click.echo(json.dumps(plan.plain(result)))
        else:
            for sentence in result.refused:
                say(f"Error: {sentence}", err=True)
            for line in result.lines:
                say(line)
    ctx.exit(1 if (plan if result is None else result).refused else 0)
