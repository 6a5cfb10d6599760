"""
The minimal MongoDB rights of a bridge, by role, on its own databases and collections.

There are four roles: the listener, workers (an embedded listener needs both), operators of `changes`, and viewers. None
includes the handlers' access to their own data.

A right belongs to a role if some work of the role fails without it. If the role can do all its work without it, but
logs a warning or shows less, the right is optional, and `without` names the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.state.audit import COLLECTION as AUDIT
from mongo_celery.bridge.state.leases import DROPS
from mongo_celery.bridge.state.signing import COLLECTION as KEYS
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.rights import Allowed

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

ROLES = {
    "listener": "reads the change stream, stores positions and the changes of blocked partitions",
    "worker": "runs handlers, records their outcomes. Rights on the handlers' own data are not included",
    "operator": "runs `celery -A ... changes`",
    "viewer": "only reads: `status`, `show`, `dead-letters list`, `history`",
}
"""The roles and their work."""

ROLES_DATABASE = "admin"
"""Database of the roles. In another database a role could not grant rights outside it."""

_IMAGES = ("whenAvailable", "required")
_ALL = "find insert update remove"

_STATE = (
    # collection, purpose, and the actions of listener, worker, operator and viewer
    ("leases", "the lease and the listener's report", "find insert update", "find", "find update", "find"),
    (KEYS, "the keys by which messages are signed and verified", "find insert update", "find", "find update", ""),
    (DROPS, "counts of dropped messages", "find", "", "find", "find"),
    ("handlers", "positions and partitionings of handlers", "find insert update", "", "find update remove", "find"),
    ("partitions", "claims, outcomes and commits", _ALL, "find update", "find update remove", "find"),
    ("backlog", "changes of blocked partitions", f"{_ALL} collStats", "find insert update", "find remove", "find"),
    ("dead_letters", "dead letters, with their documents", "find update createIndex", _ALL, _ALL, "find"),
    ("snapshots", "the progress of snapshots", "find insert update", "", _ALL, "find"),
    (AUDIT, "audit records, which are never changed or removed", "", "", "find insert createIndex", "find"),
)
"""The rights on the state database."""

_OPTIONAL = (
    # role, collection, actions, purpose, and the effect of their absence
    ("listener", AUDIT, "insert createIndex", "the audit record of `--take-over`", "`history` shows no `--take-over`"),
    ("worker", DROPS, "insert update", "counting dropped messages", "dropped messages are not counted"),
    ("worker", "dead_letters", "createIndex", "finding dead letters by time, key and parked key",
     "replays and lists of dead letters read the whole collection, and log a warning"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Right:
    """
    Actions on one resource.

    Attributes:
        database: empty for all. None for the cluster itself.
        collection: empty for all in the database.
        purpose: the reason for the actions.
        without: the effect of their absence, if they are optional.
    """

    database: str | None
    collection: str
    actions: tuple[str, ...]
    purpose: str
    without: str | None = None

    @property
    def resource(self) -> dict[str, Any]:
        """Return the resource of a privilege."""
        return {"cluster": True} if self.database is None else {"db": self.database, "collection": self.collection}

    @property
    def privilege(self) -> dict[str, Any]:
        """Return the privilege for `createRole`."""
        return {"resource": self.resource, "actions": list(self.actions)}

    @property
    def words(self) -> str:
        """Return the right in words."""
        if self.database is None:
            return f"{', '.join(self.actions)} on the cluster"
        return f"{', '.join(self.actions)} on {self.database or '*'}.{self.collection or '*'}"


def list_rights(wiring: Wiring, role: str) -> list[Right]:
    """
    Return the rights of a bridge's role, from options and handlers' sources, without querying a server.

    Raises:
        ConfigurationError: no handler is registered, or an option or a source is wrong.
    """
    if not wiring.handlers:
        raise ConfigurationError(
            f"bridge {wiring.name} has no handler in this app, so its sources are unknown. Import the module with its "
            "@bridge.on_change functions, for example with include=[...] of the Celery app.",
        )
    found = list_state_rights(wiring, role)
    if role == "worker":  # the signing keys of the bridge's outboxes, whose other collections belong to the app
        databases = {outbox.runtime.options.database for outbox in wiring.outboxes.values()}
        purpose = "the keys that sign the entries of the bridge's outboxes"
        return [*found, *(Right(each, "keys", ("find", "insert", "update"), purpose) for each in sorted(databases))]
    return [*found, *_list_rights_on_data(wiring, role)]


def list_state_rights(wiring: Wiring, role: str) -> list[Right]:
    """Return the rights of a bridge's role on the state database, whatever its handlers."""
    state, column = wiring.options.database, list(ROLES).index(role)
    found = [
        Right(state, name, tuple(each[column].split()), purpose) for name, purpose, *each in _STATE if each[column]
    ]
    return found + [Right(state, name, tuple(each.split()), *why) for of, name, each, *why in _OPTIONAL if of == role]


