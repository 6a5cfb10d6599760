"""
An operator's commands on partitions: pause, resume, retry, skip, set-aside.

Each one reads a partition, decides on what it saw, and writes only if that still holds; where the
partition has moved meanwhile it reads once more, and then gives up. So a command never acts on a change
that its operator has not seen, and two operators cannot undo each other unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bson.errors import BSONError
from pymongo.errors import DocumentTooLarge, OperationFailure

from mongo_celery.arguments import nearest
from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.existing import dead_letter_name
from mongo_celery.bridge.operations.acts import audited
from mongo_celery.bridge.state.dead_letters import SET_ASIDE, SKIPPED, Place, dead_letter, iterate_forms
from mongo_celery.bridge.state.partitions import Image, Partitions, visible_state
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import is_out_of_reach, layouts_in_force, parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.verdicts import is_transient

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_ROUNDS = 2
UNSERVED = (
    "has no handler in this app, so nothing would run it: import the module with its @bridge.on_change function, for "
    "example with include=[...] of the Celery app, or name the app that has it with -A; then retry"
)
_GONE = (
    "has halted at a change that can no longer be read, since its history was lost, and is not stored: `status` has "
    "its key; repair by hand what it stands for, then skip it"
)
_NOT_STORED = (
    "has halted at a change of which nothing is stored, so there is nothing to keep: a listener that has read it "
    "stores what stands after `spill_after` seconds, then repeat the command; or give it up with `{command}`"
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """
    What a command did to one partition.

    Attributes:
        state: of the partition afterwards, as far as the command knows.
        result: `unchanged` where it was so already, `unfit` where its state does not allow the command,
            `refused` where it kept moving.
        reason: why it was not done; empty where it was.
    """

    subscription: str
    index: int
    state: str
    result: Literal["done", "unchanged", "unfit", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Command:
    """
    What a command needs and does.

    Attributes:
        goal: the stored state in which there is nothing left to do; None where there is no such state.
        objection: why the command does not fit a partition; None when it does.
        write: False when the partition has moved since it was read.
        runs: whether it is pointless where no handler of this app serves the subscription, or its change is gone.
    """

    name: str
    goal: str | None
    objection: Callable[[Image], str | None]
    write: Callable[[Partitions, Image, int], bool]
    after: str
    runs: bool = False


def pause(
    wiring: Wiring, subscription: str | None = None, partition: int | None = None, *, reason: str | None = None
) -> list[CommandResult]:
    """
    Let no new execution begin; what runs may finish, and nothing is lost.

    Afterwards the partitions are `paused`. Their changes are stored, in order, for as long as it lasts and the bound
    (`spill_bytes`) has room.

    Args:
        subscription: which one; all by default.
        partition: which one; all by default. It needs a subscription, unless there is only one.
        reason: why, for the audit record.

    Raises:
        CommandRefusedError: the named partition does not allow it, or nothing has that name.
    """
    command = _Command("pause", "paused", _not_pausable, Partitions.pause, "paused")
    return _run(wiring, command, subscription, partition, reason)


def resume(
    wiring: Wiring, subscription: str | None = None, partition: int | None = None, *, reason: str | None = None
) -> list[CommandResult]:
    """Let paused partitions flow again. Arguments and errors as for `pause`."""
    command = _Command("resume", "flowing", _not_paused, Partitions.resume, "flowing")
    return _run(wiring, command, subscription, partition, reason)


def retry(
    wiring: Wiring, subscription: str | None = None, partition: int | None = None, *, reason: str | None = None
) -> list[CommandResult]:
    """
    Run the first change of halted or parked partitions again at once, with its counts at zero.

    Subscriptions without a handler in this app are left as they are, for nothing here would run them; a named one is
    refused. So is a change that can no longer be read, unless it is stored, or the listener still has it. Arguments and
    errors as for `pause`.
    """
    command = _Command("retry", None, _not_retriable, Partitions.retry, "flowing", runs=True)
    return _run(wiring, command, subscription, partition, reason)


def skip(
    wiring: Wiring,
    subscription: str | None,
    partition: int,
    *,
    token: str | None,
    discard: bool = False,
    reason: str | None = None,
) -> CommandResult:
    """
    Pass over the change at which a partition has halted: it becomes a dead letter, and the partition goes on.

    Args:
        token: of the change that the operator has seen, from `read_halted`; another one is not passed over.
        discard: keep nothing of it.
        reason: why, for the audit record.

    Raises:
        CommandRefusedError: the partition is not halted, or halted at another change; or nothing is stored that could
            be kept.
    """
    command = _passing(token, "skip", Partitions.discard if discard else _keeping(wiring, SKIPPED))
    return _run(wiring, command, subscription, partition, reason, discard=discard)[0]


def _keeping(wiring: Wiring, cause: str) -> Callable[[Partitions, Image, int], bool]:
    """Make a halted change a dead letter of what is stored of it, by the first form of it that can be stored."""
    store = wiring.store

    def write(partitions: Partitions, image: Image, generation: int) -> bool:
        assert image.head is not None, "only a halted partition knows its head"
        token = image.head["resumeToken"]
        data = token_data(token)
        partition_id = partitions.partition_id(image.subscription, generation, image.index)
        change = store.backlog.fetch(partition_id, [data]).get(data)
        if change is None:
            words = (image.subscription, "--partition", str(image.index), "--discard")
            command = wiring.line.changes("skip", *words)
            raise CommandRefusedError(sentence_on(image, _NOT_STORED.format(command=command)))
        place = Place(generation, image.index, image.committed + 1, image.fencing_token, change.hash)
        *fuller, last = iterate_forms(change.raw)
        for form in (*fuller, last):
            found = form()
            letter = dead_letter(
                bridge=wiring.name,
                subscription=image.subscription,
                token=token,
                key=image.head["key"] if image.head["key"] != "?" else describe(change.raw),
                kept=found,
                error=image.error or "unknown",
                traceback="",
                attempts=int(image.retries + image.crashes) + (change.refusal is None),
                place=place,
                cause=cause,
                name=dead_letter_name(data, change.raw),
                passed_over=(image.retry or {}).get("passedOver"),
            )
            try:
                return partitions.set_aside(image, generation, letter, store.dead_letters.collection)
            except (BSONError, DocumentTooLarge, OperationFailure) as error:
                if form is last or is_transient(error):
                    raise
        raise AssertionError

    return write


def set_aside(
    wiring: Wiring, subscription: str | None, partition: int, *, token: str | None, reason: str | None = None
) -> CommandResult:
    """
    Move the change at which a partition has halted to the dead letters; the partition goes on.

    Arguments and errors as for `skip`; nothing is ever thrown away by it.
    """
    command = _passing(token, "set-aside", _keeping(wiring, SET_ASIDE))
    return _run(wiring, command, subscription, partition, reason)[0]


def _run(
    wiring: Wiring,
    command: _Command,
    subscription: str | None,
    partition: int | None,
    reason: str | None,
    *,
    discard: bool = False,
) -> list[CommandResult]:
    served = {handler.name for handler in wiring.handlers}
    with audited(wiring, command.name, subscription, partition=partition, discard=discard, reason=reason) as act:
        store = wiring.store
        generations, images = choose(store, wiring.name, subscription, partition)
        if command.runs and subscription is not None and subscription not in served:
            raise CommandRefusedError(f"Subscription {subscription} {UNSERVED}.")
        unable = _unable_to_run(store, generations, images, served) if command.runs else {}
        results = []
        for image in images:
            objection = unable.get((image.subscription, image.index))
            results.append(_apply(store.partitions, command, generations[image.subscription], image, objection))
            if results[-1].result == "done":
                act.count("partitions", image.subscription)
    if partition is not None and results[0].result in {"unfit", "refused"}:
        raise CommandRefusedError(results[0].reason)
    return results


def _unable_to_run(
    store: Store, generations: Mapping[str, int], images: Sequence[Image], served: Collection[str]
) -> dict[tuple[str, int], str]:
    """Partitions whose next change nothing here would run, and why."""
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
    Whether the change at which a partition halted is stored; then it is within the partition's mark afterwards.

    The execution that halts stores its change without a mark, since a listener has it to read. Where that is over, the
    mark lets the next one find it.
    """
    assert image.head is not None, "only a halted partition is asked about"
    data = token_data(image.head["resumeToken"])
    if image.spilled and image.spilled["to"] >= data:
        return True
    partition_id = store.partitions.partition_id(image.subscription, generation, image.index)
    return data in store.backlog.fetch(partition_id, [data]) and store.partitions.mark_head(image, generation)


