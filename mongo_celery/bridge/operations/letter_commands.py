"""
What a person does with the dead letters of a bridge: look at them, have them replayed, throw them away.

A replay is asked for here, and dispatched by the listener, so that it runs where the changes of its key run (see
`state/replays.py`). What cannot be replayed is said in one sentence, and nothing is changed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mongo_celery.arguments import nearest
from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.operations.acts import Act, audited, reached
from mongo_celery.bridge.operations.commands import UNSERVED
from mongo_celery.bridge.operations.heads import event_as_json
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, STARTED, Letter, ParkedKey, ReplayRequest, Selection
from mongo_celery.bridge.state.replays import REQUESTS_MAX
from mongo_celery.bridge.state.subscriptions import Layout, layouts_in_force
from mongo_celery.errors import CommandRefusedError, ConfigurationError

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

_NOT_KEPT = "holds only the name of its change, which was too large to be kept: repair by hand, then discard it"
_DAMAGED = "is damaged, so it can only be discarded: somebody else has written to the collection dead_letters"
_WORN = f"has been started {REPLAYS_MAX} times: it can only be discarded"
_RUNS = (
    "is being replayed at this moment: repeat the command when that has ended; where no listener leads any more, after "
    "claim_ttl"
)
_MOVED_ON = "waits for a key that was just released: repeat the command"
_ASKED = "is being replayed already"
_OVERTAKES = "has a key that is parked: replay or discard first what waits for that"
_QUOTED_CHARS = 100


@dataclass(frozen=True, slots=True)
class LetterResult:
    """
    What a command did to one dead letter.

    Attributes:
        id: of the letter.
        result: `requested` (its replay), `discarded`, `unchanged` where that was so already, `refused`.
        reason: why it was not done; empty where it was.
        follow: how many letters that wait for the same parked key, and were not chosen, are replayed behind it.
    """

    id: str
    subscription: str
    key: str
    result: Literal["requested", "discarded", "unchanged", "refused"]
    reason: str = ""
    follow: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """
    Dead letters that were selected.

    Attributes:
        count: how many the selection has.
        letters: the first of them.
        leads: whether a listener leads; without one nothing is replayed.
        parked: the keys for which some of them wait, by subscription and hash.
    """

    count: int
    letters: Sequence[Letter]
    leads: bool
    parked: Mapping[tuple[str, int], ParkedKey] = field(default_factory=dict)

    def key_of(self, letter: Letter) -> ParkedKey | None:
        """The parked key for which a letter waits; None where it waits for none."""
        return None if letter.parked is None else self.parked.get((letter.subscription, letter.parked))


def find(wiring: Wiring, selection: Selection, limit: int, *, skip: int = 0) -> Found:
    """
    The first dead letters of a selection, behind those that are skipped.

    Raises:
        CommandRefusedError: the bridge has no such subscription, or an id names several letters.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring):
        store = wiring.store
        names = _names(wiring)
        if selection.subscription is not None and selection.subscription not in names:
            raise CommandRefusedError(
                f"Bridge {wiring.name} has no subscription {selection.subscription[:_QUOTED_CHARS]!r}"
                f"{nearest(selection.subscription, names)}; it has {', '.join(names) or 'none'}."
            )
        for each in selection.ids:
            _check_id(wiring, replace(selection, ids=[each]), names)
        letters = store.dead_letters.find(selection, names, limit, skip=skip)
        has_all = not limit or (len(letters) < limit and (letters or not skip))
        count = skip + len(letters) if has_all else store.dead_letters.count_selected(selection, names)
        return _found(wiring, letters, count)


def named(wiring: Wiring, document_ids: Sequence[str]) -> Found:
    """
    The dead letters that have these whole `_id`s, in this order; those that are gone are not among them.

    Raises:
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring):
        letters = wiring.store.dead_letters.headers(document_ids)
        return _found(wiring, letters, len(letters))


def read_newest(wiring: Wiring, limit: int) -> list[dict[str, Any]]:
    """
    Return the dead letters that were set aside last, the newest first, as JSON has them.

    Raises:
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring):
        found = _found(wiring, wiring.store.dead_letters.newest(limit), limit)
    return [plain(each, found.key_of(each)) for each in found.letters]


