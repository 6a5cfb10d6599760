"""`celery -A app changes`: look at a bridge and act on its partitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli import dead_letters, positions
from mongo_celery.cli.apps import (
    BRIDGE,
    JSON,
    REASON,
    YES,
    FiniteRange,
    console_of,
    one_bridge,
    one_sentence_errors,
    say,
)
from mongo_celery.cli.forget import forget
from mongo_celery.cli.grants import grants
from mongo_celery.cli.health import bridges_of, health, line_of
from mongo_celery.cli.snapshot import snapshot
from mongo_celery.cli.status import status
from mongo_celery.cli.top import top

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.commands import CommandResult
    from mongo_celery.bridge.wiring import Wiring

_SMALL_EVENT = 1000
"""Characters up to which a change is shown before it is skipped."""
_REASONS = 5
"""Partitions whose reason is said when a command did not fit them."""

PARTITION = click.option("--partition", type=click.IntRange(min=0), metavar="N", help="One partition only.")
SUBSCRIPTION = click.argument("subscription", required=False)


@click.group()
@click.pass_context
@handle_preload_options
def changes(ctx: click.Context, **_: Any) -> None:
    """Show and steer the change bridges of an app."""
    del ctx


changes.add_command(dead_letters.dead_letters)
changes.add_command(dead_letters.set_aside)
changes.add_command(grants)
changes.add_command(health)
changes.add_command(forget)
changes.add_command(positions.history)
changes.add_command(positions.rewind)
changes.add_command(snapshot)
changes.add_command(status)
changes.add_command(top)


# -- queues ----------------------------------------------------------------------------------------


@changes.command()
@BRIDGE
@JSON
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only those of this group; may be repeated.")
@click.option("--without-group", is_flag=True, help="Only, or also, those of handlers without a group.")
@click.option("--with-default", is_flag=True, help="Add the app's default queue.")
@click.pass_context
def queues(
    ctx: click.Context,
    bridge: str | None,
    as_json: bool,
    groups: tuple[str, ...],
    without_group: bool,
    with_default: bool,
) -> None:
    """
    Print the queues for workers that serve only changes.

    They stand on one line, separated by commas:

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues)"

    A worker without -Q consumes these queues and the default queue; so do workers that get
    --with-default. Without it the app's default queue is left out, because -Q is for workers that keep
    changes and other tasks apart. Several bridges share the line; --bridge names one.

    Handlers with group="slow" have queues of their own, and so may have workers of their own:

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues --group slow)"
    celery -A shop worker \\
      -Q "$(celery -A shop changes queues --without-group --with-default)"
    """  # noqa: D301 - \b is click's, and no part of the text
    bridges = bridges_of(ctx, bridge)
    default = [str(bridges[0].app.conf.task_default_queue)] if with_default else []
    chosen: set[str | None] = {*groups, None} if without_group else set(groups)
    with one_sentence_errors():
        _check_groups(bridges, chosen)
        names = {each.name: _queues_of(each, chosen) for each in bridges}
    if as_json:
        for name, found in names.items():
            click.echo(json.dumps({"bridge": name, "queues": [*found, *default]}))
    else:
        say(",".join([*(queue for found in names.values() for queue in found), *default]))


def _check_groups(bridges: Sequence[Wiring], groups: Collection[str | None]) -> None:
    """What no handler is in is refused: with nothing behind its -Q a worker would consume everything."""
    known = {group for each in bridges for group in each.groups}
    for group in groups:
        if group not in known:
            named = ", ".join(sorted(filter(None, known)))
            asked = "no handler is without a group" if group is None else f"no handler is in group {group!r}"
            raise click.ClickException(f"{asked}: {f'the groups are {named}' if named else 'none has one'}.")


def _queues_of(wiring: Wiring, groups: Collection[str | None]) -> list[str]:
    """The bridge's queues of these groups; of all where none is named."""
    if not groups:
        return wiring.queue_names
    return [queue for group in wiring.groups if group in groups for queue in wiring.options.queue_names(group)]


# -- pause, resume, retry --------------------------------------------------------------------------


def _of_partitions(function: Callable[..., None]) -> click.Command:
    """A command on one partition, on those of one subscription, or on all of a bridge."""
    for parameter in (click.pass_context, JSON, BRIDGE, REASON, PARTITION, SUBSCRIPTION):
        function = parameter(function)
    return changes.command()(function)


