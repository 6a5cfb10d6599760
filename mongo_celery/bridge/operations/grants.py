"""
The rights on MongoDB that a bridge needs: by role, on its own databases and collections, and no more.

Four roles: the listener, workers (the embedded listener needs both), the people who run `changes`, and those who only
look. What handlers do with their own data is theirs, and stands in none.

A right belongs to a role where something of the role fails without it, and says so. One without which the role does
all its work, with a warning or with less to see, is optional; `without` says what is missed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.state.audit import COLLECTION as AUDIT
from mongo_celery.bridge.state.leases import DROPS
from mongo_celery.bridge.state.signing import COLLECTION as KEYS
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.rights import Allowed

if TYPE_CHECKING:
    from mongo_celery.bridge.options import BridgeOptions
    from mongo_celery.bridge.stream.source import Scope
    from mongo_celery.bridge.wiring import Wiring

ROLES = {
    "listener": "leads, reads the change stream, stores positions and what stands",
    "worker": "claims changes, records what became of them; handlers' own data is not in it",
    "operator": "runs `celery -A ... changes`",
    "viewer": "looks: `status`, `show`, `where`, `dead-letters`, `history`; it changes nothing",
}
"""The roles, and what each does."""

ROLES_DATABASE = "admin"
"""Where roles are created: one of another database could give no right outside it."""

_IMAGES = ("whenAvailable", "required")
_FIND = ("find",)
_UPDATE = ("find", "update")
_UPSERT = ("find", "insert", "update")
_FIND_REMOVE = ("find", "remove")
_FIND_UPDATE_REMOVE = ("find", "update", "remove")
_RECORD = ("insert", "createIndex")  # nobody changes or removes an audit record
_ALL = ("find", "insert", "update", "remove")


@dataclass(frozen=True, slots=True)
class Right:
    """
    Actions on one resource.

    Attributes:
        database: empty for all; None for the cluster itself.
        collection: empty for all of the database.
        purpose: what they are for.
        without: what is without them, where they are optional.
    """

    database: str | None
    collection: str
    actions: tuple[str, ...]
    purpose: str
    without: str | None = None

    @property
    def resource(self) -> dict[str, Any]:
        """As a privilege names it."""
        return {"cluster": True} if self.database is None else {"db": self.database, "collection": self.collection}

    @property
    def privilege(self) -> dict[str, Any]:
        """As `createRole` takes it."""
        return {"resource": self.resource, "actions": list(self.actions)}

    @property
    def words(self) -> str:
        """As sentences have it."""
        if self.database is None:
            return f"{', '.join(self.actions)} on the cluster"
        return f"{', '.join(self.actions)} on {self.database or '*'}.{self.collection or '*'}"


def rights_of(wiring: Wiring, role: str) -> list[Right]:
    """
    What a role of a bridge needs, by its options and the sources of its handlers. Nothing is asked of a server.

    Raises:
        ConfigurationError: no handler is registered, or an option or a source is wrong.
    """
    options = wiring.options
    if not wiring.handlers:
        raise ConfigurationError(
            f"bridge {wiring.name} has no handler here, so nobody knows what it watches: import the module with its "
            "@bridge.on_change functions, for example with include=[...] of the Celery app.",
        )
    _, scope = wiring.stream()
    if role == "listener":
        return _of_listener(wiring, scope)
    if role == "operator":
        return _of_operator(options, scope)
    return (
        [*_of_worker(options.database), *_keys_of_outboxes(wiring)]
        if role == "worker"
        else _of_viewer(options.database)
    )


def _of_listener(wiring: Wiring, scope: Scope) -> list[Right]:
    state = wiring.options.database
    return [
        Right(state, "leases", _UPSERT, "the lease"),
        Right(state, KEYS, _UPSERT, "the keys by which messages are signed"),
        Right(state, DROPS, _FIND, "what workers have dropped"),
        Right(state, "handlers", _UPSERT, "positions and partitionings of the handlers"),
        Right(state, "partitions", _ALL, "what is done, partition by partition; repartitioning replaces them"),
        Right(state, "backlog", (*_ALL, "collStats"), "changes that are stored, and how many bytes they have"),
        Right(
            state,
            "dead_letters",
            ("find", "update", "createIndex"),
            "dispatching replays of dead letters, found by an index",
        ),
        Right(state, "snapshots", _UPSERT, "how far snapshots are, and those with which handlers begin"),
        Right(state, AUDIT, _RECORD, "the audit record of `--take-over`", "`history` does not show a `--take-over`"),
        _watching(scope, "the change stream, and the look-up of full documents"),
        _collections_of_listener(wiring, scope),
        _oplog_of_listener(wiring),
        Right(
            "local",
            "oplog.rs",
            ("collStats",),
            "whether the oplog is full",
            "one that is young and has room counts as one that removes its oldest entries",
        ),
    ]


def _collections_of_listener(wiring: Wiring, scope: Scope) -> Right:
    """Which collection of its name it is; a snapshot of one that was dropped reads as if it were empty."""
    starts = [handler.start(wiring.options) for handler in wiring.handlers]
    without = None if SNAPSHOT in starts else "`changes snapshot start` fails, and says so"
    purpose = "snapshots: which collection it is that they read"
    return Right(scope.database or "", "", ("listCollections",), purpose, without)


def _oplog_of_listener(wiring: Wiring) -> Right:
    """Where a start is the oldest entry, somebody has to find it."""
    purpose = "the time of the oplog's oldest entry: where a bridge begins, and how near a handler is to it"
    options = wiring.options
    starts = [handler.start(options) for handler in wiring.handlers]
    is_needed = "oldest" in (options.start_from, options.on_history_lost, *starts)
    without = None if is_needed else "nothing warns before history is lost, and `reset --to oldest` is refused"
    return Right(None, "", ("serverStatus",), purpose, without)


def _of_worker(state: str) -> list[Right]:
    return [
        Right(state, "leases", _FIND, "which handlers the listener serves"),
        Right(state, KEYS, _FIND, "the keys by which messages are verified"),
        Right(state, DROPS, ("insert", "update"), "counting dropped messages", "forged messages are dropped uncounted"),
        Right(state, "partitions", _UPDATE, "claims, outcomes and commits"),
        Right(state, "backlog", _UPSERT, "the stored changes of a run; the change at which a partition halts"),
        Right(state, "dead_letters", _ALL, "changes that failed for good; those that are replayed go"),
        Right(
            state,
            "dead_letters",
            ("createIndex",),
            "finding dead letters by time, key and parked key",
            "replays of a parked key, and lists by time or key, read all dead letters, and a warning says so",
        ),
    ]


def _keys_of_outboxes(wiring: Wiring) -> list[Right]:
    """Return the rights on the signing keys of the bridge's outboxes. Their other collections are the app's."""
    databases = {outbox.backing.options.database for outbox in wiring.outboxes.values()}
    purpose = "the keys that sign the entries of the bridge's outboxes"
    return [Right(database, "keys", _UPSERT, purpose) for database in sorted(databases)]


def _of_operator(options: BridgeOptions, scope: Scope) -> list[Right]:
    state = options.database
    stream = "`changes check` cannot try the change stream, and says so; tokens for `reset` are refused"
    found = [
        Right(state, "leases", _UPDATE, "status; whatever moves positions writes it"),
        Right(state, KEYS, _UPDATE, "`rotate-key`"),
        Right(state, DROPS, _FIND, "status: what workers have dropped"),
        Right(state, "handlers", _FIND_UPDATE_REMOVE, "status; `reset` writes it, `remove` removes one"),
        Right(state, "partitions", _FIND_UPDATE_REMOVE, "status; commands write it, `remove` removes some"),
        Right(state, "backlog", _FIND_REMOVE, "`skip` reads a change; `remove` removes some"),
        Right(state, "dead_letters", _ALL, "`dead-letters`; `skip` writes them; status counts them"),
        Right(state, "snapshots", _ALL, "status; `snapshot` asks for them; `forget` removes some"),
        Right(state, AUDIT, ("find", *_RECORD), "`history`; whatever changes the state leaves an audit record"),
        Right(None, "", ("serverStatus",), "how far the oplog reaches back; `reset`"),
        Right("local", "oplog.rs", ("collStats",), "whether it is full", "`changes check` warns of a young oplog, too"),
        _watching(scope, "`changes check` and tokens for `reset` open the change stream", stream),
    ]
    if any(image in _IMAGES for image in (options.full_document, options.full_document_before_change)):
        blind = "`changes check` cannot see which collections keep images, and says so"
        found.append(Right(scope.database or "", "", ("listCollections",), "which collections keep images", blind))
    else:
        late = "`snapshot` is refused by the listener instead of at once where a collection is none that can have one"
        found.append(Right(scope.database or "", "", ("listCollections",), "what `snapshot` is to read", late))
    return found


def _of_viewer(state: str) -> list[Right]:
    """Nothing that this role reads lets it write, sign a message, or see what other databases hold."""
    return [
        Right(state, "leases", _FIND, "the listener and its report"),
        Right(state, DROPS, _FIND, "what workers have dropped"),
        Right(state, "handlers", _FIND, "handlers and their positions"),
        Right(state, "partitions", _FIND, "what stands, and why"),
        Right(state, "backlog", _FIND, "how much is stored; `head` shows documents of it"),
        Right(state, "dead_letters", _FIND, "dead letters, with their documents"),
        Right(state, "snapshots", _FIND, "how far snapshots are"),
        Right(state, AUDIT, _FIND, "`history`"),
        Right(None, "", ("serverStatus",), "how far the oplog reaches back", "status shows no window of the oplog"),
        Right("local", "oplog.rs", ("collStats",), "whether it is full", "a young oplog counts as a full one"),
    ]


def _watching(scope: Scope, purpose: str, without: str | None = None) -> Right:
    return Right(scope.database or "", scope.collection or "", ("changeStream", "find"), purpose, without)


# -- as commands -----------------------------------------------------------------------------------


def role_name(bridge: str, role: str) -> str:
    """The name of a role of a bridge in MongoDB."""
    return f"mongo_celery_{bridge}_{role}"


def role_command(bridge: str, role: str, rights: Sequence[Right], *, update: bool = False) -> dict[str, Any]:
    """The database command, for `admin`, that creates a role, or updates it."""
    command = "updateRole" if update else "createRole"
    privileges = [right.privilege for right in rights]
    return {command: role_name(bridge, role), "privileges": privileges, "roles": []}


def grant_command(bridge: str, roles: Sequence[str], user: str) -> dict[str, Any]:
    """The database command that gives roles to a user of `admin`."""
    granted = [{"role": role_name(bridge, role), "db": ROLES_DATABASE} for role in roles]
    return {"grantRolesToUser": user, "roles": granted}


# -- what a user has -------------------------------------------------------------------------------


def lacking(wiring: Wiring, user: Allowed) -> dict[str, list[str]]:
    """By role, what a user lacks of it, in words; nothing where it has the role whole. What is optional counts not."""
    return {
        role: [
            f"{action} on {right.words.partition(' on ')[2]}"
            for right in rights_of(wiring, role)
            if right.without is None
            for action in right.actions
            if not user.may(action, right.resource)
        ]
        for role in ROLES
    }


def roles_of(wiring: Wiring, user: Allowed) -> list[str]:
    """
    The roles that a user has whole; none where it has what only a listener needs, and not all of that.

    Listeners need most of what the others do: one that lacks a single right would be taken for a worker.
    """
    gaps = lacking(wiring, user)
    is_listener = user.may("insert", {"db": wiring.options.database, "collection": "leases"})
    return [] if is_listener and gaps["listener"] else [role for role, gap in gaps.items() if not gap]
