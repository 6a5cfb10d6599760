"""
An operator's commands on partitions: pause, resume, retry, skip.

Each one reads a partition, decides on what it saw, and writes only if that still holds; where the
partition has moved meanwhile it reads once more, and then gives up. So a command never acts on a change
that its operator has not seen, and two operators cannot undo each other unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.state.leases import layout_of
from mongo_celery.bridge.state.partitions import Image, Partitions, state_of
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import is_out_of_reach, name_in
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.opening import translated

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

_ROUNDS = 2
_UNSERVED = (
    "has no handler in this app, so nothing would run it: import the module with its @bridge.on_change function, for "
    "example with include=[...] of the Celery app, or name the app that has it with -A; then retry"
)
_GONE = (
    "has halted at a change that can no longer be read, since its history was lost: `status` has its key; repair by "
    "hand what it stands for, then skip it"
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
class Head:
    """
    The change at which a partition has halted.

    Attributes:
        key: namespace, operation and document key.
        token: its resume token's `_data`; `skip` passes over this change only.
        committed: number of the last change before it.
        error: why it halted.
    """

    subscription: str
    index: int
    key: str
    token: str
    committed: int
    error: str | None


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


def pause(wiring: Wiring, subscription: str | None = None, partition: int | None = None) -> list[CommandResult]:
    """
    Let no new execution begin; what runs may finish, and nothing is lost.

    Afterwards the partitions are `paused`. Their changes wait in the listener's buffer, and behind a full
    buffer in the oplog: a pause longer than the oplog's window loses history.

    Args:
        subscription: which one; all by default.
        partition: which one; all by default. It needs a subscription, unless there is only one.

    Raises:
        CommandRefusedError: the named partition does not allow it, or nothing has that name.
    """
    command = _Command("pause", "paused", _not_pausable, Partitions.pause, "paused")
    return _run(wiring, command, subscription, partition)


def resume(wiring: Wiring, subscription: str | None = None, partition: int | None = None) -> list[CommandResult]:
    """Let paused partitions flow again. Arguments and errors as for `pause`."""
    command = _Command("resume", "flowing", _not_paused, Partitions.resume, "flowing")
    return _run(wiring, command, subscription, partition)


def retry(wiring: Wiring, subscription: str | None = None, partition: int | None = None) -> list[CommandResult]:
    """
    Run the first change of halted or parked partitions again at once, with its counts at zero.

    Subscriptions without a handler in this app are left as they are, for nothing here would run them; a named one is
    refused. So is a change that can no longer be read, unless the listener still has it. Arguments and errors as for
    `pause`.
    """
    command = _Command("retry", None, _not_retriable, Partitions.retry, "flowing", runs=True)
    return _run(wiring, command, subscription, partition)


def skip(wiring: Wiring, subscription: str | None, partition: int, *, token: str) -> CommandResult:
    """
    Pass over the change at which a partition has halted. That change will not be handled.

    Args:
        token: of the change that the operator has seen, from `read_head`; another one is not skipped.

    Raises:
        CommandRefusedError: the partition is not halted, or halted at another change.
    """
    return _run(wiring, _skipping(token), subscription, partition)[0]


def read_head(wiring: Wiring, subscription: str | None, partition: int) -> Head:
    """
    The change that `skip` would pass over.

    Raises:
        CommandRefusedError: the partition is not halted.
    """
    try:
        wiring.reach()
        _, (image,) = _choose(wiring.store, wiring.name, subscription, partition)
    except PyMongoError as error:
        raise translated(error, wiring.state_concern) from error
    objection = _not_halted(image)
    if objection or image.head is None:
        raise CommandRefusedError(_sentence(image, objection or "does not know its change: retry it once"))
    token = token_data(image.head["resumeToken"])
    return Head(image.subscription, image.index, image.head["key"], token, int(image.committed), image.error)


def _run(wiring: Wiring, command: _Command, subscription: str | None, partition: int | None) -> list[CommandResult]:
    served = {handler.name for handler in wiring.handlers}
    try:
        wiring.reach()
        store = wiring.store
        generation, images = _choose(store, wiring.name, subscription, partition)
        if command.runs and subscription is not None and subscription not in served:
            raise CommandRefusedError(f"Subscription {subscription} {_UNSERVED}.")
        unable = _unable_to_run(store, images, served) if command.runs else {}
        results = [
            _apply(store.partitions, command, generation, image, unable.get((image.subscription, image.index)))
            for image in images
        ]
    except PyMongoError as error:
        raise translated(error, wiring.state_concern) from error
    if partition is not None and results[0].result in {"unfit", "refused"}:
        raise CommandRefusedError(results[0].reason)
    return results


def _unable_to_run(store: Store, images: Sequence[Image], served: Collection[str]) -> dict[tuple[str, int], str]:
    """Partitions whose next change nothing here would run, and why."""
    lease = store.leases.read() or {}
    report = (lease.get("live") and lease.get("report")) or {}
    held = {(each["subscription"], each["partition"]) for each in report.get("held", ())}
    documents = {name_in(document): document for document in store.subscriptions.read_all()}
    found = {}
    for image in images:
        place = image.subscription, image.index
        if image.subscription not in served:
            found[place] = _UNSERVED
        elif image.head is not None and place not in held:
            document = documents.get(image.subscription, {})
            if is_out_of_reach(document, image.head["resumeToken"]):
                found[place] = _GONE
    return found


def _apply(
    partitions: Partitions, command: _Command, generation: int, image: Image, unable: str | None
) -> CommandResult:
    for _ in range(_ROUNDS):
        objection = command.objection(image) or unable
        if objection is not None:
            return CommandResult(
                image.subscription,
                image.index,
                state_of(image),
                "unchanged" if image.state == command.goal else "unfit",
                _sentence(image, objection),
            )
        if command.write(partitions, image, generation):
            return CommandResult(image.subscription, image.index, command.after, "done")
        image = _again(partitions, image, generation)
    reason = _sentence(image, f"kept changing while it was to {command.name}; look at status, then repeat the command")
    return CommandResult(image.subscription, image.index, state_of(image), "refused", reason)


def _again(partitions: Partitions, image: Image, generation: int) -> Image:
    found = partitions.look([partitions.partition_id(image.subscription, generation, image.index)])
    if not found:
        raise CommandRefusedError(_sentence(image, "is gone: the partition layout has changed; repeat the command"))
    return found[0]


def _choose(
    store: Store,
    bridge: str,
    subscription: str | None,
    partition: int | None,
) -> tuple[int, Sequence[Image]]:
    """Generation and images of the partitions that a command names."""
    lease = store.leases.read()
    layout = layout_of(lease) if lease else None
    if layout is None:
        raise CommandRefusedError(f"Bridge {bridge} has never been led: start a listener first.")
    names = [name_in(document) for document in store.subscriptions.read_all()]
    if subscription is not None and subscription not in names:
        raise CommandRefusedError(
            f"Bridge {bridge} has no subscription {subscription!r}{nearest(subscription, names)}; "
            f"it has {', '.join(names)}.",
        )
    if partition is not None and subscription is None and len(names) != 1:
        raise CommandRefusedError(f"Name the subscription of partition {partition}: one of {', '.join(names)}.")
    chosen = [subscription] if subscription is not None else names
    images = store.partitions.of(chosen, layout.generation) if chosen else []
    if partition is not None:
        images = [image for image in images if image.index == partition]
        if not images:
            raise CommandRefusedError(
                f"Subscription {chosen[0]} has no partition {partition}: its partitions are 0 to "
                f"{layout.partitions - 1}.",
            )
    return layout.generation, sorted(images, key=lambda image: (image.subscription, image.index))


def _sentence(image: Image, text: str) -> str:
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


def _not_halted(image: Image) -> str | None:
    if image.state == "halted":
        return None
    return f"is {state_of(image)}, not halted: only the change at which a partition halted can be skipped"


def _standing(image: Image) -> str:
    if image.state == "halted":
        return "is halted at a change that failed: retry or skip it"
    return f"is {image.state}: the partition layout has changed; repeat the command"


def _skipping(token: str) -> _Command:
    def objection(image: Image) -> str | None:
        if image.state == "halted" and (image.head is None or token_data(image.head["resumeToken"]) != token):
            return "has halted at another change meanwhile: look at it, then repeat the command"
        return _not_halted(image)

    return _Command("skip", None, objection, Partitions.skip, "flowing")