def _list_rights_on_data(wiring: Wiring, role: str) -> Iterator[Right]:
    """Yield the rights on the stream, its collections and the oplog."""
    options, (_, scope) = wiring.options, wiring.stream()
    starts = [handler.start(options) for handler in wiring.handlers]
    if role != "viewer":
        stream, names, unread = None, "the names of the collections that snapshots read", None
        if role == "operator":
            stream = "`changes check` cannot try the change stream, and reports that"
            unread = "`snapshot start` does not notice a view or a capped collection. The listener reports it later"
        elif SNAPSHOT not in starts:  # otherwise a dropped collection would read as empty
            unread = "a snapshot that you start fails with a message"
        if role == "operator" and {options.full_document, options.full_document_before_change} & {*_IMAGES}:
            names, unread = "which collections keep images", "`changes check` cannot see that, and reports it"
        database, collection = scope.database or "", scope.collection or ""
        actions = ("changeStream", "find")
        yield Right(database, collection, actions, "the change stream, and the look-up of full documents", stream)
        yield Right(database, "", ("listCollections",), names, unread)
    reach = "`status` does not show how far the oplog reaches back" if role == "viewer" else None
    if role == "listener" and "oldest" not in (options.start_from, options.on_history_lost, *starts):
        reach = "before an oplog gap, no slow change is stored and nothing warns. `reset --to oldest` is refused"
    yield Right(None, "", ("serverStatus",), "how far the oplog reaches back", reach)
    yield Right(
        "local", "oplog.rs", ("collStats",), "whether the oplog is full", "a young oplog is taken for a full one"
    )


# -- as commands -----------------------------------------------------------------------------------


def role_name(bridge: str, role: str) -> str:
    """Return the name of a role of a bridge in MongoDB."""
    return f"mongo_celery_{bridge}_{role}"


def role_command(bridge: str, role: str, rights: Sequence[Right], *, update: bool = False) -> dict[str, Any]:
    """Return the database command, for `admin`, that creates a role, or updates it."""
    command = "updateRole" if update else "createRole"
    privileges = [right.privilege for right in rights]
    return {command: role_name(bridge, role), "privileges": privileges, "roles": []}


def grant_command(bridge: str, roles: Sequence[str], user: str) -> dict[str, Any]:
    """Return the database command that grants roles to a user of `admin`."""
    granted = [{"role": role_name(bridge, role), "db": ROLES_DATABASE} for role in roles]
    return {"grantRolesToUser": user, "roles": granted}


# -- a user's rights -----------------------------------------------------------------------------


def find_gaps(wiring: Wiring, user: Allowed) -> dict[str, list[str]]:
    """Return the missing rights of a user by role, in words, without optional ones."""
    return {role: find_missing(list_rights(wiring, role), user) for role in ROLES}


def find_missing(rights: Iterable[Right], user: Allowed) -> list[str]:
    """Return the missing rights of a user, in words, without optional ones."""
    return [
        f"{action} on {right.words.partition(' on ')[2]}"
        for right in rights
        if right.without is None
        for action in right.actions
        if not user.may(action, right.resource)
    ]


def find_roles(wiring: Wiring, user: Allowed) -> list[str]:
    """
    Return the complete roles of a user. Return none if the user has only part of a listener's own rights.

    Listeners need most of the other roles' rights: with one right missing, a listener would look like a worker.
    """
    gaps = find_gaps(wiring, user)
    is_listener = user.may("insert", {"db": wiring.options.database, "collection": "leases"})
    return [] if is_listener and gaps["listener"] else [role for role, gap in gaps.items() if not gap]
