"""
An operator's commands on partitions: pause, resume, retry, skip.

Each one reads its partitions for the plan, and writes only if what it saw still holds; where a partition has moved
meanwhile it reads once more, and then gives up. So a command never acts on a change that its operator has not seen, and
two operators cannot undo each other unseen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

from bson.errors import BSONError
from pymongo.errors import DocumentTooLarge, OperationFailure

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.existing import dead_letter_name
from mongo_celery.bridge.operations.acts import Act, reached
from mongo_celery.bridge.operations.heads import Head, choose, find_skip_objection, read_halted, sentence_on
from mongo_celery.bridge.state.dead_letters import SKIPPED, Place, dead_letter, iterate_forms
from mongo_celery.bridge.state.partitions import Image, Partitions, visible_state
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import is_out_of_reach, parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number

_ROUNDS = 2
_SENTENCES = 5
"""Partitions whose objection is shown if a command does not fit them."""
_EVENT_CHARS = 1000
"""Characters up to which a change is shown before it is skipped."""
UNSERVED = (
    "has no handler in this app, so nothing would run it: import the module with its @bridge.on_change function, for "
    "example with include=[...] of the Celery app, or name the app that has it with -A; then repeat the command"
)
_GONE = (
    "has halted at a change that can no longer be read, since its history was lost, and is not stored: `status` has "
    "its key; repair by hand what it stands for, then skip it"
)
_NOT_STORED = (
    "has halted at a change of which nothing is stored, so there is nothing to keep: a listener that has read it "
    "stores it after `spill_after` seconds, then repeat the command; or give it up with `{command}`"
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """
    The effect of a command on one partition.

    Attributes:
        state: of the partition afterwards, as far as the command knows.
        result: `planned` while it is only planned; `unchanged` where it was so already, `unfit` where its state does
            not allow the command, `refused` where it kept moving, or nothing could be kept.
        reason: why it was not done; empty where it was.
    """

    subscription: str
    index: int
    state: str
    result: Literal["planned", "done", "unchanged", "unfit", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Command:
    """
    A command on partitions.

    Attributes:
        done: its participle, for people.
        goal: the stored state in which there is nothing left to do; None where there is no such state.
        objection: why the command does not fit a partition; None if it does.
        write: False if the partition has moved since it was read.
        is_run: whether it is pointless where no handler of this app serves the partition, or its change is gone.
    """

    done: str
    goal: str | None
    objection: Callable[[Image], str | None]
    write: Callable[[Partitions, Image, int], bool]
    after: str
    is_run: bool = False


def plan_pause(act: Act, handler: str | None, partition: int | None) -> Plan:
    """Plan that no new execution begins; see `Operations.pause`."""
    command = _Command("paused", "paused", _find_pause_objection, Partitions.pause, "paused")
    plan = _plan(act, command, handler, partition, "Pause every handler of bridge {bridge}?")
    again = act.line.changes("resume", *act.list_words())

    def run() -> PlanResult:
        result = plan.run()
        return replace(result, lines=[*result.lines, f"To resume: {again}"])

    return plan if plan.act is None else replace(plan, act=run)


def plan_resume(act: Act, handler: str | None, partition: int | None) -> Plan:
    """Plan that paused partitions continue; see `Operations.resume`."""
    command = _Command("resumed", "flowing", _find_resume_objection, Partitions.resume, "flowing")
    return _plan(act, command, handler, partition, "Resume every handler of bridge {bridge}?")


def plan_retry(act: Act, handler: str | None, partition: int | None) -> Plan:
    """Plan to run the first change of halted or retrying partitions immediately; see `Operations.retry`."""
    command = _Command("retried", None, _find_retry_objection, Partitions.retry, "flowing", is_run=True)
    return _plan(act, command, handler, partition, "Retry every handler of bridge {bridge}?")


def plan_skip(act: Act, handler: str, partition: int | None, *, discard: bool) -> Plan:
    """Plan to move the changes at which partitions have halted to the dead letters; see `Operations.skip`."""
    wiring = act.wiring
    heads = {head.index: head for head in read_halted(wiring, handler, partition)}
    with reached(wiring) as store:
        generations, images = choose(wiring, store, handler, partition)
    command = _Command(
        "skipped",
        None,
        lambda image: _find_change_objection(heads[image.index].token, image),
        Partitions.discard if discard else partial(_keep, act),
        "flowing",
    )
    chosen = [image for image in images if image.index in heads]
    count = number(len(heads), "change", "changes")
    return Plan(
        command=act.command,
        lines=[line for head in heads.values() for line in _describe_head(head)] or [f"{handler}: nothing has halted"],
        contents=[line for head in heads.values() for line in _show_change(head)],
        fields={
            "bridge": wiring.name,
            "skipped": 0,
            "halted": [_plain_head(head) for head in heads.values()],
            "partitions": [asdict(CommandResult(handler, index, "halted", "planned")) for index in heads],
        },
        question=f"Discard {count}? Nothing of it is kept." if discard else f"Move {count} to the dead letters?",
        seen=" ".join(str(head.token) for head in heads.values()),
        act=partial(act.run, partial(_run, command, generations, chosen, {}, partition)) if chosen else None,
    )


def _plan(act: Act, command: _Command, handler: str | None, partition: int | None, question: str) -> Plan:
    wiring = act.wiring
    served = {each.name for each in wiring.handlers}
    with reached(wiring) as store:
        generations, images = choose(wiring, store, handler, partition)
        if command.is_run and handler is not None and handler not in served:
            raise CommandRefusedError(f"Handler {handler} {UNSERVED}.")
        unable = _find_unable(store, generations, images, served) if command.is_run else {}
    planned = [_judge(command, each, unable.get((each.subscription, each.index))) for each in images]
    if partition is not None and planned[0].result == "unfit":
        raise CommandRefusedError(planned[0].reason)
    is_any = any(each.result == "planned" for each in planned)
    return Plan(
        command=act.command,
        lines=_describe(f"would be {command.done}", planned),
        fields={"bridge": wiring.name, command.done: 0, "partitions": [asdict(each) for each in planned]},
        question=question.format(bridge=wiring.name) if handler is None else None,
        seen=_name_seen(command, images, planned),
        act=partial(act.run, partial(_run, command, generations, images, unable, partition)) if is_any else None,
    )


def _name_seen(command: _Command, images: Sequence[Image], planned: Sequence[CommandResult]) -> str:
    """Name the partitions that fit a command, with their states. One that runs a change names that, too."""
    return " ".join(
        f"{image.subscription}/{image.index}:{image.state}{f':{image.committed}' if command.is_run else ''}"
        for image, each in zip(images, planned, strict=True)
        if each.result == "planned"
    )


def _run(
    command: _Command,
    generations: Mapping[str, int],
    images: Sequence[Image],
    unable: Mapping[tuple[str, int], str],
    partition: int | None,
    act: Act,
) -> PlanResult:
    """Carry a command out, one partition after the other. A partition that was named is taken at its word."""
    results, refused = [], []
    for image in images:
        objection = unable.get((image.subscription, image.index))
        partitions = act.wiring.store.partitions
        is_fit = _judge(command, image, objection).result == "planned"
        results.append(_apply(partitions, command, generations[image.subscription], image, objection))
        if results[-1].result == "done":
            act.count("partitions", image.subscription)
        elif results[-1].result == "refused" or (results[-1].result == "unfit" and is_fit):
            refused.append(results[-1].reason)
    if partition is not None and results[0].result in {"unfit", "refused"}:
        raise CommandRefusedError(results[0].reason)
    return PlanResult(
        lines=_describe(command.done, results),
        fields={
            command.done: sum(each.result == "done" for each in results),
            "partitions": [asdict(each) for each in results],
        },
        refused=refused,
    )


def _describe(done: str, results: Sequence[CommandResult]) -> list[str]:
    """Return a line for each handler with the partitions that are done or planned, and what blocks some others."""
    indexes: dict[str, list[int]] = {}
    for each in results:
        if each.result in {"done", "planned"}:
            indexes.setdefault(each.subscription, []).append(each.index)
    lines = [f"{name}: {done} {', '.join(map(str, found))}" for name, found in indexes.items()]
    left = [each.reason for each in results if each.result == "unfit" and each.state in {"halted", "retrying"}]
    if left[_SENTENCES:]:
        more = number(len(left) - _SENTENCES, "more partition", "more partitions")
        left[_SENTENCES:] = [f"{more} left as they are. `--json` shows the reason of each."]
    if not lines:
        lines = [f"Nothing to do: {number(len(results), 'partition was', 'partitions were')} read, none {done}."]
    return left + lines


def _describe_head(head: Head) -> list[str]:
    name = f"{head.subscription}, partition {head.index}, halted at change {head.committed + 1}: {head.key}"
    return [name, f"  resume token: {head.token}", f"  halted by: {head.error or 'unknown'}"]


def _show_change(head: Head) -> list[str]:
    """Return the lines of a stored change, of a large one the beginning."""
    if head.event is None:
        return []
    text = json.dumps(head.event, indent=2, ensure_ascii=False)
    more = len(text) - _EVENT_CHARS
    return [*text[:_EVENT_CHARS].split("\n"), *([f"... and {more} characters more"] if more > 0 else [])]


def _plain_head(head: Head) -> dict[str, object]:
    names = ("subscription", "index", "key", "token", "error")
    return {name: getattr(head, name) for name in names}


def _keep(act: Act, partitions: Partitions, image: Image, generation: int) -> bool:
    """Make a halted change a dead letter of what is stored of it, by the first form of it that can be stored."""
    wiring, store = act.wiring, act.wiring.store
    assert image.head is not None, "only a halted partition knows its head"
    token = image.head["resumeToken"]
    data = token_data(token)
    partition_id = partitions.partition_id(image.subscription, generation, image.index)
    change = store.backlog.fetch(partition_id, [data]).get(data)
    if change is None:
        command = act.line.changes("skip", image.subscription, str(image.index), "--discard")
        raise CommandRefusedError(sentence_on(image, _NOT_STORED.format(command=command)))
    place = Place(generation, image.index, image.committed + 1, image.fencing_token, change.hash)
    *fuller, last = iterate_forms(change.raw)
    for form in (*fuller, last):
        letter = dead_letter(
            bridge=wiring.name,
            subscription=image.subscription,
            token=token,
            key=image.head["key"] if image.head["key"] != "?" else describe(change.raw),
            kept=form(),
            error=image.error or "unknown",
            traceback="",
            attempts=int(image.retries + image.crashes) + (change.refusal is None),
            place=place,
            cause=SKIPPED,
            name=dead_letter_name(data, change.raw),
            passed_over=(image.retry or {}).get("passedOver"),
        )
        try:
            return partitions.set_aside(image, generation, letter, store.dead_letters.collection)
        except (BSONError, DocumentTooLarge, OperationFailure) as error:
            if form is last or is_transient(error):
                raise
    raise AssertionError


def _find_unable(
    store: Store, generations: Mapping[str, int], images: Sequence[Image], served: Collection[str]
) -> dict[tuple[str, int], str]:
    """Return the partitions whose next change nothing here would run, and why."""
    lease = store.leases.read() or {}
    report = (lease.get("live") and lease.get("report")) or {}
    held = {(each["subscription"], each["partition"]) for each in report.get("held", ())}
    documents = {parse_name(document): document for document in store.subscriptions.read_all()}
    found = {}
    for image in images:
        place = image.subscription, image.index
        if image.subscription not in served:
            found[place] = UNSERVED
        elif image.head is not None and place not in held:
            document = documents.get(image.subscription, {})
            generation = generations[image.subscription]
            if is_out_of_reach(document, image.head["resumeToken"]) and not _is_kept(store, generation, image):
                found[place] = _GONE
    return found


def _is_kept(store: Store, generation: int, image: Image) -> bool:
    """
    Return True if the change at which a partition halted is stored; then it is within the partition's mark afterwards.

    The execution that halts stores its change without a mark, since a listener has it to read. Where that is over, the
    mark lets the next one find it.
    """
    assert image.head is not None, "only a halted partition is asked about"
    data = token_data(image.head["resumeToken"])
    if image.spilled and image.spilled["to"] >= data:
        return True
    partition_id = store.partitions.partition_id(image.subscription, generation, image.index)
    return data in store.backlog.fetch(partition_id, [data]) and store.partitions.mark_head(image, generation)


def _judge(command: _Command, image: Image, unable: str | None) -> CommandResult:
    """Return whether a command fits a partition as it was read."""
    objection, state = command.objection(image) or unable, visible_state(image)
    if objection is None:
        return CommandResult(image.subscription, image.index, state, "planned")
    result: Literal["unchanged", "unfit"] = "unchanged" if image.state == command.goal else "unfit"
    return CommandResult(image.subscription, image.index, state, result, sentence_on(image, objection))


def _apply(
    partitions: Partitions, command: _Command, generation: int, image: Image, unable: str | None
) -> CommandResult:
    reason = sentence_on(image, f"kept changing while it was to be {command.done}; look at status, then repeat it")
    seen = image.committed
    for _ in range(_ROUNDS):
        judged = _judge(command, image, unable)
        if judged.result != "planned":
            return judged
        if command.is_run and image.committed != seen:
            reason = sentence_on(image, "is blocked at another change meanwhile: look at it, then repeat the command")
            break
        try:
            if command.write(partitions, image, generation):
                return CommandResult(image.subscription, image.index, command.after, "done")
        except CommandRefusedError as error:  # it does not keep the others
            reason = str(error)
            break
        found = partitions.look([partitions.partition_id(image.subscription, generation, image.index)])
        if not found:
            reason = sentence_on(image, "is gone: its handler was repartitioned; repeat the command")
            break
        image = found[0]
    return CommandResult(image.subscription, image.index, visible_state(image), "refused", reason)


# -- what each command needs -----------------------------------------------------------------------


def _find_pause_objection(image: Image) -> str | None:
    if image.state == "flowing":
        return None
    return "is paused already" if image.state == "paused" else _describe_state(image)


def _find_resume_objection(image: Image) -> str | None:
    if image.state == "paused":
        return None
    return "flows already" if image.state == "flowing" else _describe_state(image)


def _find_retry_objection(image: Image) -> str | None:
    if image.state == "halted" or (image.state == "flowing" and image.parked):
        return None
    if image.state == "paused":
        return "is paused: resume it first"
    if image.state != "flowing":
        return _describe_state(image)
    if image.live or image.handled is not None:
        return "is being handled at this moment"
    return "has nothing to retry: it is neither halted nor retrying"


def _find_change_objection(token: str | None, image: Image) -> str | None:
    if image.state == "halted" and (image.head is None or token_data(image.head["resumeToken"]) != token):
        return "has halted at another change meanwhile: look at it, then repeat the command"
    return find_skip_objection(image)


def _describe_state(image: Image) -> str:
    if image.state == "halted":
        return "is halted at a change that failed: retry it, or skip it"
    return f"is {image.state}: its handler was repartitioned; repeat the command"
