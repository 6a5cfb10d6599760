"""Handlers that were renamed in the code, and handlers that are gone from it for good: what is stored of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.arguments import nearest
from mongo_celery.bridge.operations.places import iso
from mongo_celery.bridge.operations.reasons import CommandLine
from mongo_celery.bridge.operations.rewinding import (
    LOCKED,
    leader_in,
    place_in,
    reached,
    refuse_led,
    refuse_unknown,
)
from mongo_celery.bridge.state.leases import layouts_in_force
from mongo_celery.bridge.state.names import COPIED_BY, RENAMED, Holdings
from mongo_celery.bridge.state.positions import is_locked, make_intervention
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import name_in
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Progress = Callable[[int], object]
"""Is told how many documents were copied or removed so far."""


@dataclass(frozen=True, slots=True)
class NamePlan:
    """
    What would be done with a name, as it was seen.

    Attributes:
        name: the one that goes.
        to: the one that comes; None where it is forgotten.
        holdings: what is stored under it.
        leader: who leads; None where nobody does.
        generation: of its layout in force; None where only leftovers are there.
        version: of the lease.
        given_at: version of the lease at which the new name was given, where only leftovers are there.
    """

    name: str
    to: str | None
    holdings: Holdings
    leader: str | None
    generation: int | None
    version: int
    given_at: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"subscription": self.name, "to": self.to, "leader": self.leader, **asdict(self.holdings)}


# -- rename ----------------------------------------------------------------------------------------


def plan_rename(wiring: Wiring, old: str, new: str, line: CommandLine | None = None) -> NamePlan:
    """
    Look at what giving a subscription another name would do. Changes nothing.

    Args:
        line: how the reader of a refusal types commands.

    Raises:
        CommandRefusedError: the names do not fit what is stored, or what this app has.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    handlers = sorted(handler.name for handler in wiring.handlers)
    if old == new:
        raise CommandRefusedError(f"{old} is the name that it has.")
    if new not in handlers:
        raise CommandRefusedError(
            f"This app has no handler {new!r}{nearest(new, handlers)}; it has {', '.join(handlers) or 'none'}. Deploy "
            "the code with the new name, or name the app that has it with -A.",
        )
    if old in handlers:
        raise CommandRefusedError(f"{old} is a handler of this app itself: only one that is gone from it is renamed.")
    with reached(wiring) as store:
        lease = store.leases.read() or {}
        documents = {name_in(document): document for document in store.subscriptions.read_all()}
        holdings = store.names.holdings(old)
        if old not in documents:
            if documents.get(new, {}).get(RENAMED) != old:
                raise refuse_unknown(wiring, old, sorted(documents))
            generation = None  # it has its new name: what is left of the old one goes
        else:
            layout = layouts_in_force(lease, documents.values()).get(old)
            if layout is None or documents[old].get("layout") is None:
                raise CommandRefusedError(f"Subscription {old} was last led by an earlier version: start a listener.")
            generation = layout.generation
            has = _found_in(store.names.own(new))
            if new in documents and store.partitions.are_touched(new):
                has = "handled changes"
            if has:
                raise CommandRefusedError(_refusal(old, new, has, iso(place_in(documents[old])), line or CommandLine()))
        version = int(lease.get("version", 0))
        given_at = int(documents.get(new, {}).get(COPIED_BY) or version)
        return NamePlan(old, new, holdings, leader_in(lease), generation, version, given_at)


