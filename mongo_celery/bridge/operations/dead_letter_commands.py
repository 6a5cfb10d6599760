"""
An operator's work on the dead letters of a bridge: find, replay, discard.

A replay is requested here, and the listener dispatches it among the changes of its key (see `state/replays.py`). A
refusal is one sentence, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.operations.acts import Act, PartResult, Step, reached, refuse_unknown
from mongo_celery.bridge.operations.commands import UNSERVED
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.bridge.operations.lookups import event_as_json
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, STARTED, DeadChange, ParkedKey, ReplayRequest, Selection
from mongo_celery.bridge.state.replays import REQUESTS_MAX
from mongo_celery.bridge.state.subscriptions import Layout, layouts_in_force
from mongo_celery.errors import CommandRefusedError, ConfigurationError
from mongo_celery.plan import Plan
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

LETTERS_MAX = 1000
"""Default limit of dead letters in one command."""
_LEAST_ID = 18  # time and number of an oplog entry: only changes of one transaction need more
_NOT_KEPT = (
    "cannot be replayed: its change was too large to store. Repair the effects of the change manually, then discard it"
)
_DAMAGED = "cannot be replayed: another program has damaged it in the collection dead_letters. Discard it"
_WORN = f"cannot be replayed again: it has been started {REPLAYS_MAX} times. Discard it"
_RUNS = (
    "is being replayed now. Repeat the command when the replay has ended, or after claim_ttl if no listener is running"
)
_MOVED_ON = "cannot be replayed yet, because its key was released a moment ago. Repeat the command"
_ASKED = "is being replayed already"
_GONE = "is gone already"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterResult(PartResult):
    """
    The effect of a command on one dead letter.

    Attributes:
        id: the id of the dead letter.
        follow: number of dead letters of the same parked key that were not chosen and are replayed after it.
    """

    id: str
    key: str
    follow: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """
    The selected dead letters.

    Attributes:
        count: number in the selection.
        letters: the first dead letters.
        leads: True if a listener leads. Without one nothing is replayed.
        parked: parked keys of these dead letters, by subscription and hash.
    """

    count: int
    letters: Sequence[DeadChange]
    leads: bool
    parked: Mapping[tuple[str, int], ParkedKey] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        """The whole ids of the dead letters."""
        return [each.id for each in self.letters]

    def key_of(self, letter: DeadChange) -> ParkedKey | None:
        """Return the parked key that a dead letter waits for. None if it waits for none."""
        return None if letter.parked is None else self.parked.get((letter.subscription, letter.parked))


class DeadLetterChoice(TypedDict, total=False):
    """
    A selection of dead letters.

    Attributes:
        ids: only dead letters with these ids, beginnings of ids, or whole `_id`s.
        key: only dead letters of the document with this `_id`, as JSON or text.
        since: only those that became dead letters at this time or later.
        until: only those that became dead letters before this time.
        limit: largest number, 1000 by default. All named `ids` are taken.
        skip: number of the first ones to leave out.
    """

    ids: Sequence[str]
    key: str | None
    since: datetime | None
    until: datetime | None
    limit: int
    skip: int


def find(wiring: Wiring, handler: str | None = None, **choice: Unpack[DeadLetterChoice]) -> Found:
    """
    Return dead letters by handler, then in stream order. Removed ones with whole `_id`s are left out.

    Raises:
        CommandRefusedError: the bridge has no such handler or dead letter, or an id is ambiguous.
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    keys = [] if choice.get("key") is None else keys_of(str(choice["key"]))
    selection = Selection(subscription=handler, keys=keys, since=choice.get("since"), until=choice.get("until"))
    ids, limit, skip = choice.get("ids", ()), choice.get("limit", LETTERS_MAX), choice.get("skip", 0)
    with reached(wiring) as store:
        # Handlers that may have dead letters: stored ones, and those with dead letters.
        names = sorted({*layouts_in_force(store.subscriptions.read_all()), *store.dead_letters.count()})
        if handler is not None and handler not in names:
            raise refuse_unknown(wiring, handler, names)
        if ids and all(each.startswith(f"{wiring.name}/") for each in ids):
            letters = store.dead_letters.headers(ids)
        elif ids:
            found = (_find_one(wiring, replace(selection, ids=[each]), names) for each in ids)
            letters = [*{each.document_id: each for each in found}.values()]
        else:
            letters = store.dead_letters.find(selection, names, limit, skip=skip)
        count = len(letters) if ids else store.dead_letters.count_selected(selection, names)
        leads = bool((store.leases.read() or {}).get("live"))
        return Found(count, letters, leads, store.dead_letters.list_parked_keys(letters))


