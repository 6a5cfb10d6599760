"""An operator's commands on a bridge as a whole, through its lease."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from mongo_celery.bridge.operations.acts import audited
from mongo_celery.bridge.state.signing import ANNOUNCED_SECONDS
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring


def rotate_key(wiring: Wiring, overlap: float, *, reason: str | None = None) -> datetime:
    """
    Announce a new signing key, which the listener puts in force a little later.

    Nothing stalls: workers know the new key before it is used, and accept what was signed with the old one for the
    overlap. A message that waits for longer than that is dropped, and dispatched again.

    Args:
        wiring: of the bridge.
        overlap: seconds for which the old key is accepted after the exchange; 0 for a key that others know.
        reason: why, for people.

    Returns:
        When the new key comes into force; later, where no listener leads then.

    Raises:
        CommandRefusedError: there is no key yet, or one is announced already.
    """
    with audited(wiring, "rotate-key", overlap=overlap, reason=reason) as act:
        keys = wiring.store.signing
        at = keys.announce(overlap)
        if at is not None:
            act.count("keys")
            return at
        if keys.read() is None:
            raise CommandRefusedError(f"Bridge {wiring.name} has never been led, so it has no key: start a listener.")
        raise CommandRefusedError(
            f"Bridge {wiring.name} has a new key announced already: a listener that leads puts it in force within "
            f"{ANNOUNCED_SECONDS:.0f} s and a renewal of its lease; repeat the command then.",
        )
