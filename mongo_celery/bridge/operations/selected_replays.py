"""
Running the handler again for changes that were handled: of a time, of a key, while the stream goes on.

No position moves. The range is read here, within bounds; what the handler would get of it becomes dead letters, and a
replay of each is asked for: so each runs under a claim of its partition, between live changes, in the order of its key,
with retries of its own, and whoever dies meanwhile loses nothing (`state/replays.py`).

1. What its partition has not passed yet is left out: it comes anyway, and a replay would be in front of it.
2. First all letters are stored, of which nothing runs; then the replays are asked for, all in one transaction. It
   finds that no position has gone back meanwhile, and writes the lease, as whoever moves one does. Killed before,
   nothing has begun, and the command can be repeated; killed behind it, everything is asked for.
3. A replay must not write over newer data. Of a change that was handled nobody has kept the fencing token; but fences
   count in cluster time (`mongo/expressions.py`), so every claim that ran the change, or a later one, has a larger one
   than the second of the change says. The replay's token lies right below that: a target refuses it where the change
   itself or a later one has written, and takes it where neither has. With `over_newer` it is the claim's own.
4. Tokens are given from the last change of a partition back to the first one, so that none lies above its own second.
   Changes from before the layout get generation 0, below every stamp, since its partitions were others.
5. What waits for a parked key has the tokens of its time, and a replay beside it may have newer ones: targets would
   refuse the release. So nothing of such a key is asked for; what was asked for before does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from bson.int64 import Int64

from mongo_celery.bridge.change import describe, event_of, token_data
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.operations.commands import UNSERVED
from mongo_celery.bridge.operations.keys import key_of, shown
from mongo_celery.bridge.operations.places import NOW, Asked, PassedPlace, Reach, StreamPlace, iso, place_of, read_from
from mongo_celery.bridge.operations.rename_check import refuse_renaming
from mongo_celery.bridge.operations.rewinding import leader_in, reached, refuse_unknown
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, SELECTED, Letter, Place, dead_letter, kept, unsigned
from mongo_celery.bridge.state.leases import layouts_in_force
from mongo_celery.bridge.state.positions import Passed, make_intervention
from mongo_celery.bridge.state.replays import REQUESTS_MAX
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark, PendingChange
from mongo_celery.errors import CommandRefusedError, ConfigurationError
from mongo_celery.mongo.expressions import SHIFT
from mongo_celery.mongo.oplog import time_of_token, token_before

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

READ_SECONDS = 600.0
"""For how long a range may be read."""

BYTES_MAX = 64 << 20
"""How much the changes of one command may have together."""

_PROGRESS_SECONDS = 2.0
Progress = Callable[[str, int, int], object]
"""Is told up to where a range was read, how many changes there were, and how many are wanted."""


@dataclass(frozen=True, slots=True)
class Asking:
    """
    What is to be replayed.

    Attributes:
        subscription: whose handler is to run.
        start: from where.
        until: before this place; None for now.
        key: of this document only, as it was typed; with `partition_by`, what that gives.
        source: of this collection only.
    """

    subscription: str
    start: Asked
    until: Asked | None = None
    key: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """
    What a command would ask for, as it was read.

    Attributes:
        letters: the dead letters that carry the changes, in the order of the stream.
        read: how many changes the range has, of all handlers.
        pending: how many are left out since they are yet to be handled.
        refused: how many are left out since they cannot be given to the handler, or are too large to be kept.
        generation: of the layout in force.
    """

    subscription: str
    start: StreamPlace
    until: Timestamp
    key: str | None
    letters: Sequence[Mapping[str, Any]]
    read: int
    pending: int
    refused: int
    generation: int
    leader: str | None

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "subscription": self.subscription,
            "from": self.start.iso,
            "until": iso(self.until),
            "key": self.key,
            "read": self.read,
            "count": len(self.letters),
            "pending": self.pending,
            "refused": self.refused,
            "leads": self.leader is not None,
            "changes": [{"id": token_data(each["resumeToken"]), "key": each["key"]} for each in self.letters],
        }


def plan_replay(wiring: Wiring, asking: Asking, progress: Progress = lambda *_: None) -> ReplayPlan:
    """
    Read a range of the stream, and find what the handler would get of it. Changes nothing.

    Raises:
        CommandRefusedError: no such handler or place; too many changes; or some of them are dead letters already, or of
            a parked key.
        AccessError: the stream or the oplog may not be read.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    name = asking.subscription
    with reached(wiring) as store:
        lease = store.leases.read() or {}
        layouts = layouts_in_force(lease, store.subscriptions.read_all())
        if name not in layouts:
            raise refuse_unknown(wiring, name, sorted(layouts))
        handler = next((each for each in wiring.handlers if each.name == name), None)
        if handler is None:
            raise CommandRefusedError(f"Subscription {name} {UNSERVED.replace('; then retry', '; then repeat')}.")
        reach = Reach.of(wiring.client)
        start = place_of(wiring, asking.start, reach, "--from")
        until = reach.at(asking.until if asking.until is not None else Asked(NOW, word=NOW), "--until")
        if until <= start.time:
            raise CommandRefusedError(f"--until {iso(until)} is not behind --from {start.iso}: nothing lies between.")
        waiting = sum(each.subscription == name for each in store.replays.read())
        positions = {image.index: image.data for image in store.partitions.of({name: layouts[name].generation})}
        found = _Range(wiring, handler, layouts[name], asking, positions, REQUESTS_MAX - waiting)
        found.read(start, until, reach.now, progress)
        letters = _letters(wiring.name, layouts[name], name, found.changes)
        _refuse_known(store, name, letters)
        _refuse_parked(store, name, layouts[name].generation, letters)
        return ReplayPlan(
            subscription=name,
            start=start,
            until=until,
            key=None if asking.key is None else shown(key_of(asking.key)),
            letters=letters,
            read=found.count,
            pending=found.pending,
            refused=found.refused,
            generation=layouts[name].generation,
            leader=leader_in(lease),
        )