def _find_one(wiring: Wiring, selection: Selection, names: Sequence[str]) -> DeadChange:
    """Return the dead letter of an id: its whole token, or an unambiguous beginning."""
    (id_,) = selection.ids
    found = wiring.store.dead_letters.find(selection, names, 2)
    if not found:
        listed = wiring.line.changes("dead-letters", "list")
        raise CommandRefusedError(f"Bridge {wiring.name} has no dead letter {id_!r}. To see all dead letters: {listed}")
    whole = [each for each in found if each.id == id_] or found
    if len(whole) > 1:
        raise CommandRefusedError(
            f"Several dead letters have an id that begins with {id_!r}. Give more of the id, or also the handler."
        )
    return whole[0]


def plan_replay(act: Act, found: Found, *, over_newer: bool) -> Plan:
    """Plan to run the handler again for dead letters, as in `Operations.replay_dead_letters`."""
    steps = partial(_plan_replays, act, found.letters, over_newer)
    return _plan_on_dead_letters(act, found, steps, "will be replayed", "Run the handler again?")


def plan_discard(act: Act, found: Found) -> Plan:
    """Plan to discard dead letters, as in `Operations.discard_dead_letters`."""
    question = "Throw it away?" if len(found.letters) == 1 else "Throw them away?"
    return _plan_on_dead_letters(act, found, partial(_plan_discards, act, found.letters), "were discarded", question)


def _plan_on_dead_letters(
    act: Act, found: Found, steps: Callable[[], Iterator[Step]], done: str, question: str
) -> Plan:
    """Plan an action on each dead letter. `done` is its participle in messages."""
    ids = short_ids(found.ids)

    def describe(results: Sequence[DeadLetterResult]) -> list[str]:
        chosen = [each for each in results if each.result in {"planned", "done"}]
        word = f"would be {done.rpartition(' ')[2]}" if any(each.result == "planned" for each in results) else done
        first_ones = {each.id for each in chosen} - {*found.ids}  # of parked keys
        lines = [each.reason for each in results if each.result == "unchanged" and each.reason]
        lines.append(f"{act.wiring.name}: {len(chosen)} of {found.count + len(first_ones)} dead letters {word}")
        if follow := sum(each.follow for each in chosen):
            more = number(follow, "later dead letter", "later dead letters")
            lines.append(f"{more} of the same keys will be replayed after them, in order")
        if found.count > len(found.letters):
            lines.append(f"{found.count - len(found.letters)} more were not read. Repeat the command, or raise --limit")
        if chosen and act.name.endswith("replay"):
            wait = "" if found.leads else " No listener is running, so the replay begins when you start one."
            listed = act.line.changes("dead-letters", "list")
            lines.append(f"Those that succeed disappear, the others stay with their error.{wait} To see them: {listed}")
        return lines

    with reached(act.wiring):
        return act.plan_parts(
            "dead_letters",
            steps,
            describe,
            lines=[f"{id_}  {each.subscription}  {each.key}" for id_, each in zip(ids, found.letters, strict=True)],
            fields={"count": found.count, "leads": found.leads},
            question=f"{number(len(found.letters), 'dead letter', 'dead letters')}. {question}",
            seen=" ".join(each.document_id for each in found.letters),
        )


