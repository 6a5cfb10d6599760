"""`celery -A app changes snapshot`: give a handler the documents that exist, while the stream runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, JSON, REASON, YES, FiniteRange, one_bridge, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.snapshot_commands import PlannedSnapshot
    from mongo_celery.bridge.wiring import Wiring


_STOPPED = (
    "What was delivered stays. What is under way is delivered, unless its listener ends before: then --resume brings "
    "it."
)


@click.command()
@click.argument("handler", required=False)
@click.option("--source", "sources", multiple=True, metavar="NS", help="This collection only; may be repeated.")
@click.option("--match", metavar="JSON", help="Only documents whose event fulfils this expression, as `match=` does.")
@click.option("--rate", type=FiniteRange(min=0.01), metavar="N", help="So many documents a second at most.")
@click.option("--list", "is_list", is_flag=True, help="Show snapshots and how far they are, and begin none.")
@click.option("--stop", "stopped", metavar="ID", help="Let this one stop where it is.")
@click.option("--resume", "resumed", metavar="ID", help="Let this one, stopped or failed, go on where it is.")
@REASON
@YES
@DRY_RUN
@BRIDGE
@JSON
@click.pass_context
def snapshot(
    ctx: click.Context,
    /,
    *,
    handler: str | None,
    is_list: bool,
    stopped: str | None,
    resumed: str | None,
    reason: str | None,
    yes: bool,
    bridge: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """
    Give a handler the existing documents, between its changes.

    Each comes once, as operation type `snapshot`, exactly at its place: behind the changes that it has, before those
    that follow. It goes on across restarts, chunk by chunk; `status --watch` shows how far it is. HANDLER may be left
    out where only one can be meant.

    The collections are those that the handler watches, or those of --source. Its own `match` counts, --match narrows it
    further; `operations` and `fields` do not.
    """
    from mongo_celery.bridge.operations import snapshot_commands

    asked = [is_list, stopped is not None, resumed is not None]
    starting = any(given[name] for name in ("sources", "match", "rate", "dry_run"))
    if sum(asked) > 1 or (any(asked) and starting):
        raise click.UsageError("--list, --stop and --resume stand alone: each is a command of its own.")
    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        if is_list:
            _show_list(wiring, snapshot_commands.listed(wiring), handler, as_json)
        elif stopped is not None or resumed is not None:
            _change(wiring, stopped, resumed, reason, as_json)
        else:
            if not (yes or given["dry_run"]):
                for line in _planned_lines(snapshot_commands.start(wiring, handler, **{**given, "dry_run": True})):
                    say(line, err=True)
                click.confirm("Begin?", abort=True, err=True)
            found = snapshot_commands.start(wiring, handler, reason=reason, **given)
            _show_started(wiring, found, as_json, dry_run=given["dry_run"])


def _change(wiring: Wiring, stopped: str | None, resumed: str | None, reason: str | None, as_json: bool) -> None:
    from mongo_celery.bridge.operations import snapshot_commands
    from mongo_celery.cli.snapshot_view import progress_line

    act: Callable[..., dict[str, Any]] = snapshot_commands.stop
    chosen, after = stopped or "", _STOPPED
    if resumed is not None:
        act, chosen, after = snapshot_commands.resume, resumed, "It goes on when a listener leads."
    found = act(wiring, chosen, reason=reason)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "snapshots": [found]}))
        return
    say(progress_line(found))
    say(after)


def _show_list(wiring: Wiring, known: Sequence[dict[str, Any]], handler: str | None, as_json: bool) -> None:
    found = [each for each in known if handler in (None, each["handler"])]
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "snapshots": found}))
        return
    from mongo_celery.bridge.operations.snapshot_progress import short_names
    from mongo_celery.cli.snapshot_view import progress_line

    names = short_names(each["id"] for each in known)
    for each in found:
        say(f"{names[each['id']]}  {progress_line(each)}")
    if not found:
        say("There are no snapshots.")


def _planned_lines(found: Sequence[PlannedSnapshot]) -> Iterator[str]:
    for each in found:
        count = "an unknown number of" if each.estimated is None else f"about {each.estimated}"
        name = f"{each.id.rpartition('/')[2]}  " if each.id is not None else ""
        yield f"{name}{each.source} for {each.handler}: {count} documents"


def _show_started(wiring: Wiring, found: Sequence[PlannedSnapshot], as_json: bool, *, dry_run: bool) -> None:
    if as_json:
        from dataclasses import asdict

        answer = {"bridge": wiring.name, "dry_run": dry_run, "snapshots": [asdict(each) for each in found]}
        click.echo(json.dumps(answer))
        return
    for line in _planned_lines(found):
        say(line)
    if dry_run:
        say("Nothing was changed.")
    else:
        say("They come as soon as a listener leads; `status --watch` shows how far they are.")
