"""
An operator's work on the dead letters of a bridge: look at them, have them replayed, discard them.

A replay is asked for here, and dispatched by the listener, so that it runs where the changes of its key run (see
`state/replays.py`). What cannot be replayed is said in one sentence, and nothing is changed.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.commands import UNSERVED
from mongo_celery.bridge.operations.heads import event_as_json
from mongo_celery.bridge.partitioning import document_hash
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, STARTED, Letter, ParkedKey, ReplayRequest, Selection
from mongo_celery.bridge.state.replays import REQUESTS_MAX
from mongo_celery.bridge.state.subscriptions import Layout, layouts_in_force
from mongo_celery.errors import CommandRefusedError, ConfigurationError
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.wiring import Wiring

_LEAST_ID = 18  # the time and the number of an oplog entry: only changes of one transaction need more
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
            raise refuse_unknown(wiring, selection.subscription, names)
        for each in selection.ids:
            _check_id(wiring, replace(selection, ids=[each]), names)
        letters = store.dead_letters.find(selection, names, limit, skip=skip)
        has_all = not limit or (len(letters) < limit and (letters or not skip))
        count = skip + len(letters) if has_all else store.dead_letters.count_selected(selection, names)
        return _found(wiring, letters, count)


def find_by_document_ids(wiring: Wiring, document_ids: Sequence[str]) -> Found:
    """
    The dead letters that have these whole `_id`s, in this order; those that are gone are not among them.

    Raises:
        ServerUnavailableError, DeploymentError: as for the commands.
    """
    with reached(wiring):
        letters = wiring.store.dead_letters.headers(document_ids)
        return _found(wiring, letters, len(letters))


def _found(wiring: Wiring, letters: Sequence[Letter], count: int) -> Found:
    store = wiring.store
    leads = bool((store.leases.read() or {}).get("live"))
    return Found(count, letters, leads, store.dead_letters.list_parked_keys(letters))


def plan_replay(act: Act, found: Found, *, over_newer: bool) -> Plan:
    """Plan to run the handler again for dead letters; see `Operations.replay_dead_letters`."""

    def run(running: Act) -> PlanResult:
        return _report(
            act.wiring.name, found, _replay(running, found.letters, over_newer), "requested", "are to be replayed"
        )

    with reached(act.wiring):
        ahead = _replay(act, found.letters, over_newer, dry_run=True)
    return _plan(act, found, ahead, "requested", "would be replayed", "Run the handler again?", run)


def plan_discard(act: Act, found: Found) -> Plan:
    """Plan to throw dead letters away; see `Operations.discard_dead_letters`."""

    def run(running: Act) -> PlanResult:
        return _report(act.wiring.name, found, _discard(running, found.letters), "discarded", "were discarded")

    with reached(act.wiring):
        ahead = _discard(act, found.letters, dry_run=True)
    question = "Throw it away?" if len(found.letters) == 1 else "Throw them away?"
    return _plan(act, found, ahead, "discarded", "would be discarded", question, run)


def _plan(
    act: Act,
    found: Found,
    ahead: Sequence[LetterResult],
    result: str,
    words: str,
    question: str,
    run: Callable[[Act], PlanResult],
) -> Plan:
    report = _report(act.wiring.name, found, ahead, result, words)
    ids = short_ids([each.id for each in found.letters])
    named = [f"{id_}  {each.subscription}  {each.key}" for id_, each in zip(ids, found.letters, strict=True)]
    is_any = any(each.result == result for each in ahead)
    return Plan(
        command=act.command,
        lines=[*named, *report.lines],
        fields={"bridge": act.wiring.name, "count": found.count, "leads": found.leads, **report.fields},
        refused=report.refused,
        question=f"{number(len(found.letters), 'dead letter', 'dead letters')}. {question}",
        seen=" ".join(each.document_id for each in found.letters),
        act=partial(act.run, run) if is_any else None,
    )


def _report(bridge: str, found: Found, results: Sequence[LetterResult], result: str, words: str) -> PlanResult:
    """Return what a plan and its result say of each dead letter."""
    done = [each for each in results if each.result == result]
    first_ones = {each.id for each in done} - {each.id for each in found.letters}  # of parked keys
    lines = [each.reason for each in results if each.result == "unchanged" and each.reason]
    lines.append(f"{bridge}: {len(done)} of {found.count + len(first_ones)} dead letters {words}")
    follow = sum(each.follow for each in done)
    lines += [f"{number(follow, 'dead letter', 'dead letters')} of their keys follow, in order"] if follow else []
    if found.count > len(found.letters):
        lines.append(f"{found.count - len(found.letters)} more were not read: repeat the command, or raise --limit")
    if done and result == "requested" and not found.leads:
        lines.append("No listener is running: they are replayed when one leads.")
    return PlanResult(
        lines=lines,
        fields={result: len(done), "letters": [asdict(each) for each in results]},
        refused=[each.reason for each in results if each.result == "refused"],
    )


def _replay(act: Act, letters: Sequence[Letter], over_newer: bool, *, dry_run: bool = False) -> list[LetterResult]:
    """
    Ask for the replay of dead letters; those that cannot be replayed are refused, and do not keep the others.

    One that waits for a parked key is replayed with all that wait for that, from the first of them on.
    """
    store = act.wiring.store
    requests = _Requests(act, over_newer=over_newer, dry_run=dry_run)
    keys = store.dead_letters.list_parked_keys(letters)
    chosen = Counter((each.subscription, each.parked) for each in letters)
    ids = {each.document_id for each in letters}
    firsts: dict[str, LetterResult] = {}
    results = []
    for letter in letters:
        key = None if letter.parked is None else keys.get((letter.subscription, letter.parked))
        if key is None:
            results.append(requests.add(letter))
            continue
        if key.first not in firsts:
            first = letter if key.first == letter.document_id else store.dead_letters.header(key.first)
            if first is None:
                results.append(_result(letter, "refused", _MOVED_ON))
                continue
            is_chosen = key.first in ids
            others = key.count - chosen[key.subscription, key.hash] - (not is_chosen)
            firsts[key.first] = replace(requests.add(first), follow=max(others, 0))
            if not is_chosen:
                results.append(firsts[key.first])
        first_result = firsts[key.first]
        results.append(first_result if key.first == letter.document_id else _follow(letter, first_result))
    return results


def _follow(letter: Letter, first: LetterResult) -> LetterResult:
    """Return what happens to a letter behind the first one that waits for its key."""
    if first.result != "refused":
        return _result(letter, first.result, "" if first.result == "requested" else _ASKED)
    return _result(letter, "refused", f"waits for its key behind {first.id}, which cannot be replayed")


class _Requests:
    """The replays that one command asks for."""

    def __init__(self, act: Act, *, over_newer: bool, dry_run: bool) -> None:
        store = act.wiring.store
        self._act = act
        self._wiring = act.wiring
        self._over_newer = over_newer
        self._dry_run = dry_run
        self._asked = Counter(each.subscription for each in store.replays.read())
        self._layouts = layouts_in_force(store.subscriptions.read_all())
        self._handlers = {handler.name: handler for handler in act.wiring.handlers}
        self._parked: dict[str, Collection[int]] = {}

    def add(self, letter: Letter) -> LetterResult:
        """Ask for the replay of one letter."""
        name = letter.subscription
        if letter.replay is not None and not letter.replay.failed:
            return _result(letter, "unchanged", _ASKED)
        try:
            generation, partition, hash_ = self._place(letter)
        except CommandRefusedError as error:
            return _result(letter, "refused", str(error))
        if self._asked[name] >= REQUESTS_MAX:
            listed = self._act.line.changes("dead-letters", "list")
            reason = f"has to wait: {REQUESTS_MAX} dead letters of its handler are being replayed"
            return _result(letter, "refused", f"{reason}; repeat the command when `{listed}` shows fewer")
        outcome = "done"
        if not self._dry_run:
            outcome = self._wiring.store.replays.request(
                letter.document_id, generation=generation, partition=partition, hash_=hash_, over_newer=self._over_newer
            )
        if outcome != "done":
            return _result(letter, "unchanged", "is gone already" if outcome == "gone" else _ASKED)
        self._asked[name] += 1
        self._act.count("dead_letters", name)
        return _result(letter, "requested")

    def _place(self, letter: Letter) -> tuple[int, int, int]:
        """
        Return where a letter is to be replayed: generation, partition, and hash of its key.

        Raises:
            CommandRefusedError: it cannot be.
        """
        name, place = letter.subscription, letter.place
        handler, layout = self._handlers.get(name), self._layouts.get(name)
        if handler is None or layout is None:
            raise CommandRefusedError(UNSERVED)
        if letter.kept == "name":
            raise CommandRefusedError(_NOT_KEPT)
        if letter.token is None or letter.bytes is None or place is None:
            raise CommandRefusedError(_DAMAGED)
        if letter.replays >= REPLAYS_MAX:
            raise CommandRefusedError(_WORN)
        if place.term == layout.term:
            found = layout.term, place.partition, place.hash
        elif letter.parked is not None:
            found = layout.term, letter.parked % layout.partitions, letter.parked
        else:
            hash_ = _hash_again(self._wiring, letter, handler, layout)
            found = layout.term, hash_ % layout.partitions, hash_
        if letter.parked is None and self._over_newer and found[2] in self._parked_hashes(name, layout.term):
            raise CommandRefusedError(_OVERTAKES)  # targets would refuse those that wait: this one has a newer token
        return found

    def _parked_hashes(self, name: str, generation: int) -> Collection[int]:
        if name not in self._parked:
            self._parked[name] = self._wiring.store.partitions.collect_parked_hashes(name, generation)
        return self._parked[name]


def _hash_again(wiring: Wiring, letter: Letter, handler: Handler, layout: Layout) -> int:
    """Return the hash of a letter's key in a partitioning that came after it."""
    found = wiring.store.dead_letters.read(letter.document_id)
    if found is None or found[1] is None:
        raise CommandRefusedError(_DAMAGED)
    rule = layout.key.partition(":")[2]
    try:
        partitioner = handler.partitioner_named(rule, wiring.options, wiring.handlers)
    except ConfigurationError:
        raise CommandRefusedError(
            f"belongs to a partition by {rule!r}, a rule that this app does not have: repeat the command when `status` "
            "shows the partitioning by the new one"
        ) from None
    event = wrap_event(found[1])
    try:
        return partitioner.hash(event)
    except Exception:  # noqa: BLE001 - a user's function, on whatever bytes
        return document_hash(event)