def _plan_replays(act: Act, letters: Sequence[DeadChange], over_newer: bool) -> Iterator[Step]:
    """
    Request the replay of dead letters. Refuse impossible ones without stopping the others.

    For a parked key, all its waiting dead letters are replayed, from the first one.
    """
    store = act.wiring.store
    keys = store.dead_letters.list_parked_keys(letters)
    chosen = Counter((each.subscription, each.parked) for each in letters)
    ids = {each.document_id for each in letters}
    asked = Counter(each.subscription for each in store.replays.read())
    layouts = layouts_in_force(store.subscriptions.read_all())
    firsts: dict[str, DeadLetterResult] = {}

    def request_first(id_: str, write: Callable[[], DeadLetterResult]) -> DeadLetterResult:
        firsts[id_] = replace(write(), follow=firsts[id_].follow)
        return firsts[id_]

    for letter in letters:
        key = keys.get((letter.subscription, letter.parked)) if letter.parked is not None else None
        if key is None:
            yield _plan_request(act, letter, layouts, asked, over_newer)
            continue
        if key.first not in firsts:
            first = letter if key.first == letter.document_id else store.dead_letters.header(key.first)
            if first is None:
                yield _make_result(letter, "refused", _MOVED_ON), None
                continue
            is_chosen = key.first in ids
            others = key.count - chosen[key.subscription, key.hash] - (not is_chosen)
            planned, write = _plan_request(act, first, layouts, asked, over_newer)
            firsts[key.first] = replace(planned, follow=max(others, 0))
            yield firsts[key.first], None if write is None else partial(request_first, key.first, write)
        if key.first != letter.document_id:
            yield _plan_follower(letter, firsts[key.first]), None


def _plan_follower(letter: DeadChange, first: DeadLetterResult) -> DeadLetterResult:
    """Return the effect on a dead letter after the first one of its key."""
    if first.result == "refused":
        reason = f"waits for dead letter {first.id} of the same key, which cannot be replayed"
        return _make_result(letter, "refused", reason)
    return _make_result(letter, first.result, _ASKED if first.result == "unchanged" else "")


def _plan_request(
    act: Act, letter: DeadChange, layouts: Mapping[str, Layout], asked: Counter[str], over_newer: bool
) -> tuple[DeadLetterResult, Callable[[], DeadLetterResult] | None]:
    """Return the step that requests a replay. `asked` counts requests by handler."""
    name = letter.subscription
    if letter.replay is not None:
        return _make_result(letter, "unchanged", _ASKED), None
    try:
        term, partition, hash_ = _find_place(act.wiring, letter, layouts.get(name))
    except CommandRefusedError as error:
        return _make_result(letter, "refused", str(error)), None
    if asked[name] >= REQUESTS_MAX:
        reason = f"has to wait, because {REQUESTS_MAX} dead letters of its handler are being replayed"
        listed = act.line.changes("dead-letters", "list")
        return _make_result(letter, "refused", f"{reason}. Repeat the command when `{listed}` shows fewer"), None
    asked[name] += 1

    def write() -> DeadLetterResult:
        outcome = act.wiring.store.replays.request(
            letter.document_id, partitioning=term, partition=partition, hash_=hash_, over_newer=over_newer
        )
        if outcome == "done":
            return _make_result(letter, "done")
        return _make_result(letter, "unchanged", _GONE if outcome == "gone" else _ASKED)

    return _make_result(letter, "planned"), write


def _find_place(wiring: Wiring, letter: DeadChange, layout: Layout | None) -> tuple[int, int, int]:
    """
    Return the place of a dead letter's replay: term, partition, and hash of its key.

    Raises:
        CommandRefusedError: it cannot be replayed.
    """
    handler = next((each for each in wiring.handlers if each.name == letter.subscription), None)
    if handler is None or layout is None:
        raise CommandRefusedError(UNSERVED)
    if letter.kept == "name":
        raise CommandRefusedError(_NOT_KEPT)
    if letter.token is None or letter.bytes is None or letter.place is None:
        raise CommandRefusedError(_DAMAGED)
    if letter.replays >= REPLAYS_MAX:
        raise CommandRefusedError(_WORN)
    if letter.place.term == layout.term:
        return layout.term, letter.place.partition, letter.place.hash
    hash_ = letter.parked if letter.parked is not None else _hash_again(wiring, letter, handler, layout)
    return layout.term, hash_ % layout.partitions, hash_


