"""An operator's commands on a bridge as a whole, through its lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from pymongo.errors import PyMongoError

from mongo_celery.bridge.definitions import definitions_of
from mongo_celery.bridge.operations.rewinding import intervention
from mongo_celery.bridge.state.signing import ANNOUNCED_SECONDS
from mongo_celery.bridge.state.subscriptions import name_in
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.opening import translated

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

T = TypeVar("T")

_NEVER_LED = "Bridge {} has never been led: there is nothing to adopt."


def rotate_key(wiring: Wiring, overlap: float) -> datetime:
    """
    Announce a new signing key, which the listener puts in force a little later.

    Nothing stalls: workers know the new key before it is used, and accept what was signed with the old one for the
    overlap. A message that waits for longer than that is dropped, and dispatched again.

    Args:
        wiring: of the bridge.
        overlap: seconds for which the old key is accepted after the exchange; 0 for a key that others know.

    Returns:
        When the new key comes into force; later, where no listener leads then.

    Raises:
        CommandRefusedError: there is no key yet, or one is announced already.
    """

    def announce() -> datetime:
        keys = wiring.store.signing
        at = keys.announce(overlap)
        if at is not None:
            return at
        if keys.read() is None:
            raise CommandRefusedError(f"Bridge {wiring.name} has never been led, so it has no key: start a listener.")
        raise CommandRefusedError(
            f"Bridge {wiring.name} has a new key announced already: a listener that leads puts it in force within "
            f"{ANNOUNCED_SECONDS:.0f} s and a renewal of its lease; repeat the command then.",
        )

    return _asked(wiring, announce)


@dataclass(frozen=True, slots=True)
class Adoption:
    """
    What adopting a bridge would mean.

    Attributes:
        owner: the app that it serves; None for one without a name.
        going_on: handlers of this app that go on where they stand.
        new: handlers of this app that begin as their `start_from` says.
        left: stored handlers that this app does not have: `rename` or `forget` them.
    """

    owner: str | None
    going_on: Sequence[str]
    new: Sequence[str]
    left: Sequence[str]


def plan_adoption(wiring: Wiring) -> Adoption:
    """
    Look at what adopting would mean. Changes nothing.

    Raises:
        CommandRefusedError: no listener has ever led.
    """

    def look() -> Adoption:
        lease = wiring.store.leases.read()
        if lease is None:
            raise CommandRefusedError(_NEVER_LED.format(wiring.name))
        stored = {name_in(document) for document in wiring.store.subscriptions.read_all()}
        mine = {handler.name for handler in wiring.handlers}
        return Adoption(lease.get("app"), sorted(mine & stored), sorted(mine - stored), sorted(stored - mine))

    return _asked(wiring, look)


def adopt(wiring: Wiring, reason: str | None = None) -> None:
    """
    Let this app lead a bridge that has served another app so far.

    Afterwards listeners of the other app are refused, and those of this one go on where the bridge stands; its
    handlers that the other one did not have are new.

    Args:
        reason: why, for those who read `changes history`.

    Raises:
        CommandRefusedError: a listener leads, or none ever has.
    """
    selectors, _ = wiring.stream()
    definitions = definitions_of(wiring, selectors)

    def take() -> None:
        lease = wiring.store.leases.read()
        if lease is None:
            raise CommandRefusedError(_NEVER_LED.format(wiring.name))
        if not wiring.store.leases.adopt(definitions):
            raise CommandRefusedError(
                f"Bridge {wiring.name} is led by process {lease.get('pid')} on {lease.get('host')}: stop all its "
                "listeners, then repeat the command.",
            )
        details = {"from": lease.get("app"), "to": definitions.app}
        wiring.store.positions.note(intervention("adopt", wiring.name, reason, details))

    _asked(wiring, take)


def _asked(wiring: Wiring, ask: Callable[[], T]) -> T:
    try:
        wiring.reach()
        return ask()
    except PyMongoError as error:
        raise translated(error, wiring.state_concern) from error
