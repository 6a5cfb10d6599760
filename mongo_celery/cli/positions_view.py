"""What is said of positions that a person moves, in lines of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.quantities import moment, number

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.forgetting import ForgetPlan
    from mongo_celery.bridge.operations.rewinding import RewindPlan
    from mongo_celery.bridge.state.positions import Moved
    from mongo_celery.command_line import CommandLine

_COLUMNS = 80
_NAMED = 10


def wrapped(text: str, indent: str = "  ") -> Iterator[str]:
    """A text over as many lines as it takes, those behind the first indented."""
    yield from textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_long_words=False) or [""]


def plan_lines(plan: RewindPlan, line: CommandLine) -> Iterator[str]:
    """What a rewind would do."""
    way = "goes forward" if plan.forward else "goes back"
    yield from wrapped(
        f"{plan.subscription} {way} to {moment(plan.to.iso)}, from {moment(plan.plain()['passed_from'] or plan.at)}"
    )
    for text in (*_counts(plan), *_ended(plan), *_left_out(plan, line)):
        yield from wrapped(f"  {text}", "    ")


def _counts(plan: RewindPlan) -> Iterator[str]:
    """Yield how many partitions move, how many are read again, and how many stay."""
    moved = [each.index for each in plan.partitions]
    stay = f"; {plan.staying} stay where they are" if plan.staying else ""
    if moved or not plan.reread:
        yield f"{number(len(moved), 'partition', 'partitions')}: {_indexes(moved)}{stay}"
    if plan.reread:
        others = number(len(plan.reread), "partition is", "partitions are")
        yield f"{others} read again from there: {_indexes(plan.reread)}. They handle what they have not handled yet"


def _ended(plan: RewindPlan) -> Iterator[str]:
    """What stands or runs in the partitions that move."""
    ends = "it is passed over" if plan.forward else "it runs again"
    for each in plan.partitions:
        if each.key is not None:
            yield f"partition {each.index} has halted at {each.key}: that ends, {ends}"
    waiting = [each.index for each in plan.partitions if each.standing in ("retrying", "waiting")]
    if waiting:
        yield f"what waits for its next try in {_indexes(waiting)} does so no longer"
    paused = [each.index for each in plan.partitions if each.standing == "paused"]
    if paused:
        yield f"paused stays paused: {_indexes(paused)}"
    running = [each.index for each in plan.partitions if each.running]
    if running:
        yield f"handlers run in {_indexes(running)} at this moment: their outcome will be refused"


def _left_out(plan: RewindPlan, line: CommandLine) -> Iterator[str]:
    """What else a person should know before."""
    if plan.key is not None:
        yield f"all keys that share a partition with {plan.key} come along"
    if plan.forward:
        stored = sum(each.stored for each in plan.partitions)
        if stored:
            yield f"{number(stored, 'stored change', 'stored changes')} at most will never be handled"
        yield "changes since then that are not handled yet will not be; a rewind to that time can run them later"
    if plan.dead_letters:
        letters = number(plan.dead_letters, "dead letter", "dead letters")
        yield f"{letters} behind it stay: discard those of changes that have succeeded then"
    if plan.documents:
        found = number(plan.documents, "of them is of an existing document", "of them are of existing documents")
        yield f"{found}, and would not run again: replay these when the handler has caught up"
    if plan.snapshots:
        yield (
            "what a snapshot has given behind it is not given again: where the handler has operations, fields or "
            f"match, targets may end at older states; `{line.changes('snapshot', plan.subscription)}` afterwards sets "
            "that right"
        )
    if plan.replays:
        yield f"{number(plan.replays, 'replay', 'replays')} of these will not be made"
    if plan.leader is not None:
        yield f"a listener leads ({plan.leader}): stop all of them first"


def rewound_lines(plan: RewindPlan, moved: Moved, line: CommandLine) -> Iterator[str]:
    """Return what a rewind has done, and the commands that may follow."""
    count = number(len(moved.partitions) + len(plan.reread), "partition", "partitions")
    way = "passed over what came before" if plan.forward else "back at"
    yield from wrapped(f"{plan.subscription}: {way} {moment(plan.to.iso)} ({count}); start a listener to go on")
    since = plan.plain()["passed_from"]
    if since is not None:
        yield "To handle what was passed over after all, while the oplog has it:"
        yield f"  {line.changes('rewind', plan.subscription, '--to', since)}"
    if any(each.stored for each in plan.partitions) and plan.forward:
        yield "Existing documents that a snapshot has stored are in no stream. To read them anew:"
        yield f"  {line.changes('snapshot', plan.subscription)}"


def holding_lines(plan: ForgetPlan) -> Iterator[str]:
    """List what is stored of a handler, before it is forgotten."""
    holdings = plan.holdings
    found = [
        number(holdings.partitions, "partition", "partitions"),
        number(holdings.stored, "document of stored changes", "documents of stored changes"),
        number(holdings.letters, "dead letter", "dead letters"),
        number(holdings.replays, "replay", "replays"),
        number(holdings.snapshots, "snapshot", "snapshots"),
    ]
    yield from wrapped(f"{plan.name} has {', '.join(found)}")


def history_lines(bridge: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield who has done what, when, with what effect and why."""
    from mongo_celery.bridge.operations.acts import effect_text

    if not records:
        yield f"{bridge}: no command has changed anything"
    for each in records:
        yield from wrapped(f"{moment(each['at'])}  {each['command']}  {each['by']}")
        yield from wrapped(f"  {effect_text(each['effect'] or {})}", "    ")
        if each["reason"]:
            yield from wrapped(f"  {each['reason']}", "    ")


def _indexes(found: Iterable[int]) -> str:
    indexes = sorted(found)
    more = f" and {len(indexes) - _NAMED} more" if len(indexes) > _NAMED else ""
    return (", ".join(map(str, indexes[:_NAMED])) or "none") + more