def _apply(
    partitions: Partitions, command: _Command, generation: int, image: Image, unable: str | None
) -> CommandResult:
    for _ in range(_ROUNDS):
        objection = command.objection(image) or unable
        if objection is not None:
            return CommandResult(
                image.subscription,
                image.index,
                visible_state(image),
                "unchanged" if image.state == command.goal else "unfit",
                sentence_on(image, objection),
            )
        if command.write(partitions, image, generation):
            return CommandResult(image.subscription, image.index, command.after, "done")
        image = _again(partitions, image, generation)
    reason = sentence_on(
        image, f"kept changing while it was to {command.name}; look at status, then repeat the command"
    )
    return CommandResult(image.subscription, image.index, visible_state(image), "refused", reason)


def _again(partitions: Partitions, image: Image, generation: int) -> Image:
    found = partitions.look([partitions.partition_id(image.subscription, generation, image.index)])
    if not found:
        raise CommandRefusedError(sentence_on(image, "is gone: its handler was repartitioned; repeat the command"))
    return found[0]


def choose(
    store: Store,
    bridge: str,
    subscription: str | None,
    partition: int | None,
) -> tuple[Mapping[str, int], Sequence[Image]]:
    """Images of the partitions that a command names, and the generations of their subscriptions."""
    layouts = layouts_in_force(store.subscriptions.read_all())
    if not layouts:
        raise CommandRefusedError(f"Bridge {bridge} has never been led: start a listener first.")
    names = list(layouts)
    if subscription is not None and subscription not in names:
        raise CommandRefusedError(
            f"Bridge {bridge} has no subscription {subscription!r}{nearest(subscription, names)}; "
            f"it has {', '.join(names)}.",
        )
    if partition is not None and subscription is None and len(names) != 1:
        raise CommandRefusedError(f"Name the subscription of partition {partition}: one of {', '.join(names)}.")
    chosen = [subscription] if subscription is not None else names
    generations = {name: layouts[name].generation for name in chosen}
    images = store.partitions.of(generations)
    if partition is not None:
        images = [image for image in images if image.index == partition]
        if not images:
            raise CommandRefusedError(
                f"Subscription {chosen[0]} has no partition {partition}: its partitions are 0 to "
                f"{layouts[chosen[0]].partitions - 1}.",
            )
    return generations, sorted(images, key=lambda image: (image.subscription, image.index))