@_of_partitions
def pause(ctx: click.Context, /, subscription: str | None, **given: Any) -> None:
    """
    Let no new handler start.

    Those that run may finish, and nothing is lost: what a longer pause holds back is stored. Without
    SUBSCRIPTION all of the bridge.
    """
    from mongo_celery.bridge.operations import commands

    paused = _command(ctx, commands.pause, "paused", subscription, **given)
    if paused and not given["as_json"]:
        line = line_of(ctx, one_bridge(ctx, given["bridge"]))
        if given["partition"] is not None:
            cure = line.on("resume", paused[0].subscription, [paused[0].index])
        else:
            cure = line.changes("resume", *([subscription] if subscription is not None else []))
        say(f"To let it flow again: {cure}")


@_of_partitions
def resume(ctx: click.Context, /, subscription: str | None, **given: Any) -> None:
    """Let paused partitions flow again. Without SUBSCRIPTION all of the bridge."""
    from mongo_celery.bridge.operations import commands

    _command(ctx, commands.resume, "resumed", subscription, **given)


@_of_partitions
def retry(ctx: click.Context, /, subscription: str | None, **given: Any) -> None:
    """
    Run halted and parked changes again at once.

    Their attempts are counted anew. Without SUBSCRIPTION all halted and parked partitions of the bridge whose handler
    this app has: the others would wait for ever.
    """
    from mongo_celery.bridge.operations import commands

    _command(ctx, commands.retry, "retried", subscription, **given)


def _command(
    ctx: click.Context,
    run: Callable[..., list[CommandResult]],
    past: str,
    subscription: str | None,
    *,
    partition: int | None,
    reason: str | None,
    bridge: str | None,
    as_json: bool,
) -> list[CommandResult]:
    """Run it, and say what it did; returns what was done."""
    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        results = run(chosen, subscription, partition, reason=reason)
    _show_results(chosen.name, past, results, as_json)
    if any(each.result == "refused" for each in results):
        ctx.exit(1)
    return [each for each in results if each.result == "done"]


def _show_results(bridge: str, past: str, results: Sequence[CommandResult], as_json: bool) -> None:
    from mongo_celery.quantities import number

    done = [each for each in results if each.result == "done"]
    if as_json:
        from dataclasses import asdict

        click.echo(json.dumps({"bridge": bridge, past: len(done), "partitions": [asdict(each) for each in results]}))
        return
    left = [
        each
        for each in results
        if each.result == "refused" or (each.result == "unfit" and each.state in {"halted", "retrying"})
    ]
    for each in left[:_REASONS]:
        say(each.reason)
    if left[_REASONS:]:
        more = number(len(left) - _REASONS, "more partition was", "more partitions were")
        say(f"{more} left as they are; --json has the reason of each.")
    if not done:
        looked = number(len(results), "partition was", "partitions were")
        say(f"Nothing to do: {looked} looked at, and none had to be {past}.")
    for subscription in sorted({each.subscription for each in done}):
        indexes = ", ".join(str(each.index) for each in done if each.subscription == subscription)
        say(f"{subscription}: {past} {indexes}")


# -- head, skip ------------------------------------------------------------------------------------


@changes.command()
@click.argument("subscription")
@click.argument("partition", type=click.IntRange(min=0))
@click.option(
    "--bytes",
    "most",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    metavar="N",
    help="Show no more of the change than this; 0 for all of it. With --json it is whole.",
)
@BRIDGE
@JSON
@click.pass_context
def head(ctx: click.Context, subscription: str, partition: int, most: int, bridge: str | None, as_json: bool) -> None:
    """
    Show the change at which a partition stands.

    The one that halted it, or the first one that is stored: with its error, its counts, and its bytes as
    extended JSON. These are a document's contents: mind who sees them.
    """
    from mongo_celery.bridge.operations.heads import read_head

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_head(chosen, subscription, partition)
    if as_json:
        from dataclasses import asdict

        click.echo(json.dumps({"bridge": chosen.name, **asdict(found)}))
        return
    from mongo_celery.cli.head_view import head_lines

    for line in head_lines(found, most or None):
        say(line)


@changes.command()
@SUBSCRIPTION
@click.option("--partition", type=click.IntRange(min=0), metavar="N", required=True, help="The halted partition.")
@BRIDGE
@JSON
@click.option("--discard", is_flag=True, help="Keep nothing of the change.")
@REASON
@YES
@click.pass_context
def skip(
    ctx: click.Context,
    subscription: str | None,
    partition: int,
    bridge: str | None,
    as_json: bool,
    discard: bool,
    reason: str | None,
    yes: bool,
) -> None:
    """
    Pass over the change that halted a partition.

    It will not be handled, and is kept as a dead letter, unless it is to be discarded. SUBSCRIPTION may be left out
    where the bridge has only one.
    """
    from mongo_celery.bridge.operations import commands, heads
    from mongo_celery.cli.head_view import head_lines

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        head = heads.read_halted(chosen, subscription, partition)
    for line in head_lines(head, _SMALL_EVENT):  # to standard error: it may be the only trace of the change
        say(line, err=True)
    if not yes:
        question = "Pass over this change, and keep nothing of it?" if discard else "Pass over this change?"
        click.confirm(question, abort=True, err=True)
    with one_sentence_errors():
        result = commands.skip(chosen, head.subscription, partition, token=head.token, discard=discard, reason=reason)
    _show_results(chosen.name, "skipped", [result], as_json)


