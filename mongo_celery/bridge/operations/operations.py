"""The commands of one bridge that change its state: `bridge.operations`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Unpack

from mongo_celery.bridge.operations import commands, dead_letter_commands, handler_removal, resets, snapshot_commands
from mongo_celery.bridge.operations.acts import HISTORY_LIMIT, Act, reached, read_history
from mongo_celery.bridge.operations.dead_letter_commands import DeadLetterChoice
from mongo_celery.bridge.operations.lookups import find_whereabouts
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.audit import user_at_host
from mongo_celery.bridge.state.signing import ANNOUNCED_SECONDS
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan, PlanResult

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot
    from mongo_celery.bridge.operations.dead_letter_commands import Found
    from mongo_celery.bridge.operations.lookups import Whereabouts
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine


class Operations:
    """
    The commands of one bridge. Each returns a plan, which changes nothing before its run.

    Example:
        plan = bridge.operations.pause("orders", reason="migration")
        print(plan)
        plan.run()

    All take a `reason` for the audit record. All may raise, in the plan and in the run:

    - `CommandRefusedError`: the name is unknown, or the state does not allow it.
    - `ServerUnavailableError`: MongoDB did not answer.
    - `DeploymentError`: the deployment cannot serve a bridge, or a right is missing.

    Args:
        wiring: the wiring of the bridge.
        by: the acting person, for the audit record. By default this process's user and host.
        line: the beginning of commands in plans.
    """

    def __init__(self, wiring: Wiring, by: str | None = None, line: CommandLine | None = None) -> None:
        self._wiring = wiring
        self._by = by or user_at_host()
        self._line = line or wiring.line

    def on_behalf_of(self, by: str) -> Operations:
        """Return the same commands on behalf of another person, for the audit records."""
        return Operations(self._wiring, by, self._line)

    def _act(self, name: str, *words: object, reason: str | None, **options: object) -> Act:
        return Act(self._wiring, self._line, name, words, options, reason, self._by)

    # -- partitions --------------------------------------------------------------------------------

    def pause(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """
        Start no new executions. Running ones may finish, and nothing is lost.

        Afterwards the partitions are `paused`. Their changes are stored, in order, while there is room under
        `spill_bytes`.

        Args:
            handler: name of the handler. None for all handlers of the bridge.
            partition: index of the partition. None for all partitions.
            reason: the reason for the audit record.
        """
        return commands.plan_command(self._act("pause", handler, partition, reason=reason), handler, partition)

    def resume(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """Let paused partitions continue. Arguments as for `pause`."""
        return commands.plan_command(self._act("resume", handler, partition, reason=reason), handler, partition)

    def retry(self, handler: str | None = None, partition: int | None = None, *, reason: str | None = None) -> Plan:
        """
        Run the first change of halted or retrying partitions immediately, with no attempts counted.

        Without a handler, partitions of handlers outside this app do not change, because nothing here would run them.
        Unreadable changes do not change either, unless they are stored. Arguments as for `pause`.
        """
        return commands.plan_command(self._act("retry", handler, partition, reason=reason), handler, partition)

    def skip(
        self, handler: str, partition: int | None = None, *, discard: bool = False, reason: str | None = None
    ) -> Plan:
        """
        Move the changes at which partitions have halted to the dead letters. The partitions continue.

        Only the changes in the plan are moved. If a partition halts at another change meanwhile, that one stays.

        Args:
            handler: name of the handler.
            partition: index of the partition. None for all halted partitions of the handler.
            discard: True to store nothing of the changes.
            reason: the reason for the audit record.
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
        Move a handler to another position in the stream. Stop all listeners first.

        If the oplog no longer reaches the handler's position, `oldest` and `now` skip the lost changes. Then
        listeners may run.

        `gaps` of the status then include the changes that the whole handler skips, until a reset brings them back. A
        reset of one key changes no gap.

        Args:
            handler: name of the handler.
            to: `oldest`, `now`, a time (UTC without an offset), or a resume token, which means its time.
            key: move only the partition of this key: a document's `_id`, or the value of `partition_by`.
            source: the collection of the key, as `db.collection`, if the handler has several.
            reason: the reason for the audit record.
        """
        place = to.replace(tzinfo=to.tzinfo or UTC).isoformat() if isinstance(to, datetime) else to
        act = self._act("reset", handler, reason=reason, to=place, key=key, source=source)
        return resets.plan_reset(act, handler, place, key=key, source=source)

    def remove(
        self, handler: str, *, dead_letters: bool = False, stamps: Sequence[str] = (), reason: str | None = None
    ) -> Plan:
        """
        Remove all stored state of a deleted handler. You can repeat it after any error.

        Args:
            handler: name of the handler.
            dead_letters: True to also remove its dead letters. Otherwise there must be none.
            stamps: collections, as `db.collection`, whose documents lose the handler's stamps.
            reason: the reason for the audit record.
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
        Start snapshots of existing documents for a handler, one for each collection. A listener delivers them.

        Args:
            handler: name of the handler. None if only one is possible.
            sources: collections that it watches. By default all.
            match: a condition on events, as extended JSON.
            rate: most documents per second.
            reason: the reason for the audit record.
        """
        act = self._act("snapshot start", handler, reason=reason, source=list(sources), match=match, rate=rate)
        return snapshot_commands.plan_start(act, handler, sources=sources, match=match, rate=rate)

    def stop_snapshot(self, handler: str, *, sources: Sequence[str] = (), reason: str | None = None) -> Plan:
        """Stop the snapshots of a handler, for all its collections or some. They can be resumed."""
        act = self._act("snapshot stop", handler, reason=reason, source=list(sources))
        return snapshot_commands.plan_stop(act, handler, sources)

    def resume_snapshot(self, handler: str, *, sources: Sequence[str] = (), reason: str | None = None) -> Plan:
        """
        Continue stopped or failed snapshots from their place. Arguments as for `stop_snapshot`.

        Without `sources`, the plan has a question if a person stopped one of them. `run()` does not ask it.
        """
        act = self._act("snapshot resume", handler, reason=reason, source=list(sources))
        return snapshot_commands.plan_resume(act, handler, sources)

    # -- dead letters ------------------------------------------------------------------------------

    def replay_dead_letters(
        self,
        handler: str | None = None,
        *,
        over_newer: bool = False,
        reason: str | None = None,
        **choice: Unpack[DeadLetterChoice],
    ) -> Plan:
        """
        Run the handler again for dead letters. The listener dispatches them.

        For a parked key it replays all waiting dead letters, from the first one. Without a choice, it replays all.

        Args:
            handler: only dead letters of this handler.
            over_newer: True to let them overwrite data of newer changes in `fenced()` targets.
            reason: the reason for the audit record.
            choice: `ids`, `key`, `since`, `until`, `limit`: see `DeadLetterChoice`.
        """
        found = dead_letter_commands.find(self._wiring, handler, **choice)
        act = self._act("dead-letters replay", reason=reason, id=found.ids, over_newer=over_newer)
        return dead_letter_commands.plan_replay(act, found, over_newer=over_newer)

    def discard_dead_letters(
        self, handler: str | None = None, *, reason: str | None = None, **choice: Unpack[DeadLetterChoice]
    ) -> Plan:
        """
        Discard dead letters. Their changes will never be handled. Arguments as for `replay_dead_letters`.

        If the first one of a parked key is discarded, the remaining ones after it are replayed.
        """
        found = dead_letter_commands.find(self._wiring, handler, **choice)
        return dead_letter_commands.plan_discard(self._act("dead-letters discard", reason=reason, id=found.ids), found)

    def find_dead_letters(self, handler: str | None = None, **choice: Unpack[DeadLetterChoice]) -> Found:
        """Return dead letters by handler, then in stream order. Arguments as for `replay_dead_letters`."""
        return dead_letter_commands.find(self._wiring, handler, **choice)

    # -- the bridge --------------------------------------------------------------------------------

    def rotate_key(self, *, overlap: float = 3600.0, reason: str | None = None) -> Plan:
        """
        Store a new key for signing messages. The listener starts using it a little later.

        Nothing stalls: workers know the new key before it is used, and accept older ones during the overlap. A message
        that waits longer is dropped, and dispatched again. While no listener is running, `in_force_at` is None, and
        the present key stays in force.

        Args:
            overlap: seconds for which older keys are accepted afterwards, at most. 0 if others know a key.
            reason: the reason for the audit record.
        """
        return _plan_rotation(self._act("rotate-key", reason=reason, overlap=overlap), overlap)

    def read_status(self, *, ask: bool = False) -> BridgeSnapshot:
        """
        Read the bridge for `changes status`. `plain()` is its JSON.

        Args:
            ask: True to also query broker and workers, for some seconds.

        Raises:
            ServerUnavailableError, DeploymentError: as for the commands.
        """
        return read_snapshot(self._wiring, self._line, ask=ask)

    def find_document(self, handler: str, key: str, *, source: str | None = None) -> Whereabouts:
        """
        Find out if a document has reached a handler, like `changes show --key`.

        Args:
            key: the document's `_id` as text or JSON, or with `partition_by` its value.
            source: the collection, as `db.collection`, if the handler has several.

        Raises:
            CommandRefusedError: the handler does not exist, or the key's partition is ambiguous.
            ServerUnavailableError, DeploymentError: as for the commands.
        """
        return find_whereabouts(self._wiring, handler, key, source)

    def history(self, handler: str | None = None, limit: int = HISTORY_LIMIT) -> list[dict[str, Any]]:
        """
        Return the last audit records, the latest last.

        Args:
            handler: only records about this handler.
            limit: largest number.
        """
        return read_history(self._wiring, handler, limit)


def _plan_rotation(act: Act, overlap: float) -> Plan:
    """Plan to announce a new signing key, as in `Operations.rotate_key`."""
    wiring = act.wiring
    with reached(wiring) as store:
        if store.signing.read() is None:
            raise CommandRefusedError(
                f"Bridge {wiring.name} has never had a listener, so it has no key to replace. Nothing needs to be "
                "done: the first listener creates one."
            )
        is_led = bool((store.leases.read() or {}).get("live"))
    start = f"No listener is running, so the present key stays in force. Start one: {wiring.line.celery('listener')}"

    def run(running: Act) -> PlanResult:
        at = wiring.store.signing.announce(overlap)
        is_led = bool((wiring.store.leases.read() or {}).get("live"))
        if at is None:
            then = f"It uses the key about {ANNOUNCED_SECONDS:.0f} s after the last command. Repeat the command then."
            raise CommandRefusedError(
                f"Bridge {wiring.name} already has a new key that the listener does not use yet. "
                f"{then if is_led else start}"
            )
        running.count("keys")
        text = f"{wiring.name}: a new key is stored. The listener signs with it from {at:%H:%M:%S} UTC on."
        return PlanResult(
            lines=[
                f"{text} Workers accept older ones for {overlap:.0f} s after that."
                if is_led
                else f"{wiring.name}: a new key is stored, but not used. {start}"
            ],
            fields={"in_force_at": at.isoformat() if is_led else None},
        )

    line = f"{wiring.name}: a new key would be stored. Workers would accept older ones for {overlap:.0f} s more"
    lines = [line, *([] if is_led else [start])]
    return act.plan(lines, run, {"overlap_seconds": overlap, "in_force_at": None})