def _found(wiring: Wiring, letters: Sequence[Letter], count: int) -> Found:
    store = wiring.store
    leads = bool((store.leases.read() or {}).get("live"))
    return Found(count, letters, leads, store.dead_letters.list_parked_keys(letters))


def replay(
    wiring: Wiring, letters: Sequence[Letter], *, over_newer: bool, dry_run: bool, reason: str | None = None
) -> list[LetterResult]:
    """
    Ask for the replay of dead letters; those that cannot be replayed are refused, and the others are not kept by it.

    One that waits for a parked key is replayed with all that wait for that, from the first of them on.

    Args:
        over_newer: let them write over what newer changes have written.
        dry_run: only say what would be done.
        reason: why, for the audit record.
    """
    ids = [letter.id for letter in letters]
    with audited(wiring, "dead-letters replay", id=ids, over_newer=over_newer, reason=reason, dry_run=dry_run) as act:
        asking = _Asking(wiring, act, over_newer=over_newer, dry_run=dry_run)
        keys = wiring.store.dead_letters.list_parked_keys(letters)
        firsts: dict[str, LetterResult] = {}
        results = []
        for letter in letters:
            key = None if letter.parked is None else keys.get((letter.subscription, letter.parked))
            if key is None:
                results.append(asking.ask(letter))
                continue
            if key.first not in firsts:
                first = letter if key.first == letter.document_id else wiring.store.dead_letters.header(key.first)
                if first is None:
                    results.append(_result(letter, "refused", _MOVED_ON))
                    continue
                chosen = sum((each.subscription, each.parked) == (key.subscription, key.hash) for each in letters)
                is_chosen = any(each.document_id == key.first for each in letters)
                others = key.count - chosen - (not is_chosen)
                firsts[key.first] = replace(asking.ask(first), follow=max(others, 0))
                if not is_chosen:
                    results.append(firsts[key.first])
            first_result = firsts[key.first]
            results.append(first_result if key.first == letter.document_id else _behind(letter, first_result))
    return results


def _behind(letter: Letter, first: LetterResult) -> LetterResult:
    """What becomes of a letter behind the first one that waits for its key."""
    if first.result != "refused":
        return _result(letter, first.result, "" if first.result == "requested" else _ASKED)
    return _result(letter, "refused", f"waits for its key behind {first.id}, which cannot be replayed")


class _Asking:
    """The requests of one command."""

    def __init__(self, wiring: Wiring, act: Act, *, over_newer: bool, dry_run: bool) -> None:
        store = wiring.store
        asked = store.replays.read()
        self._act = act
        self._wiring = wiring
        self._over_newer = over_newer
        self._dry_run = dry_run
        self._room: dict[str, int] = {}
        for each in asked:
            self._room[each.subscription] = self._room.get(each.subscription, REQUESTS_MAX) - 1
        self._layouts = layouts_in_force(store.subscriptions.read_all())
        self._handlers = {handler.name: handler for handler in wiring.handlers}
        self._parked: dict[str, frozenset[int]] = {}

    def ask(self, letter: Letter) -> LetterResult:
        """Ask for the replay of one letter."""
        name, over_newer = letter.subscription, self._over_newer
        found: _Request | str | None = None
        if letter.replay is None or letter.replay.failed:
            found = _request(self._wiring, letter, self._handlers.get(name), self._layouts.get(name))
        if isinstance(found, _Request) and self._is_overtaking(letter, found):
            found = _OVERTAKES
        room = self._room.get(name, REQUESTS_MAX)
        if room <= 0 and isinstance(found, _Request):
            found = (
                f"has to wait: {REQUESTS_MAX} dead letters of its handler are being replayed; repeat the command "
                f"when `{self._wiring.line.changes('dead-letters', 'list')}` shows fewer"
            )
        result = _ask(self._wiring, letter, found, over_newer=over_newer, dry_run=self._dry_run)
        if result.result == "requested":
            self._room[name] = room - 1
            self._act.count("dead_letters", name)
        return result

    def _is_overtaking(self, letter: Letter, request: _Request) -> bool:
        """Whether targets would refuse what waits for a letter's key, since this one has a newer token."""
        if letter.parked is not None or not self._over_newer:
            return False
        name = letter.subscription
        if name not in self._parked:
            self._parked[name] = self._wiring.store.partitions.collect_parked_hashes(name, request.generation)
        return request.hash in self._parked[name]