def replay(wiring: Wiring, plan: ReplayPlan, *, over_newer: bool, reason: str | None) -> None:
    """
    Store what was planned as dead letters, and ask for their replays: all of them, or none.

    Args:
        over_newer: let them write over what newer changes have written.
        reason: why, for people.

    Raises:
        CommandRefusedError: some of them are dead letters, are to be replayed, or are of a parked key, by now; or the
            handler was sent back behind them, or has another layout. Nothing is asked for.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    details = {
        "from": plan.start.iso,
        "until": iso(plan.until),
        "key": plan.key,
        "count": len(plan.letters),
        "over_newer": over_newer,
    }
    note = make_intervention("replay", plan.subscription, reason, details)
    with reached(wiring) as store:
        refuse_renaming(store, [plan.subscription])
        passed = _passed(plan)
        _refuse_moved(wiring, store, plan, passed)
        _refuse_known(store, plan.subscription, plan.letters)
        _refuse_parked(store, plan.subscription, plan.generation, plan.letters)
        said = f"Not failed: {note['by']} has asked for its replay" + (f", {note['reason']}" if reason else "")
        store.dead_letters.keep([{**letter, "error": said} for letter in plan.letters])
        letters = [_letter(each) for each in plan.letters]
        asked = store.replays.request_all(
            letters,
            plan.generation,
            over_newer=over_newer,
            unless=lambda session: not store.positions.note_passed(session, note, passed),
        )
        if not asked:
            _refuse_moved(wiring, store, plan, passed)
            raise CommandRefusedError(
                "Some of these changes are being replayed already, or were discarded at this moment: nothing is asked "
                "for; look at `dead-letters list`, then repeat the command.",
            )


# -- reading ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Range:
    """
    What one handler gets of a range of the stream.

    Attributes:
        positions: comparable part of the committed token, by partition.
        limit: how many changes it may be.
    """

    wiring: Wiring
    handler: Handler
    layout: Layout
    asking: Asking
    positions: Mapping[int, str]
    limit: int
    changes: list[PendingChange] = field(default_factory=list)
    count: int = 0
    pending: int = 0
    refused: int = 0
    _bytes: int = 0

    def read(self, start: StreamPlace, until: Timestamp, now: Timestamp, progress: Progress) -> None:
        """Read it, from a place up to a time, or until the stream has no more of what had happened by now."""
        selectors, scope = self.wiring.stream()
        (selector,) = (each for each in selectors if each.name == self.handler.name)
        admission = Admission(selector, self._rule(), self.layout, None)
        end, told_at = token_data(token_before(until)), monotonic()
        with closing(read_from(self.wiring, scope, start.time, seconds=READ_SECONDS)) as items:
            for number, item in enumerate(items):
                token = dict(item["_id"])
                if token_data(token) >= end or (number and isinstance(item, PassedPlace) and _time(token) >= now):
                    break
                if not isinstance(item, PassedPlace) and token_data(token) > token_data(start.token):
                    self.count += 1
                    time = time_of_token(token, start.time)
                    raw = bytes(item.raw)  # type: ignore[attr-defined]
                    event = ChangeEvent(Mark(token, token_data(token), time), event_of(raw), raw)
                    self._take(admission.admit(event))
                if monotonic() - told_at > _PROGRESS_SECONDS:
                    told_at = monotonic()
                    progress(str(iso(time_of_token(token, start.time))), self.count, len(self.changes))

    def _rule(self) -> Any:
        try:
            rule = self.layout.key.partition(":")[2]
            return self.handler.partitioner_named(rule, self.wiring.options, self.wiring.handlers)
        except ConfigurationError as error:
            raise CommandRefusedError(
                f"The partition rule of {self.handler.name} is another one by now, and its layout is not: {error}",
            ) from error

    def _take(self, change: PendingChange | None) -> None:
        if change is None or not self._is_wanted(change):
            return
        if change.data > self.positions.get(change.index, ""):
            self.pending += 1
            return
        if change.refusal is not None or kept(change.raw).kind == "name":
            self.refused += 1
            return
        self.changes.append(change)
        self._bytes += len(change.raw)
        if len(self.changes) > self.limit or self._bytes > BYTES_MAX:
            raise CommandRefusedError(
                f"More than {len(self.changes) - 1} changes of {self.handler.name} lie there, and no more may be "
                "replayed at a time: narrow it with --until or --key, and go on from there when they are done; or "
                "rewind the handler.",
            )

    def _is_wanted(self, change: PendingChange) -> bool:
        event, asking = event_of(change.raw), self.asking
        if asking.source is not None:
            ns = event.get("ns") or {}
            if f"{ns.get('db')}.{ns.get('coll')}" != asking.source:
                return False
        if asking.key is None:
            return True
        if self.layout.key.partition(":")[2] != "_id":
            return change.hash == partition_hash(key_of(asking.key))
        key = event.get("documentKey") or {}
        return "_id" in key and partition_hash(key["_id"]) == partition_hash(key_of(asking.key))


def _time(token: Mapping[str, Any]) -> Timestamp:
    return time_of_token(token, None) or Timestamp(0, 0)


# -- letters ---------------------------------------------------------------------------------------


def _letters(bridge: str, layout: Layout, subscription: str, changes: Sequence[PendingChange]) -> list[dict[str, Any]]:
    """Dead letters of changes that were handled, each with the place at which its replay may write."""
    following: dict[int, int] = {}
    letters = []
    for change in reversed(changes):
        time = change.mark.cluster_time
        second = (time.time if time is not None else 0) * SHIFT
        fence = min(second - REPLAYS_MAX - 1, following.get(change.index, second) - REPLAYS_MAX)
        following[change.index] = fence = max(fence, 0)
        generation = layout.generation if second >= layout.generation else 0
        found = kept(change.raw)
        letter = dead_letter(
            bridge=bridge,
            subscription=subscription,
            token=change.mark.token,
            key=describe(change.raw),
            change=found.change,
            error="",
            traceback="",
            attempts=0,
            place=Place(generation, change.index, 0, fence, change.hash),
            cause=SELECTED,
            kept=found.kind,
        )
        # Whose letter it is must be known, also where its change is older than the layout: see `state/names.py`.
        letters.append({**letter, "layout": Int64(layout.generation)})
    return letters[::-1]


def _letter(document: Mapping[str, Any]) -> Letter:
    """What a request needs to know of a letter."""
    return Letter(
        document_id=document["_id"],
        id=token_data(document["resumeToken"]),
        subscription=document["subscription"],
        key=document["key"],
        at=None,
        cause=SELECTED,
        error="",
        traceback="",
        attempts=0,
        replays=0,
        kept=document["kept"],
        bytes=None,
        token=document["resumeToken"],
        place=Place(0, document["partition"], 0, document["fence"], document["hash"] % (1 << 64)),
    )


def _passed(plan: ReplayPlan) -> Passed:
    """How far each partition must have come, so that nothing of a plan is yet to be handled."""
    places: dict[int, str] = {}
    for letter in plan.letters:
        index, data = int(letter["partition"]), token_data(letter["resumeToken"])
        places[index] = max(places.get(index, ""), data)
    return Passed(plan.subscription, plan.generation, places)


def _refuse_moved(wiring: Wiring, store: Store, plan: ReplayPlan, passed: Passed) -> None:
    """Somebody may have moved positions while the plan was looked at: what is to be handled comes anyway."""
    if not store.positions.are_passed(passed):
        raise CommandRefusedError(
            f"Subscription {plan.subscription} of bridge {wiring.name} was sent back, or has a new layout, since its "
            "changes were read: nothing is asked for; repeat the command.",
        )


def _refuse_known(store: Store, subscription: str, letters: Sequence[Mapping[str, Any]]) -> None:
    """What is a dead letter already has a replay of its own; but for one that this command has left when it ended."""
    ids = [each["_id"] for each in letters]
    asked = {each.letter for each in store.replays.read()}
    known = store.dead_letters.collection.find({"_id": {"$in": ids}}, {"cause": 1, "replays": 1})
    others = [
        each["_id"] for each in known if each.get("cause") != SELECTED or each.get("replays") or each["_id"] in asked
    ]
    if others:
        raise CommandRefusedError(
            f"{len(others)} of these changes are dead letters of {subscription} already: look at `dead-letters list "
            f"{subscription}`, replay or discard them, then repeat the command.",
        )


def _refuse_parked(store: Store, subscription: str, generation: int, letters: Sequence[Mapping[str, Any]]) -> None:
    """What waits for a parked key comes first."""
    parked = store.partitions.parked_keys(subscription, generation)
    found = [each["key"] for each in letters if unsigned(each["hash"]) in parked]
    if found:
        raise CommandRefusedError(
            f"{len(found)} of these changes belong to keys of {subscription} that are parked, the first is {found[0]}: "
            f"what waits for these comes first; look at `dead-letters list {subscription}`, replay or discard them, "
            "then repeat the command.",
        )
