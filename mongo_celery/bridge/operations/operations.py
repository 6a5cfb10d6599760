"""The commands of one bridge that change its state, as `bridge.operations` has them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.operations import commands, handler_removal, letter_commands, resets, snapshot_commands
from mongo_celery.bridge.operations.acts import HISTORY_LIMIT, Act, reached, read_history
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.operations.whereabouts import find_whereabouts
from mongo_celery.bridge.state.audit import user_at_host
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.signing import ANNOUNCED_SECONDS
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan, PlanResult

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot
    from mongo_celery.bridge.operations.letter_commands import Found
    from mongo_celery.bridge.operations.whereabouts import Whereabouts
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

LETTERS_MAX = 1000
"""Dead letters that one command changes by default."""


class Operations:
    """
    The commands of one bridge. Each returns a plan, which changes nothing before it is run.

    Example:
        plan = bridge.operations.pause("orders", reason="migration")
        print(plan)
        plan.run()

    All take a `reason` for the audit record. All raise, while they plan and while they run:

    - `CommandRefusedError`: nothing has that name, or the state does not allow it.
    - `ServerUnavailableError`: MongoDB did not answer.
    - `DeploymentError`: the deployment cannot serve a bridge, or a right is missing.

    Args:
        wiring: of the bridge.
        by: who acts, for the audit record; by default the user of this process, at its host.
        line: the beginning of the commands that plans show.
    """

    def __init__(self, wiring: Wiring, by: str | None = None, line: CommandLine | None = None) -> None:
        self._wiring = wiring
        self._by = by or user_at_host()
        self._line = line or wiring.line

    def on_behalf_of(self, by: str) -> Operations:
        """Return the same commands on behalf of somebody else than this process's user, for the audit records."""
        return Operations(self._wiring, by, self._line)

    def _act(self, name: str, *words: object, reason: str | None, **options: object) -> Act:
        return Act(self._wiring, self._line, name, words, options, reason, self._by)

    # -- partitions --------------------------------------------------------------------------------

    def pause(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """
        Start no new execution. Executions that run may finish, and nothing is lost.

        Afterwards the partitions are `paused`. Their changes are stored, in order, while there is room under
        `spill_bytes`.

        Args:
            handler: its name; None for all handlers of the bridge.
            partition: its index; None for all partitions.
            reason: for the audit record.
        """
        return commands.plan_pause(self._act("pause", handler, partition, reason=reason), handler, partition)

    def resume(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """Let paused partitions continue. Arguments as for `pause`."""
        return commands.plan_resume(self._act("resume", handler, partition, reason=reason), handler, partition)

    def retry(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """
        Run the first change of halted or retrying partitions immediately, with no attempts counted.

        Without a handler, partitions whose handler this app does not have stay as they are: nothing here would run
        them. A change that can no longer be read stays, too, unless it is stored. Arguments as for `pause`.
        """
        return commands.plan_retry(self._act("retry", handler, partition, reason=reason), handler, partition)

    def skip(
        self, handler: str, partition: int | None = None, *, discard: bool = False, reason: str | None = None
    ) -> Plan:
        """
        Move the changes at which partitions have halted to the dead letters. The partitions continue.

        Only the changes that were read for the plan are moved. If a partition halts at another one, that one stays.

        Args:
            handler: its name.
            partition: its index; None for all halted partitions of the handler.
            discard: keep nothing of the changes.
            reason: for the audit record.
        """
        act = self._act("skip", handler, partition, reason=reason, discard=discard)
        return commands.plan_skip(act, handler, partition, discard=discard)

    # -- handlers ----------------------------------------------------------------------------------

    def reset(
        self,
        handler: str,
        to: str | datetime,
        *,
        key: str | None = None,
        source: str | None = None,
        reason: str | None = None,
    ) -> Plan:
        """
        Move a handler to a place in the stream. Stop all listeners first.

        If the oplog no longer reaches the handler's position, `oldest` and `now` pass over what was lost. Then
        listeners may run.

        Args:
            handler: its name.
            to: `oldest`, `now`, a time (UTC without an offset) or a resume token of this bridge's stream.
            key: move only the partition of this key: a document's `_id`, or what `partition_by` gives.
            source: the collection of the key, as `db.collection`, if the handler has several.
            reason: for the audit record.
        """
        place = to.replace(tzinfo=to.tzinfo or UTC).isoformat() if isinstance(to, datetime) else to
        act = self._act("reset", handler, reason=reason, to=place, key=key, source=source)
        return resets.plan_reset(act, handler, place, key=key, source=source)

    def remove(
        self, handler: str, *, dead_letters: bool = False, stamps: Sequence[str] = (), reason: str | None = None
    ) -> Plan:
        """
        Remove everything that is stored of a handler that is gone from the code. After any error it can be repeated.

        Args:
            handler: its name.
            dead_letters: remove its dead letters, too. Without it they must be gone.
            stamps: collections, as `db.collection`, whose documents lose the handler's stamps.
            reason: for the audit record.
        """
        act = self._act("remove", handler, reason=reason, dead_letters=dead_letters, stamps=list(stamps))
        return handler_removal.plan_remove(act, handler, dead_letters=dead_letters, stamps=stamps)

    # -- snapshots ---------------------------------------------------------------------------------

    def start_snapshot(
        self,
        handler: str | None = None,
        *,
        sources: Sequence[str] = (),
        match: str | None = None,
        rate: float | None = None,
        reason: str | None = None,
    ) -> Plan:
        """
        Give a handler the documents that exist, one snapshot for each collection. A listener delivers them.

        Args:
            handler: its name; None if only one can be meant.
            sources: collections that it watches; all of them by default.
            match: a condition on events, as extended JSON.
            rate: documents a second at most.
            reason: for the audit record.
        """
        act = self._act("snapshot start", handler, reason=reason, source=list(sources), match=match, rate=rate)
        return snapshot_commands.plan_start(act, handler, sources=sources, match=match, rate=rate)

    def stop_snapshot(self, snapshot: str, *, reason: str | None = None) -> Plan:
        """Let a snapshot, named by its id or the end of it, read no more. `resume_snapshot` continues it."""
        return snapshot_commands.plan_stop(self._act("snapshot stop", snapshot, reason=reason), snapshot)

    def resume_snapshot(self, snapshot: str, *, reason: str | None = None) -> Plan:
        """Let a snapshot that was stopped or has failed continue where it is."""
        return snapshot_commands.plan_resume(self._act("snapshot resume", snapshot, reason=reason), snapshot)

    # -- dead letters ------------------------------------------------------------------------------

    def replay_dead_letters(
        self,
        handler: str | None = None,
        *,
        ids: Sequence[str] = (),
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = LETTERS_MAX,
        over_newer: bool = False,
        reason: str | None = None,
    ) -> Plan:
        """
        Run the handler again for dead letters. The listener dispatches them.

        Of a parked key it replays all that wait, from the first one on. If nothing chooses, it replays all of them.

        Args:
            handler: only those of this handler.
            ids: only these: beginnings of their ids, or whole `_id`s.
            key: only those of this document: its `_id`, as JSON or as text.
            since: only those that became dead letters at this time or later.
            until: only those that became dead letters before this time.
            limit: how many at most.
            over_newer: let them overwrite what newer changes have written through `fenced()`.
            reason: for the audit record.
        """
        found = self.find_dead_letters(handler, ids=ids, key=key, since=since, until=until, limit=limit)
        act = self._act_on_letters("replay", found, reason=reason, over_newer=over_newer)
        return letter_commands.plan_replay(act, found, over_newer=over_newer)

    def discard_dead_letters(
        self,
        handler: str | None = None,
        *,
        ids: Sequence[str] = (),
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = LETTERS_MAX,
        reason: str | None = None,
    ) -> Plan:
        """
        Throw dead letters away. Their changes will never be handled. Arguments as for `replay_dead_letters`.

        If the first one of a parked key goes, those after it that stay are replayed.
        """
        found = self.find_dead_letters(handler, ids=ids, key=key, since=since, until=until, limit=limit)
        return letter_commands.plan_discard(self._act_on_letters("discard", found, reason=reason), found)

    def find_dead_letters(
        self,
        handler: str | None = None,
        *,
        ids: Sequence[str] = (),
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = LETTERS_MAX,
        skip: int = 0,
    ) -> Found:
        """Return dead letters: by handler, then in the order of the stream. Arguments as for `replay_dead_letters`."""
        if ids and all(each.startswith(f"{self._wiring.name}/") for each in ids):
            return letter_commands.find_by_document_ids(self._wiring, ids)
        keys = keys_of(key) if key is not None else []
        selection = Selection(subscription=handler, ids=ids, keys=keys, since=since, until=until)
        return letter_commands.find(self._wiring, selection, max(limit, len(ids)), skip=skip)

    def _act_on_letters(self, name: str, found: Found, *, reason: str | None, **options: object) -> Act:
        ids = [each.id for each in found.letters]
        return self._act(f"dead-letters {name}", reason=reason, id=ids, **options)

    # -- the bridge --------------------------------------------------------------------------------

    def rotate_key(self, *, overlap: float = 3600.0, reason: str | None = None) -> Plan:
        """
        Announce a new key for signing messages. The listener puts it in force a little later.

        Nothing stalls: workers know the new key before it is used, and accept the old one for the overlap. A message
        that waits for longer is dropped, and dispatched again.

        Args:
            overlap: seconds for which the old key is accepted afterwards; 0 for a key that others know.
            reason: for the audit record.
        """
        wiring = self._wiring
        act = self._act("rotate-key", reason=reason, overlap=overlap)
        with reached(wiring) as store:
            if store.signing.read() is None:
                raise CommandRefusedError(
                    f"Bridge {wiring.name} has never been led, so it has no key: start a listener."
                )

        def run(running: Act) -> PlanResult:
            at = wiring.store.signing.announce(overlap)
            if at is None:
                raise CommandRefusedError(
                    f"Bridge {wiring.name} has a new key announced already: a listener that leads puts it in force "
                    f"within {ANNOUNCED_SECONDS:.0f} s and a renewal of its lease; repeat the command then.",
                )
            running.count("keys")
            text = f"{wiring.name}: a new key is announced. The listener signs with it from {at:%H:%M:%S} UTC on."
            return PlanResult(
                lines=[f"{text} The old one is accepted for {overlap:.0f} s after that."],
                fields={"in_force_at": at.isoformat()},
            )

        return Plan(
            command=act.command,
            lines=[f"{wiring.name}: a new key would be announced; the old one is accepted for {overlap:.0f} s"],
            fields={"bridge": wiring.name, "overlap_seconds": overlap, "in_force_at": None},
            act=partial(act.run, run),
        )

    def read_status(self, *, ask: bool = False) -> BridgeSnapshot:
        """
        Read the bridge, as `changes status` shows it. `plain()` is its JSON.

        Args:
            ask: ask broker and workers, too, for some seconds.

        Raises:
            ServerUnavailableError, DeploymentError: as for the commands.
        """
        return read_snapshot(self._wiring, self._line, ask=ask)

    def find_document(self, handler: str, key: str, *, source: str | None = None) -> Whereabouts:
        """
        Find out whether a document has reached a handler, as `changes where` does.

        Args:
            key: the document's `_id`, as text or JSON; with `partition_by` what that gives.
            source: the collection, as `db.collection`, where the handler has several.

        Raises:
            CommandRefusedError: there is no such handler, or it is not clear which partition has the key.
            ServerUnavailableError, DeploymentError: as for the commands.
        """
        return find_whereabouts(self._wiring, handler, key, source)

    def history(self, handler: str | None = None, limit: int = HISTORY_LIMIT) -> list[dict[str, Any]]:
        """
        Return the last audit records, the latest last.

        Args:
            handler: only those about this one.
            limit: how many at most.
        """
        return read_history(self._wiring, handler, limit)
