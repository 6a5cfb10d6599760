"""An operator's commands on a bridge as a whole, through its lease."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.signing import ANNOUNCED_SECONDS
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.opening import translated

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

T = TypeVar("T")


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


def _asked(wiring: Wiring, ask: Callable[[], T]) -> T:
    try:
        wiring.reach()
        return ask()
    except PyMongoError as error:
        raise translated(error, wiring.state_concern) from error