def rename(wiring: Wiring, plan: NamePlan, reason: str | None, progress: Progress = lambda _: None) -> None:
    """
    Give a subscription its new name: positions, layout, what is stored, dead letters and replays go over.

    Killed at any point it can be repeated. Afterwards the next listener goes on with the new name.

    Raises:
        CommandRefusedError: a listener leads, or began meanwhile; a handler runs; or a partition is locked. Then the
            old name is in force.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    assert plan.to is not None, "it has a new name"
    with reached(wiring) as store:
        done = 0
        if plan.generation is not None:
            refuse_led(wiring, store)
            version = _begin(wiring, store, plan)
            for count in store.names.copy(plan.name, plan.to, plan.generation, version):
                progress(done := done + count)
            note = make_intervention("rename", plan.name, reason, {"to": plan.to})
            result = store.names.put_in_force(plan.name, plan.to, version, note)
            if result == "asked":
                raise CommandRefusedError(
                    f"{plan.to} has {_found_in(store.names.own(plan.to))} of its own since a moment ago: nothing is "
                    "changed. Repeat the command, which says what to do.",
                )
            if result != "done":
                refuse_led(wiring, store)
                raise CommandRefusedError(_begun(wiring, plan.name))
        else:
            version = plan.given_at
        for count in store.names.remove(plan.name, version, letters=True):
            progress(done := done + count)


def _begin(wiring: Wiring, store: Store, plan: NamePlan) -> int:
    try:
        begun = store.names.begin(plan.name, str(plan.to), plan.version)
    except PyMongoError as error:
        if is_locked(error):
            raise CommandRefusedError(LOCKED) from error
        raise
    if begun == "running":
        raise CommandRefusedError(
            f"A handler of {plan.name} runs at this moment, and would write under the old name: nothing is changed. "
            "Wait until `status` shows nothing outstanding, or stop its workers; then repeat the command.",
        )
    if begun == "led":
        refuse_led(wiring, store)
        raise CommandRefusedError(_begun(wiring, plan.name))
    return int(begun)


def _found_in(own: Holdings) -> str:
    """What was asked for or set aside under the new name: it would be lost, or be taken for the old one's."""
    found = ((own.letters, "dead letters"), (own.replays, "replays"), (own.snapshots, "snapshots"))
    return ", ".join(f"{count} {what}" for count, what in found if count)


def _refusal(old: str, new: str, has: str, at: str | None, line: CommandLine) -> str:
    rewind, forget = line.changes("rewind", new, "--to", at or "oldest"), line.changes("forget", old)
    instead = line.changes("forget", new, "--dead-letters")
    return (
        f"{new} has {has} of its own, which would be lost: nothing is changed. {old} has handled its changes up to "
        f"{at or 'the start'}. To let {new} handle those after it, stop all listeners and run `{rewind}`, then "
        f"`{forget}`. To lose what {new} has, run `{instead}` with code that lacks {new}, then repeat this command."
    )


def _begun(wiring: Wiring, name: str) -> str:
    return (
        f"A listener of bridge {wiring.name} has begun meanwhile: {name} has its name and its positions. Stop all "
        "listeners, then repeat the command."
    )


# -- forget ----------------------------------------------------------------------------------------


def plan_forget(wiring: Wiring, name: str, *, letters: bool) -> NamePlan:
    """
    Look at what forgetting a handler would remove. Changes nothing.

    Args:
        letters: whether its dead letters may go, too.

    Raises:
        CommandRefusedError: the handler is in this app, nothing of it is stored, or dead letters are left.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    if name in {handler.name for handler in wiring.handlers}:
        raise CommandRefusedError(
            f"{name} is a handler of this app: only one that is gone from it is forgotten. Take it out of the code, "
            "leave the bridge in it, and repeat the command.",
        )
    with reached(wiring) as store:
        lease = store.leases.read() or {}
        documents = {name_in(document): document for document in store.subscriptions.read_all()}
        holdings = store.names.holdings(name)
        if name not in documents and not holdings.any:
            raise refuse_unknown(wiring, name, sorted(documents))
        if holdings.letters and not letters:
            raise CommandRefusedError(
                f"{holdings.letters} dead letters of {name} are left: look at `dead-letters list {name}`, discard "
                "them, or repeat the command with --dead-letters.",
            )
        return NamePlan(name, None, holdings, leader_in(lease), None, int(lease.get("version", 0)))


def forget(
    wiring: Wiring, plan: NamePlan, *, letters: bool, reason: str | None, progress: Progress = lambda _: None
) -> None:
    """
    Remove everything of a handler. Killed at any point it can be repeated.

    Afterwards one of that name is new, and begins as its `start_from` says.

    Raises:
        CommandRefusedError: the listener that leads serves it; nothing is changed.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    details = {"count": plan.holdings.stored + plan.holdings.letters}
    with reached(wiring) as store:
        try:
            version = store.names.forget(plan.name, make_intervention("forget", plan.name, reason, details))
        except PyMongoError as error:
            if is_locked(error):
                raise CommandRefusedError(LOCKED) from error
            raise
        if version is None:
            raise CommandRefusedError(
                f"The listener that leads ({plan.leader or 'it has just begun'}) serves {plan.name}: nothing is "
                "changed. Deploy the code without the handler there, then repeat the command.",
            )
        done = 0
        for count in store.names.remove(plan.name, version, letters=letters):
            progress(done := done + count)
