"""
Whether a subscription gets another name at this moment.

What `rename` copies takes minutes, and what a command writes to a letter that is copied already would be lost, or
undone. So `rename` notes in the lease who gets which name, and the commands on partitions, letters, replays and
snapshots look there first. The note counts until the name is given, or a listener begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.state.names import RENAMING
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store


def refuse_renaming(store: Store, names: Iterable[str]) -> None:
    """
    Commands wait until a subscription has its name.

    Args:
        names: of the subscriptions that a command is about.

    Raises:
        CommandRefusedError: one of them gets another name, or is the name that one gets.
    """
    lease = store.leases.read() or {}
    note = _note_in(lease)
    if note is not None and {note["from"], note["to"]} & set(names):
        old, new = note["from"], note["to"]
        raise CommandRefusedError(
            f"Subscription {old} is being renamed to {new}: nothing is changed. Repeat the command when `changes "
            f"rename {old} {new}` has ended; where that was interrupted, repeat it, or start a listener.",
        )


def _note_in(lease: Mapping[str, Any]) -> Mapping[str, Any] | None:
    note = lease.get(RENAMING)
    return note if note and note["version"] == lease.get("version") else None