def discard(
    wiring: Wiring, letters: Sequence[Letter], *, dry_run: bool, reason: str | None = None
) -> list[LetterResult]:
    """
    Throw dead letters away, also damaged ones; not while they are being replayed.

    Where the first letter that waits for a parked key goes, and not all of them, the others are replayed. So the last
    one of a key goes first: none of those that are to go may be replayed in between.

    Args:
        reason: why, for the audit record.
    """
    ids = [letter.id for letter in letters]
    with audited(wiring, "dead-letters discard", id=ids, reason=reason, dry_run=dry_run) as act:
        store = wiring.store
        keys = store.dead_letters.list_parked_keys(letters)
        layouts = layouts_in_force(store.subscriptions.read_all())
        results: dict[str, LetterResult] = {}
        gone: dict[tuple[str, int], int] = {}
        for letter in sorted(letters, key=lambda each: each.order, reverse=True):
            layout = layouts.get(letter.subscription)
            outcome = "done" if dry_run else store.replays.discard(letter.document_id, layout)
            result = _discarded(letter, outcome)
            if result.result == "discarded":
                act.count("dead_letters", letter.subscription)
            key = None if letter.parked is None else keys.get((letter.subscription, letter.parked))
            if key is not None and result.result == "discarded":
                count = gone[key.subscription, key.hash] = gone.get((key.subscription, key.hash), 0) + 1
                if key.first == letter.document_id and layout is not None:
                    result = replace(result, follow=key.count - count)
            results[letter.document_id] = result
    return [results[each.document_id] for each in letters]


def _discarded(letter: Letter, outcome: str) -> LetterResult:
    if outcome == "running":
        return _result(letter, "refused", _RUNS)
    return _result(letter, "unchanged", "is gone already") if outcome == "gone" else _result(letter, "discarded")


def change_of(wiring: Wiring, letter: Letter) -> dict[str, Any]:
    """Of the change of a letter: `event` as relaxed extended JSON, or `raw`, its bytes in base64; or neither."""
    with reached(wiring):
        found = wiring.store.dead_letters.read(letter.document_id)
    raw = None if found is None else found[1]
    event = event_as_json(raw) if raw is not None else None
    return {"event": event, "raw": base64.b64encode(raw).decode() if raw is not None and event is None else None}


def plain(letter: Letter, key: ParkedKey | None = None) -> dict[str, Any]:
    """
    A letter as JSON has it, without its change.

    Where it waits for a parked key, `behind` is the id of the first one that does; that one has how many are `waiting`
    behind it.

    Args:
        key: for which it waits; None where it waits for none.
    """
    place, asked = letter.place, letter.replay
    is_first = key is not None and key.first == letter.document_id
    return {
        "id": letter.id,
        "subscription": letter.subscription,
        "partition": place.partition if place is not None else None,
        "key": letter.key,
        "cause": letter.cause,
        "at": letter.at.isoformat() if letter.at is not None else None,
        "error": letter.error,
        "attempts": letter.attempts,
        "replays": letter.replays,
        "bytes": letter.bytes,
        "kept": letter.kept,
        "replay": _state(asked),
        "replay_error": asked.error if asked is not None else None,
        "parked": letter.parked is not None,
        "behind": key.first.split("/", 2)[-1] if key is not None and not is_first else None,
        "waiting": key.count - 1 if key is not None and is_first else 0,
        "passed": letter.passed,
        "passed_over": [*letter.passed_over],
    }