def sentence_on(image: Image, text: str) -> str:
    """What is said of a partition."""
    return f"Partition {image.index} of {image.subscription} {text}."


# -- what each command needs -----------------------------------------------------------------------


def _not_pausable(image: Image) -> str | None:
    if image.state == "flowing":
        return None
    return "is paused already" if image.state == "paused" else _standing(image)


def _not_paused(image: Image) -> str | None:
    if image.state == "paused":
        return None
    return "flows already" if image.state == "flowing" else _standing(image)


def _not_retriable(image: Image) -> str | None:
    if image.state == "halted" or (image.state == "flowing" and image.parked):
        return None
    if image.state == "paused":
        return "is paused: resume it first"
    if image.state != "flowing":
        return _standing(image)
    if image.live or image.handled is not None:
        return "is being handled at this moment"
    return "has nothing to retry: it is neither halted nor parked"


def not_halted(image: Image) -> str | None:
    """Why the change of a partition cannot be skipped; None when it can."""
    if image.state == "halted":
        return None
    return f"is {visible_state(image)}, not halted: only the change at which a partition halted can be skipped"


def _standing(image: Image) -> str:
    if image.state == "halted":
        return "is halted at a change that failed: retry it, or set it aside"
    return f"is {image.state}: its handler was repartitioned; repeat the command"


def _passing(token: str | None, name: str, write: Callable[[Partitions, Image, int], bool]) -> _Command:
    def objection(image: Image) -> str | None:
        if image.state == "halted" and (image.head is None or token_data(image.head["resumeToken"]) != token):
            return "has halted at another change meanwhile: look at it, then repeat the command"
        return not_halted(image)

    return _Command(name, None, objection, write, "flowing")
