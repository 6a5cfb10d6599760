"""Forget handlers that are gone from the code for good: remove everything that is stored of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.fenced.fence import FIELD
from mongo_celery.bridge.operations.acts import audited, reached
from mongo_celery.bridge.operations.rewinding import LOCKED, leader_in, refuse_unknown
from mongo_celery.bridge.state.positions import Holdings
from mongo_celery.bridge.state.subscriptions import parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Progress = Callable[[int], object]
"""Gets the number of documents that were removed so far."""


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """
    What is stored of a handler that is to be forgotten, as it was seen.

    Attributes:
        name: of the handler.
        holdings: what is stored under it.
        leader: the listener that leads; None where none does.
    """

    name: str
    holdings: Holdings
    leader: str | None

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"subscription": self.name, "leader": self.leader, **asdict(self.holdings)}


def plan_forget(wiring: Wiring, name: str, *, letters: bool, stamps: Sequence[str] = ()) -> ForgetPlan:
    """
    Look at what forgetting a handler would remove. Changes nothing.

    Args:
        letters: whether its dead letters may go, too.
        stamps: namespaces of the collections whose documents lose the handler's stamps.

    Raises:
        CommandRefusedError: the handler is in this app, nothing of it is stored, or dead letters are left; or one of
            `stamps` names no collection.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    if name in {handler.name for handler in wiring.handlers}:
        raise CommandRefusedError(
            f"{name} is a handler of this app: only one that is gone from it is forgotten. Take it out of the code, "
            "leave the bridge in it, and repeat the command.",
        )
    for each in stamps:
        if not all(each.partition(".")):
            raise CommandRefusedError(f"--stamps {each} is no collection: write DATABASE.COLLECTION.")
    with reached(wiring) as store:
        lease = store.leases.read() or {}
        documents = {parse_name(document): document for document in store.subscriptions.read_all()}
        holdings = store.positions.holdings(name)
        if name not in documents and not holdings.any and not stamps:  # else a part of them may be left
            raise refuse_unknown(wiring, name, sorted(documents))
        if holdings.letters and not letters:
            raise CommandRefusedError(
                f"{holdings.letters} dead letters of {name} are left: look at "
                f"`{wiring.line.changes('dead-letters', 'list', name)}`, discard "
                "them, or repeat the command with --dead-letters.",
            )
        return ForgetPlan(name, holdings, leader_in(lease))


def forget(
    wiring: Wiring,
    plan: ForgetPlan,
    *,
    letters: bool,
    reason: str | None = None,
    stamps: Sequence[str] = (),
    progress: Progress = lambda _: None,
) -> None:
    """
    Remove everything of a handler. Killed at any point it can be repeated.

    Afterwards one of that name is new, and begins as its `start_from` says.

    Raises:
        CommandRefusedError: the listener that leads serves it; nothing is changed.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with audited(wiring, "forget", plan.name, dead_letters=letters, stamps=stamps, reason=reason) as act:
        store = wiring.store
        try:
            version = store.positions.forget(plan.name, act.record(plan.name, **asdict(plan.holdings)))
        except PyMongoError as error:
            if is_lock(error):
                raise CommandRefusedError(LOCKED) from error
            raise
        if version is None:
            raise CommandRefusedError(
                f"The listener that leads ({plan.leader or 'it has just begun'}) serves {plan.name}: nothing is "
                "changed. Deploy the code without the handler there, then repeat the command.",
            )
        stamp = f"{FIELD}.{wiring.name}/{plan.name}"
        for namespace in stamps:
            database, _, collection = namespace.partition(".")
            targets = wiring.client[database][collection]
            targets.update_many({stamp: {"$exists": True}}, {"$unset": {stamp: ""}})
        done = 0
        for count in store.positions.remove(plan.name, version, letters=letters):
            progress(done := done + count)