def _discard(act: Act, letters: Sequence[Letter], *, dry_run: bool = False) -> list[LetterResult]:
    """
    Throw dead letters away, also damaged ones; not while they are being replayed.

    Where the first letter that waits for a parked key goes, and not all of them, the others are replayed. So the last
    one of a key goes first: none of those that are to go may be replayed in between.
    """
    store = act.wiring.store
    keys = store.dead_letters.list_parked_keys(letters)
    layouts = layouts_in_force(store.subscriptions.read_all())
    results: dict[str, LetterResult] = {}
    gone: Counter[tuple[str, int]] = Counter()
    for letter in sorted(letters, key=lambda each: each.order, reverse=True):
        layout = layouts.get(letter.subscription)
        outcome = "done" if dry_run else store.replays.discard(letter.document_id, layout)
        if outcome == "running":
            result = _result(letter, "refused", _RUNS)
        elif outcome == "gone":
            result = _result(letter, "unchanged", "is gone already")
        else:
            result = _result(letter, "discarded")
            act.count("dead_letters", letter.subscription)
            key = None if letter.parked is None else keys.get((letter.subscription, letter.parked))
            if key is not None:
                gone[key.subscription, key.hash] += 1
                if key.first == letter.document_id and layout is not None:
                    result = replace(result, follow=key.count - gone[key.subscription, key.hash])
        results[letter.document_id] = result
    return [results[each.document_id] for each in letters]


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return the beginnings by which these can be told from each other."""
    length = _LEAST_ID
    for first, second in pairwise(sorted(set(ids))):
        common = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), None)
        length = max(length, (min(len(first), len(second)) if common is None else common) + 1)
    return [each[:length] for each in ids]


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
