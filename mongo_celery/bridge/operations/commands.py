"""
An operator's commands on partitions: pause, resume, retry, skip.

Each command reads its partitions for the plan, and writes only if they have not changed. So a command never acts on a
change that its operator has not seen, and two operators cannot undo each other's work unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bson.errors import BSONError
from pymongo.errors import DocumentTooLarge, OperationFailure, PyMongoError

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.existing import dead_letter_name
from mongo_celery.bridge.operations.acts import Act, PartResult, Step, reached, refuse_partition, refuse_unknown
from mongo_celery.bridge.operations.lookups import event_as_json
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.dead_letters import SKIPPED, Place, dead_letter, iterate_forms
from mongo_celery.bridge.state.partitions import Image, Partitions, visible_state
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import is_out_of_reach, layouts_in_force, parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.plan import Plan
from mongo_celery.quantities import number

_SENTENCES = 5
"""Number of displayed objections if a command does not fit partitions."""
_EVENT_CHARS = 1000
"""Number of displayed characters of a change before it is skipped."""
_HALTED = (
    "{handler}, partition {partition}, halted at change {number}: {key}",
    "  resume token: {token}",
    "  halted by: {error}",
)
UNSERVED = (
    "has no handler in this app, so nothing would run it. Import the module with its @bridge.on_change function, for "
    "example with include=[...] of the Celery app, or use -A with the app that has it. Then repeat the command"
)
_GONE = (
    "is halted at a change that is neither stored nor in the oplog, so it cannot run again. `status` shows its key. "
    "Repair its effects manually, then skip it with --discard"
)
_NOT_STORED = (
    "is halted at a change that is not stored yet, so a dead letter could not keep its content. A listener stores it "
    "`spill_after` seconds after it has read it. Repeat the command then, or discard the change: `{command}`"
)
_LOCKED = (
    "is locked by an open transaction, most often that of a worker that died. By default the server ends it within a "
    "minute. Then repeat the command"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionResult(PartResult):
    """
    The effect of a command on one partition.

    Attributes:
        state: the partition's state afterwards, as far as known.
    """

    partition: int
    state: str


@dataclass(frozen=True, slots=True)
class _Command:
    """
    A command on partitions.

    Attributes:
        done: participle of the command, for messages.
        after: state of the partition afterwards.
        fits: returns True if the command fits a partition.
        write: performs the command. Returns False if the partition has moved since it was read.
        idle: reason why it does not fit a flowing partition. Only for commands on a blocking change.
        undo: the command that reverses it.
    """

    done: str
    after: str
    fits: Callable[[Image], bool]
    write: Callable[[Partitions, Image], bool]
    idle: str = ""
    undo: str = ""

    def judge(self, image: Image, unable: str | None = None) -> PartitionResult:
        """Return the result for a partition as read. `unable` is the reason why nothing would run its change."""
        if self.fits(image):
            return self.report(image, "planned") if unable is None else self.report(image, "unfit", unable)
        if not self.idle and image.state == self.after:
            return self.report(image, "unchanged", f"is {self.after} already")
        is_busy = image.live or image.handled is not None
        objections = {
            "flowing": "is running at this moment. Repeat the command if it halts" if is_busy else self.idle,
            "halted": "is halted at a change that failed. Retry the change, or skip it",
            "paused": "is paused. Resume it first",
        }
        gone = "is no longer used, because its handler was repartitioned. Repeat the command"
        return self.report(image, "unfit", objections.get(image.state, gone))

    def report(self, image: Image, result: Any, reason: str = "") -> PartitionResult:
        """Return the effect on a partition."""
        return PartitionResult(
            handler=image.subscription,
            partition=image.index,
            state=self.after if result == "done" else visible_state(image),
            result=result,
            reason=reason if not reason or reason.endswith(".") else _make_sentence(image, reason),
        )

    def name_seen(self, image: Image) -> str:
        """Name a fitting partition with its state. A command on a change also names the change."""
        change = f":{image.committed}:{(image.head or {}).get('resumeToken', {}).get('_data', '')}" if self.idle else ""
        return f"{image.subscription}/{image.index}:{image.state}{change}"


_COMMANDS = {
    "pause": _Command("paused", "paused", lambda image: image.state == "flowing", Partitions.pause, undo="resume"),
    "resume": _Command("resumed", "flowing", lambda image: image.state == "paused", Partitions.resume),
    "retry": _Command(
        "retried",
        "flowing",
        lambda image: image.state == "halted" or (image.state == "flowing" and image.parked),
        Partitions.retry,
        "has nothing to retry, because it is neither halted nor retrying",
    ),
}
"""Commands for all handlers, by name."""


def plan_command(act: Act, handler: str | None, partition: int | None) -> Plan:
    """Plan to pause, resume or retry partitions, as in `Operations`."""
    command = _COMMANDS[act.name]
    with reached(act.wiring) as store:
        images = _choose_partitions(act, store, handler, partition)
        unable: dict[tuple[str, int], str] = {}
        if command.idle:
            unable = _find_unable(act, images, handler)
            command = replace(command, write=partial(_mark_and_retry, act.wiring.store))
    question = f"{act.name.capitalize()} every handler of bridge {act.wiring.name}?" if handler is None else None
    return _plan_on_partitions(act, command, images, partition, unable, question=question)


def plan_skip(act: Act, handler: str, partition: int | None, *, discard: bool) -> Plan:
    """Plan to move the changes of halted partitions to the dead letters, as in `Operations.skip`."""
    command = _Command(
        "skipped",
        "flowing",
        lambda image: image.state == "halted" and image.head is not None,
        Partitions.discard if discard else partial(_keep_change, act),
        "is not halted. Only the change at which a partition is halted can be skipped",
    )
    with reached(act.wiring) as store:
        images = _choose_partitions(act, store, handler, partition)
        heads = [(image, image.head) for image in images if command.fits(image) and image.head is not None]
        changes = [_fetch_halted(store, image) for image, _ in heads]
    count = number(len(heads), "halted change", "halted changes")
    question = f"Discard {count} permanently?" if discard else f"Move {count} to the dead letters?"
    halted = [
        {
            "handler": image.subscription,
            "partition": image.index,
            "number": image.committed + 1,
            "key": head["key"],
            "token": token_data(head["resumeToken"]),
            "error": image.error or "unknown",
        }
        for image, head in heads
    ]
    return _plan_on_partitions(
        act,
        command,
        images,
        partition,
        {},
        lines=[line.format_map(each) for each in halted for line in _HALTED],
        contents=[line for each in changes for line in _show_change(each)],
        fields={"halted": halted},
        question=question if heads else None,
    )


def _choose_partitions(act: Act, store: Store, handler: str | None, partition: int | None) -> Sequence[Image]:
    """Return the partitions for a command."""
    layouts = layouts_in_force(store.subscriptions.read_all())
    if not layouts or (handler is not None and handler not in layouts):
        raise refuse_unknown(act.wiring, handler or "", layouts)
    if partition is not None and handler is None and len(layouts) != 1:
        raise CommandRefusedError(f"Name the handler of partition {partition} too. Handlers: {', '.join(layouts)}.")
    chosen = [handler] if handler is not None else list(layouts)
    found = store.partitions.of({name: layouts[name].term for name in chosen})
    images = [each for each in found if partition in (None, each.index)]
    if partition is not None and not images:
        raise refuse_partition(chosen[0], partition, layouts[chosen[0]])
    return sorted(images, key=lambda image: (image.subscription, image.index))


def _make_sentence(image: Image, text: str) -> str:
    return f"Partition {image.index} of {image.subscription} {text}."


def _plan_on_partitions(
    act: Act,
    command: _Command,
    images: Sequence[Image],
    partition: int | None,
    unable: Mapping[tuple[str, int], str],
    **given: Any,
) -> Plan:
    """Plan a command on partitions as read. A named partition must fit."""

    def check(part: PartitionResult) -> PartitionResult:
        if partition is not None and part.result in {"unfit", "refused"}:
            raise CommandRefusedError(part.reason)
        return part

    def write(image: Image) -> PartitionResult:
        try:
            return check(_apply_command(act.wiring.store.partitions, command, image))
        except PyMongoError as error:
            if partition is not None or not is_lock(error):
                raise
            return command.report(image, "refused", _LOCKED)  # the others continue

    steps: list[Step] = []
    seen = []
    for image in images:
        part = check(command.judge(image, unable.get((image.subscription, image.index))))
        is_planned = part.result == "planned"
        steps.append((part, partial(write, image) if is_planned else None))
        seen += [command.name_seen(image)] if is_planned else []

    def describe(parts: Sequence[PartitionResult]) -> list[str]:
        lines = _describe_results(command.done, parts)
        if command.undo and any(each.result == "done" for each in parts):
            lines.append(f"To {command.undo}: {act.line.changes(command.undo, *act.list_words())}")
        return lines

    return act.plan_parts("partitions", lambda: steps, describe, seen=" ".join(seen), **given)


def _apply_command(partitions: Partitions, command: _Command, image: Image) -> PartitionResult:
    """Write the plan if the partition has not changed. Otherwise describe the change."""
    try:
        if command.write(partitions, image):
            return command.report(image, "done")
    except CommandRefusedError as error:  # the others continue
        return command.report(image, "refused", str(error))
    for now in partitions.look([image.id]):
        judged = command.judge(now)
        if judged.result != "planned":
            return judged if judged.result == "unchanged" else replace(judged, result="refused")
    return command.report(
        image,
        "refused",
        "has changed meanwhile, so it is left as it is. Check it with `status`, then repeat the command",
    )


def _describe_results(done: str, results: Sequence[PartitionResult]) -> list[str]:
    """Return the reasons why some partitions do not change, then one line per handler about the others."""
    indexes: dict[tuple[str, str], list[int]] = {}
    for each in results:
        if each.result in {"done", "planned"}:
            word = done if each.result == "done" else f"would be {done}"
            indexes.setdefault((each.handler, word), []).append(each.partition)
    lines = [
        f"{handler}: {'partition' if len(found) == 1 else 'partitions'} {', '.join(map(str, found))} {word}"
        for (handler, word), found in indexes.items()
    ]
    left = [each.reason for each in results if each.result == "unfit" and each.state in {"halted", "retrying"}]
    if left[_SENTENCES:]:
        more = number(len(left) - _SENTENCES, "more partition", "more partitions")
        left[_SENTENCES:] = [f"{more} left unchanged. `--json` shows the reason for each."]
    if not lines:
        lines = [f"Nothing to do: none of {number(len(results), 'partition', 'partitions')} can be {done} now."]
    return left + lines


def _show_change(change: StoredChange | None) -> list[str]:
    """Return the lines of a stored change, truncated."""
    event = event_as_json(None if change is None else change.raw)["event"]
    if event is None:
        return []
    text = json.dumps(event, indent=2, ensure_ascii=False)
    more = len(text) - _EVENT_CHARS
    return [*text[:_EVENT_CHARS].split("\n"), *([f"... and {more} characters more"] if more > 0 else [])]


def _fetch_halted(store: Store, image: Image) -> StoredChange | None:
    """Return the change at which a partition halted. None if it is not stored."""
    assert image.head is not None, "only a halted partition has a halted change"
    data = token_data(image.head["resumeToken"])
    return store.backlog.fetch(image.id, [data]).get(data)


def _keep_change(act: Act, partitions: Partitions, image: Image) -> bool:
    """Make a dead letter of a halted change, in the first form that can be stored."""
    wiring, store = act.wiring, act.wiring.store
    assert image.head is not None, "only a halted partition has a halted change"
    token = image.head["resumeToken"]
    change = _fetch_halted(store, image)
    if change is None:
        command = act.line.changes("skip", image.subscription, str(image.index), "--discard")
        raise CommandRefusedError(_make_sentence(image, _NOT_STORED.format(command=command)))
    *fuller, last = iterate_forms(change.raw)
    for form in (*fuller, last):
        letter = dead_letter(
            bridge=wiring.name,
            subscription=image.subscription,
            token=token,
            key=image.head["key"] if image.head["key"] != "?" else describe(change.raw),
            kept=form(),
            error=image.error or "unknown",
            traceback=partitions.read_traceback(image.id),
            attempts=int(image.retries + image.crashes) + (change.refusal is None),
            place=Place(image.partitioning, image.index, image.committed + 1, image.fencing_token, change.hash),
            cause=SKIPPED,
            name=dead_letter_name(change.data, change.raw),
            passed_over=(image.retry or {}).get("passedOver"),
        )
        try:
            return partitions.set_aside(image, letter, store.dead_letters.collection)
        except (BSONError, DocumentTooLarge, OperationFailure) as error:
            if form is last or is_transient(error):
                raise
    raise AssertionError


def _find_unable(act: Act, images: Sequence[Image], handler: str | None) -> dict[tuple[str, int], str]:
    """Return the partitions whose next change this app cannot run, with reasons. Refuse such a named handler."""
    store, served = act.wiring.store, {each.name for each in act.wiring.handlers}
    if handler is not None and handler not in served:
        raise CommandRefusedError(f"Handler {handler} {UNSERVED}.")
    found = {(image.subscription, image.index): UNSERVED for image in images if image.subscription not in served}
    for image in _find_unreachable(store, [image for image in images if image.subscription in served]):
        if _fetch_halted(store, image) is None:
            found[image.subscription, image.index] = _GONE
    return found


def _find_unreachable(store: Store, images: Sequence[Image]) -> list[Image]:
    """Return the partitions whose halted change no mark covers, no listener holds, and no stream can read any more."""
    unmarked = [
        (image, image.head["resumeToken"])
        for image in images
        if image.head is not None
        and (image.stored is None or image.stored["to"] < token_data(image.head["resumeToken"]))
    ]
    if not unmarked:
        return []
    documents = {parse_name(document): document for document in store.subscriptions.read_all()}
    lease = store.leases.read() or {}
    report = (lease.get("live") and lease.get("report")) or {}
    held = {(each["subscription"], each["partition"]) for each in report.get("held", ())}
    return [
        image
        for image, token in unmarked
        if (image.subscription, image.index) not in held
        and is_out_of_reach(documents.get(image.subscription, {}), token)
    ]


def _mark_and_retry(store: Store, partitions: Partitions, image: Image) -> bool:
    """
    Retry a partition. If only a mark lets the next listener find its stored change, set the mark first.

    The halting execution stores its change without a mark, because a listener still has it. That listener may have
    ended since the plan.
    """
    if _find_unreachable(store, [image]):
        if _fetch_halted(store, image) is None:
            if any(now.head == image.head for now in partitions.look([image.id])):
                raise CommandRefusedError(_make_sentence(image, _GONE))
            return False
        if not partitions.mark_head(image):
            return False
    return partitions.retry(image)