# -- the bridge as a whole -------------------------------------------------------------------------


@changes.command("rotate-key")
@click.option(
    "--overlap",
    type=FiniteRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the old key is accepted afterwards; 0 where others may know it.",
)
@REASON
@BRIDGE
@JSON
@click.pass_context
def rotate_key(ctx: click.Context, overlap: float, reason: str | None, bridge: str | None, as_json: bool) -> None:
    """
    Exchange the key by which messages are signed.

    Nothing stalls: workers know the new key before it is used, and what was signed with the old one is
    accepted for the overlap. What waits longer is dispatched again.
    """
    from mongo_celery.bridge.operations import lease_commands

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        at = lease_commands.rotate_key(chosen, overlap, reason=reason)
    if as_json:
        click.echo(json.dumps({"bridge": chosen.name, "in_force_at": at.isoformat(), "overlap_seconds": overlap}))
        return
    say(
        f"{chosen.name}: a new key is announced; the listener signs with it from {at:%H:%M:%S} UTC on. The old one is "
        f"accepted for {overlap:.0f} s after that."
    )


# -- go-on -----------------------------------------------------------------------------------------


@changes.command("go-on")
@click.argument("subscription")
@click.option(
    "--from",
    "policy",
    type=click.Choice(["oldest", "now"]),
    required=True,
    help="At the oldest entry of the oplog, or at this moment.",
)
@BRIDGE
@JSON
@REASON
@YES
@click.pass_context
def go_on(
    ctx: click.Context,
    subscription: str,
    policy: str,
    bridge: str | None,
    as_json: bool,
    reason: str | None,
    yes: bool,
) -> None:
    """
    Let a subscription go on that has lost its history.

    What lies between its place and there cannot be read any more, or is not read, and will not be handled; what was
    read and is stored runs all the same. A listener continues there within a second, or the next one when it starts.
    Partitions that are halted or paused stay so.
    """
    from mongo_celery.bridge.operations import going_on
    from mongo_celery.quantities import moment

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        lost = going_on.read_lost(chosen, subscription)
    say(f"{subscription} stands at {moment(lost.at.as_datetime().isoformat())}", err=True)
    say(f"  {lost.error}", err=True)
    if lost.stored:
        indexes = ", ".join(str(index) for index in lost.stored)
        say(f"  what is stored of its partitions {indexes} runs all the same", err=True)
    if not yes:
        click.confirm("Give up what it has not read?", abort=True, err=True)
    with one_sentence_errors():
        at = going_on.go_on(chosen, lost, policy, reason=reason).as_datetime().isoformat()
    if as_json:
        click.echo(json.dumps({"bridge": chosen.name, "subscription": subscription, "from": policy, "at": at}))
    else:
        say(f"{subscription} continues at {moment(at)} ({policy}); without a listener, when one starts")


# -- check -----------------------------------------------------------------------------------------


@changes.command()
@BRIDGE
@JSON
@click.pass_context
def check(ctx: click.Context, bridge: str | None, as_json: bool) -> None:
    """
    Look at everything that a bridge needs, and at how it is.

    MongoDB, rights, oplog, sources, broker, workers and settings, then the reasons of the verdict on what is stored.
    Takes some seconds, changes nothing, and ends with status 1 if anything is wrong: an error, or a reason that is
    failing.
    """
    from mongo_celery.bridge.operations.preflight import check as preflight

    failed = False
    for each in bridges_of(ctx, bridge):
        with one_sentence_errors():
            findings = preflight(each, line_of(ctx, each))
        wrong = any(finding.severity == "failing" for finding in findings)
        failed = failed or wrong
        if as_json:
            from dataclasses import asdict

            found = [asdict(finding) for finding in findings]
            click.echo(json.dumps({"bridge": each.name, "ok": not wrong, "findings": found}))
        else:
            from mongo_celery.cli.check_view import check_view

            console_of(ctx).print(check_view(each.name, findings), crop=False)
    ctx.exit(1 if failed else 0)