def _state(asked: ReplayRequest | None) -> str | None:
    if asked is None or asked.failed:
        return None
    if asked.state == STARTED:
        return "running"
    return "waiting" if asked.due_in > 0 else "requested"


# -- inside ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Request:
    generation: int
    partition: int
    hash: int


def _ask(
    wiring: Wiring, letter: Letter, found: _Request | str | None, *, over_newer: bool, dry_run: bool
) -> LetterResult:
    if found is None:
        return _result(letter, "unchanged", _ASKED)
    if isinstance(found, str):
        return _result(letter, "refused", found)
    outcome = "done"
    if not dry_run:
        outcome = wiring.store.replays.request(
            letter.document_id,
            generation=found.generation,
            partition=found.partition,
            hash_=found.hash,
            over_newer=over_newer,
        )
    if outcome == "done":
        return _result(letter, "requested")
    return _result(letter, "unchanged", "is gone already" if outcome == "gone" else _ASKED)


def _request(wiring: Wiring, letter: Letter, handler: Handler | None, layout: Layout | None) -> _Request | str:
    """Where a letter is to be replayed, or why it cannot be."""
    place = letter.place
    reasons = [
        (handler is None or layout is None, UNSERVED.replace("; then retry", "; then repeat the command")),
        (letter.kept == "name", _NOT_KEPT),
        (letter.token is None or letter.bytes is None or place is None, _DAMAGED),
        (letter.replays >= REPLAYS_MAX, _WORN),
    ]
    reason = next((reason for is_so, reason in reasons if is_so), None)
    if reason is not None or handler is None or layout is None:
        return reason or UNSERVED
    if place is not None and place.generation == layout.generation:
        return _Request(layout.generation, place.partition, place.hash)
    if letter.parked is not None:
        return _Request(layout.generation, letter.parked % layout.partitions, letter.parked)
    return _placed_anew(wiring, letter, handler, layout)


def _placed_anew(wiring: Wiring, letter: Letter, handler: Handler, layout: Layout) -> _Request | str:
    """The partition of a letter's key in a layout that came after it."""
    found = wiring.store.dead_letters.read(letter.document_id)
    if found is None or found[1] is None:
        return _DAMAGED
    rule = layout.key.partition(":")[2]
    try:
        partitioner = handler.partitioner_named(rule, wiring.options, wiring.handlers)
    except ConfigurationError:
        return (
            f"belongs to a partition by {rule!r}, a rule that this app does not have: repeat the command when `status` "
            "shows the layout by the new one"
        )
    event = wrap_event(found[1])
    try:
        hash_ = partitioner.hash(event)
    except Exception:  # noqa: BLE001 - a user's function, on whatever bytes
        hash_ = document_hash(event)
    return _Request(layout.generation, hash_ % layout.partitions, hash_)


def _result(
    letter: Letter, result: Literal["requested", "discarded", "unchanged", "refused"], reason: str = ""
) -> LetterResult:
    sentence = f"Dead letter {letter.id} ({letter.key}) {reason}." if reason else ""
    return LetterResult(letter.id, letter.subscription, letter.key, result, sentence)


def _names(wiring: Wiring) -> list[str]:
    """Subscriptions that may have dead letters: those that are stored, and those that have some."""
    stored = layouts_in_force(wiring.store.subscriptions.read_all())
    return sorted({*stored, *wiring.store.dead_letters.count()})


def _check_id(wiring: Wiring, selection: Selection, names: Sequence[str]) -> None:
    """An id names one letter: its whole token, or a beginning that no other letter has."""
    (id_,) = selection.ids
    if selection.subscription is not None:
        names = [selection.subscription]
    found = wiring.store.dead_letters.find(Selection(subscription=selection.subscription, ids=[id_]), names, 2)
    if not found:
        line = wiring.line.changes("dead-letters", "list")
        raise CommandRefusedError(f"Bridge {wiring.name} has no dead letter {id_!r}; see `{line}`.")
    if len(found) > 1 and id_ not in {each.id for each in found}:
        raise CommandRefusedError(
            f"{id_!r} begins the ids of several dead letters: give more of it, or name the handler too."
        )