def _hash_again(wiring: Wiring, letter: DeadChange, handler: Handler, layout: Layout) -> int:
    """Return the hash of a dead letter's key in a later partitioning."""
    found = wiring.store.dead_letters.read(letter.document_id)
    if found is None or found[1] is None:
        raise CommandRefusedError(_DAMAGED)
    rule = layout.key.partition(":")[2]
    try:
        partitioner = handler.partitioner_named(rule, wiring.options, wiring.handlers)
    except ConfigurationError:
        raise CommandRefusedError(
            f"cannot be replayed yet: its handler is still partitioned by {rule!r}, which this app does not have. "
            "Repeat the command when `status` shows the new partitioning"
        ) from None
    event = wrap_event(found[1])
    try:
        return partitioner.hash(event)
    except Exception:  # noqa: BLE001 - a user's function, on whatever bytes
        return document_hash(event)


def _plan_discards(act: Act, letters: Sequence[DeadChange]) -> Iterator[Step]:
    """
    Discard dead letters, including damaged ones, but not while they are being replayed.

    If the first dead letter of a parked key is discarded, the remaining ones are replayed. So the last one of a key
    goes first: none of the discarded ones may be replayed in between.
    """
    store = act.wiring.store
    keys = store.dead_letters.list_parked_keys(letters)
    layouts = layouts_in_force(store.subscriptions.read_all())
    gone: Counter[tuple[str, int | None]] = Counter()

    def discard(letter: DeadChange, planned: DeadLetterResult) -> DeadLetterResult:
        outcome = store.replays.discard(letter.document_id, layouts.get(letter.subscription))
        if outcome == "done":
            return replace(planned, result="done")
        gone[letter.subscription, letter.parked] -= 1
        return _make_result(letter, "unchanged", _GONE) if outcome == "gone" else _make_result(letter, "refused", _RUNS)

    for letter in sorted(letters, key=lambda each: each.order, reverse=True):
        place = letter.subscription, letter.parked
        gone[place] += 1
        key = keys.get((letter.subscription, letter.parked)) if letter.parked is not None else None
        is_first = key is not None and key.first == letter.document_id and letter.subscription in layouts
        follow = key.count - gone[place] if key is not None and is_first else 0
        planned = replace(_make_result(letter, "planned"), follow=follow)
        yield planned, partial(discard, letter, planned)


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return unambiguous beginnings of these ids."""
    length = _LEAST_ID
    for first, second in pairwise(sorted(set(ids))):
        common = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
        length = max(length, (min(len(first), len(second)) if common is None else common) + 1)
    return [each[:length] for each in ids]


def change_of(wiring: Wiring, letter: DeadChange, *, with_types: bool = False) -> dict[str, Any]:
    """Return a dead letter's change: `event` as Extended JSON, or `raw`, its bytes in base64, or neither."""
    with reached(wiring):
        found = wiring.store.dead_letters.read(letter.document_id)
    return event_as_json(None if found is None else found[1], with_types=with_types)


def plain(letter: DeadChange, key: ParkedKey | None = None) -> dict[str, Any]:
    """
    Return a dead letter in JSON form, without its change.

    If it waits for a parked key, `behind` is the id of the first waiting one, which has the number `waiting` after it.

    Args:
        key: the parked key. None if it waits for none.
    """
    place, asked = letter.place, letter.replay
    is_first = key is not None and key.first == letter.document_id
    return {
        "id": letter.id,
        "handler": letter.subscription,
        "partition": place.partition if place is not None else None,
        "key": letter.key,
        "cause": letter.cause,
        "at": letter.at.isoformat() if letter.at is not None else None,
        "error": letter.error,
        "attempts": letter.attempts,
        "replays": letter.replays,
        "bytes": letter.bytes,
        "kept": letter.kept,
        "replay": _describe_replay(asked),
        "replay_error": asked.error if asked is not None else None,
        "parked": letter.parked is not None,
        "behind": key.first.split("/", 2)[-1] if key is not None and not is_first else None,
        "waiting": key.count - 1 if key is not None and is_first else 0,
        "passed": letter.passed,
        "passed_over": [*letter.passed_over],
    }


def _describe_replay(asked: ReplayRequest | None) -> str | None:
    if asked is None:
        return None
    if asked.state == STARTED:
        return "running"
    return "waiting" if asked.due_in > 0 else "requested"


def _make_result(letter: DeadChange, result: Any, reason: str = "") -> DeadLetterResult:
    sentence = f"Dead letter {letter.id} ({letter.key}) {reason}." if reason else ""
    return DeadLetterResult(id=letter.id, handler=letter.subscription, key=letter.key, result=result, reason=sentence)
