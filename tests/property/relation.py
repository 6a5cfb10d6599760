"""
What one write of the bridge may make of what is stored: the relation that models and product have in common.

`judge` takes what is stored and one write (a document, or those of one transaction), and names the step that each
document has made. A document that no step explains is a complaint. The searches judge every move of their models by it
(`test_relation`), so that it allows what a model does; a run of the product is recorded and judged by the same steps
(`tests/rig/conformance.py`), so that product and model cannot part unnoticed. Nothing is imported from the package.

A step says what a document becomes, from its old value and from what the write chose freely; all else stays. Numbers
that a model does not have are None. Places (tokens) only compare: the smallest one is falsy, and is before all changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Key = tuple[str, str]
"""A collection and an `_id`: a partition's is `bridge/handler/partitioning/index`, as in the product."""

FLOWING, HALTED, PAUSED = "flowing", "halted", "paused"


class Lease(NamedTuple):
    """A lease; `terms` are all that it ever had."""

    term: int
    terms: frozenset[int]
    holder: Any = None
    until: float = 0.0


class Handler(NamedTuple):
    """A handler's position; `gap` names the last period that was given up."""

    term: int
    watermark: Any
    partitioning: int = 0
    gap: Any = None


class Claim(NamedTuple):
    """The right of one execution; that of a replay ends before its first change."""

    owner: Any
    first: int
    last: int
    until: float


class Handled(NamedTuple):
    owner: Any
    last: int
    place: Any


class Partition(NamedTuple):
    """A partition; `mark`: changes up to there are stored. `parked`: the keys that wait."""

    term: int
    fence: int | None
    committed: int
    place: Any
    mark: Any
    claim: Claim | None = None
    handled: Handled | None = None
    state: str = FLOWING
    head: Any = None
    parked: frozenset[Any] = frozenset()


class StoredChange(NamedTuple):
    """A change with its bytes; `term`: the last one that has stored it."""

    term: int
    place: Any


class Letter(NamedTuple):
    """A dead letter; `parked`: the key for which it waits."""

    place: Any
    parked: Any = None


Document = Lease | Handler | Partition | StoredChange | Letter
Documents = Mapping[str, Mapping[str, Document]]
"""By collection and `_id`."""

Changes = Mapping[str, Sequence[Any]]
"""The places of the changes that each partition is to handle, by its `_id`, in order; as far as they are known."""

ROW = "~"
"""In a place of the product: a snapshot row. It lies between the changes, and holds no watermark."""


class Write(NamedTuple):
    """
    One write.

    Args:
        before: all documents before it.
        written: what it has written, in order; a transaction may write a document twice. None for one that it removed.
        at: its time, by the server's clock.
        changes: the changes before it.
    """

    before: Documents
    written: Sequence[tuple[Key, Document | None]]
    at: float
    changes: Changes

    @property
    def changed(self) -> Mapping[Key, Document | None]:
        return dict(self.written)

    def old(self, collection: str, id_: str) -> Any:
        return self.before[collection].get(id_)

    def new(self, collection: str, id_: str) -> Any:
        last = [document for key, document in self.written if key == (collection, id_)]
        return last[-1] if last else self.old(collection, id_)

    def all_new(self, collection: str, handler: str) -> Iterator[Any]:
        ids = self.before[collection].keys() | {id_ for each, id_ in self.changed if each == collection}
        found = (self.new(collection, id_) for id_ in ids if id_.startswith(handler + "/"))
        return (each for each in found if each is not None)

    def has_term(self, id_: str, term: int) -> bool:
        lease = self.new("leases", id_.partition("/")[0])
        return lease is not None and term in lease.terms

    def is_move(self, id_: str) -> bool:
        """Return True if a person moves positions: the write takes the lease's next term, and nobody has the lease."""
        bridge = id_.partition("/")[0]
        before, after = self.old("leases", bridge), self.new("leases", bridge)
        return before is not None and after is not None and after.term > before.term and not after.holder

    def holds_letter(self, id_: str, place: Any) -> bool:
        letters = [key[1] for key, each in self.changed.items() if isinstance(each, Letter) and each.place == place]
        return any(handler_of(each) == handler_of(id_) for each in letters)


def handler_of(id_: str) -> str:
    """Return the `_id` of the handler of a partition."""
    return "/".join(id_.split("/", 2)[:2])


Rule = Callable[[Any, Any, Write, str], Any]
"""What a step makes of the old document, from that, the new one, the write and the `_id`. None: it is not this step."""


def _above(old: int | None, new: int | None) -> int | None:
    """Return a number that has grown: the new one if it has. Where none is modelled there is none."""
    return None if old is None or new is None else max(old + 1, new)


# --- the lease ----------------------------------------------------------------------------------------------


def _acquire(old: Lease, new: Lease, write: Write, _: str) -> Lease | None:
    """Whoever finds the lease free or expired takes the next term."""
    free = not old.holder or old.until <= write.at
    return _of_next_term(old, new)._replace(holder=new.holder, until=new.until) if free and new.holder else None


def _of_next_term(old: Lease, new: Lease) -> Lease:
    term = max(old.term + 1, new.term)
    return old._replace(term=term, terms=old.terms | {term})


def _take_term(old: Lease, new: Lease, write: Write, _: str) -> Lease | None:
    """A person's move takes the next term while nobody leads."""
    free = not old.holder or old.until <= write.at
    return _of_next_term(old, new)._replace(holder=None, until=0.0) if free else None


# --- the handler --------------------------------------------------------------------------------------------


def _win_handler(old: Handler, new: Handler, write: Write, id_: str) -> Handler | None:
    """A take-over raises the term, to one that the lease has had."""
    return old._replace(term=max(old.term + 1, new.term)) if write.has_term(id_, new.term) else None


def _advance_watermark(old: Handler, new: Handler, write: Write, id_: str) -> Handler | None:
    """A watermark grows, and passes nothing that waits in a partition: it is stored, or not done."""
    if new.watermark <= old.watermark:
        return None
    for name, partition in write.before["partitions"].items():
        if name.startswith(f"{id_}/{old.partitioning}/") and isinstance(partition, Partition):
            waiting = _find_waiting(name, partition, new.watermark, write)
            if any(not _is_stored(name, partition, place, write) for place in waiting):
                return None
    return old._replace(watermark=new.watermark)


def _find_waiting(name: str, partition: Partition, watermark: Any, write: Write) -> list[Any]:
    places = write.changes.get(name, ())
    waiting = [*places[bisect_right(places, partition.place) : bisect_right(places, watermark)]]
    known = (partition.head, partition.handled.place if partition.handled else None)
    return [*waiting, *(each for each in known if each and each <= watermark and ROW not in str(each))]


def _is_stored(name: str, partition: Partition, place: Any, write: Write) -> bool:
    return bool(place <= partition.mark) and write.old("backlog", f"{name}/{place}") is not None


def _give_up_history(old: Handler, new: Handler, _: Write, __: str) -> Handler | None:
    """A period that the oplog does not hold is given up, and noted."""
    return old._replace(watermark=new.watermark, gap=new.gap) if new.gap != old.gap and not new.watermark else None


def _move_handler(old: Handler, new: Handler, write: Write, id_: str) -> Handler | None:
    """A person sends the watermark to a place, under a term of the move."""
    if not write.is_move(id_) or not write.has_term(id_, new.term):
        return None
    return old._replace(term=max(old.term + 1, new.term), watermark=new.watermark, gap=new.gap)


# --- executions ---------------------------------------------------------------------------------------------


def _claim(old: Partition, new: Partition, write: Write, _: str) -> Partition | None:
    """An execution claims what follows the position, under a fencing token above all others."""
    free = old.claim is None or old.claim.until <= write.at
    claim = new.claim
    if claim is None or not free or old.handled is not None or old.state != FLOWING:
        return None
    if claim.first != old.committed + 1 or claim.last < old.committed:
        return None
    return old._replace(claim=claim, fence=_above(old.fence, new.fence))


def _beat(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    if old.claim is None or new.claim is None:
        return None
    return old._replace(claim=old.claim._replace(until=new.claim.until))


def _handle(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    claim, handled = old.claim, new.handled
    if claim is None or handled is None or handled.owner != claim.owner:
        return None
    return old._replace(handled=handled) if _is_in(claim, handled.last) and handled.place > old.place else None


def _is_in(claim: Claim, number: int) -> bool:
    return claim.first <= number <= claim.last


def _committed(old: Partition) -> Partition:
    handled = old.handled
    if handled is None:
        return old
    return old._replace(committed=handled.last, place=handled.place, claim=None, handled=None)


def _finish(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    if old.claim is None or old.handled is not None or not _is_in(old.claim, new.committed) or new.place <= old.place:
        return None
    return old._replace(committed=new.committed, place=new.place, claim=None)


def _set_aside(old: Partition, new: Partition, write: Write, id_: str) -> Partition | None:
    """The position passes one change that has a dead letter. Tokens are kept free, and its key may be parked."""
    is_next = old.claim is not None and old.handled is None and new.committed == old.claim.first
    if not is_next or new.place <= old.place or not write.holds_letter(id_, new.place):
        return None
    grown = old.parked | new.parked
    fence = None if old.fence is None else max(old.fence, new.fence or 0)
    return old._replace(committed=new.committed, place=new.place, claim=None, fence=fence, parked=grown)


def _progress(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    """The position moves inside a run, and the claim goes on with the next change."""
    if old.claim is None or new.claim is None or old.handled is not None:
        return None
    if not old.claim.first <= new.committed < old.claim.last or new.place <= old.place:
        return None
    claim = old.claim._replace(first=new.committed + 1, until=new.claim.until)
    return old._replace(committed=new.committed, place=new.place, claim=claim)


def _halt(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    if old.claim is None or old.handled is not None or not new.head or new.head <= old.place:
        return None
    return old._replace(claim=None, state=HALTED, head=new.head)


# --- listeners and persons ----------------------------------------------------------------------------------


def _win(old: Partition, new: Partition, write: Write, id_: str) -> Partition | None:
    """A take-over raises the term, commits what is handled, and leaves a claim alone."""
    return _committed(old)._replace(term=max(old.term + 1, new.term)) if write.has_term(id_, new.term) else None


def _mark(old: Partition, new: Partition, write: Write, id_: str) -> Partition | None:
    """Changes are stored up to a place: the one at that place is, unless it is done."""
    is_there = new.mark <= old.place or write.new("backlog", f"{id_}/{new.mark}") is not None
    return old._replace(mark=new.mark) if new.mark and new.mark > old.mark and is_there else None


def _retry(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    """A person, or what was given up, lets the first change begin anew. Who runs it is refused."""
    if old.handled is not None:
        return None
    return old._replace(state=FLOWING, head=None, claim=None, fence=_above(old.fence, new.fence))


def _void(old: Partition, new: Partition, write: Write, _: str) -> Partition | None:
    """The listener of a limited handler ends messages, and a claim that has lapsed."""
    if old.handled is not None or (old.claim is not None and old.claim.until > write.at):
        return None
    return old._replace(claim=None, fence=_above(old.fence, new.fence))


def _skip(old: Partition, new: Partition, _: Write, __: str) -> Partition | None:
    if old.state != HALTED or old.handled is not None:
        return None
    passed = old._replace(committed=old.committed + 1, place=old.head, claim=None)
    return passed._replace(state=FLOWING, head=None, fence=_above(old.fence, new.fence))


def _move(old: Partition, new: Partition, write: Write, id_: str) -> Partition | None:
    """A person sends the partition to a place, under a term of the move. What ran or was halted there is over."""
    if not write.is_move(id_) or not write.has_term(id_, new.term):
        return None
    base = _committed(old)
    state = PAUSED if old.state == PAUSED else FLOWING
    moved = base._replace(term=max(old.term + 1, new.term), fence=_above(old.fence, new.fence), place=new.place)
    return moved._replace(claim=None, state=state, head=None, mark=new.mark if not new.mark else old.mark)


STEPS: Mapping[type, Mapping[str, Rule]] = {
    Lease: {
        "acquire": _acquire,
        "renew": lambda old, new, *_: old._replace(until=new.until) if old.holder else None,
        "release": lambda old, *_: old._replace(holder=None, until=0.0),
        "raise": lambda old, new, *_: _of_next_term(old, new) if old.holder else None,  # it has found a larger one
        "take a term": _take_term,
    },
    Handler: {
        "win a handler": _win_handler,
        "watermark": _advance_watermark,
        "give up history": _give_up_history,
        "move a handler": _move_handler,
        "repartition": lambda old, new, *_: old._replace(partitioning=max(old.partitioning + 1, new.partitioning)),
    },
    Partition: {
        "claim": _claim,
        "beat": _beat,
        "handle": _handle,
        "commit": lambda old, *_: _committed(old) if old.handled is not None else None,
        "finish": _finish,
        "set aside": _set_aside,
        "progress": _progress,
        # A claim ends without a success: a retry, a wait, a crash, a replay.
        "give up": lambda old, *_: old._replace(claim=None) if old.handled is None else None,
        "halt": _halt,
        "win": _win,
        "mark": _mark,
        "clear": lambda old, new, *_: old._replace(mark=new.mark) if not new.mark and old.mark <= old.place else None,
        # The last dead letter of the key is gone. The claim of its replay may end with it.
        "release a key": lambda old, new, *_: old._replace(
            parked=old.parked & new.parked, claim=new.claim and old.claim
        ),
        "pause": lambda old, *_: old._replace(state=PAUSED) if old.state == FLOWING else None,
        "resume": lambda old, *_: old._replace(state=FLOWING) if old.state == PAUSED else None,
        "retry": _retry,
        "void": _void,
        "skip": _skip,
        "move": _move,
    },
    StoredChange: {"store again": lambda old, new, *_: old._replace(term=max(old.term + 1, new.term))},
    Letter: {"change a letter": lambda _old, new, *_: new},
}
"""The steps of a document that stays, by what it is."""

_POSITIONS = frozenset({"commit", "finish", "set aside", "progress", "win", "skip"})
"""Steps by which a position passes changes that were done, or set aside."""


# --- documents that come and go -----------------------------------------------------------------------------


def _create(new: Document, write: Write, id_: str) -> str | None:
    if isinstance(new, Lease):
        return "create a lease" if not new.holder else None
    if isinstance(new, Handler):
        return "create a handler" if write.has_term(id_, new.term) else None
    if isinstance(new, Partition):
        return "create" if _is_new(new, write, id_) else None
    return "store" if isinstance(new, StoredChange) else "write a letter"


def _is_new(new: Partition, write: Write, id_: str) -> bool:
    """Return True if a new partition has nothing to do, and begins where the handler is, or where others ended."""
    handler = write.new("handlers", handler_of(id_))
    plain = Partition(new.term, new.fence, 0, new.place, new.mark)
    if handler is None or new != plain or new.mark or not write.has_term(id_, new.term):
        return False
    replaced = _replaced(write, id_)
    if not replaced:
        return bool(new.place <= handler.watermark)
    return all(new.place >= old.place and (new.fence or 0) >= (old.fence or 0) for old in replaced)


def _replaced(write: Write, id_: str) -> list[Partition]:
    scope = handler_of(id_) + "/"
    gone = [name for (collection, name), new in write.changed.items() if collection == "partitions" and new is None]
    return [write.old("partitions", name) for name in gone if name.startswith(scope)]


def _remove(old: Document, write: Write, id_: str) -> str | None:
    if isinstance(old, StoredChange):
        partition = write.new("partitions", id_.rpartition("/")[0])
        return "remove" if partition is None or old.place <= partition.place else None
    if isinstance(old, Letter):
        return "remove a letter"
    handler = write.new("handlers", handler_of(id_))
    if handler is None:
        return "forget"
    if not isinstance(old, Partition):
        return None
    if id_.split("/")[2] == str(handler.partitioning):
        return None
    is_former = write.old("handlers", handler_of(id_)) == handler
    return "replace" if is_former or _is_drained(old, write) else None


def _is_drained(old: Partition, write: Write) -> bool:
    runs = old.claim is not None and old.claim.until > write.at
    return old.state == FLOWING and old.handled is None and not runs and old.mark <= old.place and not old.parked


# --- a write ------------------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    steps: tuple[str, ...]
    complaints: tuple[str, ...]


def judge(write: Write) -> Judgement:
    """Name the step of each document that a write has changed, and complain of those that have made none."""
    steps: list[str] = []
    complaints: list[str] = []
    current: dict[Key, Document | None] = {}
    for key, new in write.written:
        old = current.get(key, write.old(*key))
        current[key] = new
        if old == new:
            continue
        step = name_step(old, new, write, key[1])
        if step is None:
            complaints.append(f"no step makes of {key[0]} {key[1]}: {old}\n  what it is now: {new}")
            continue
        steps.append(step)
        if step in _POSITIONS and isinstance(old, Partition) and isinstance(new, Partition):
            complaints += _find_passed(old, new, write, key[1])
    return Judgement(tuple(steps), (*complaints, *_find_unparked(write)))


def name_step(old: Any, new: Any, write: Write, id_: str) -> str | None:
    if old is None:
        return _create(new, write, id_)
    if new is None:
        return _remove(old, write, id_)
    found = (name for name, rule in STEPS[type(old)].items() if rule(old, new, write, id_) == new)
    return next(found, None)


def _find_passed(old: Partition, new: Partition, write: Write, id_: str) -> Iterator[str]:
    """P5: what is done only now was not passed by the watermark before, unless it was stored and marked."""
    handler = write.old("handlers", handler_of(id_))
    in_force = handler is not None and id_.split("/")[2] == str(handler.partitioning)
    is_passed = in_force and old.place < new.place <= handler.watermark and ROW not in str(new.place)
    if is_passed and not new.place <= old.mark:
        yield f"the watermark {handler.watermark} of {id_} had passed {new.place}, which was neither done nor stored"


def _find_unparked(write: Write) -> Iterator[str]:
    """P2: a key is parked in a partition as long as a dead letter waits for it, and no longer."""
    touched = set()
    for (collection, id_), new in write.changed.items():
        old = write.old(collection, id_)
        touched |= {(handler_of(id_), hash_) for hash_ in _parked_in(old) ^ _parked_in(new)}
    for handler, hash_ in touched:
        if write.new("handlers", handler) is None:
            continue
        waits = any(each.parked == hash_ for each in write.all_new("dead_letters", handler))
        parked = any(hash_ in each.parked for each in write.all_new("partitions", handler))
        if waits != parked:
            state = "waits for a key that is not parked" if waits else "waits no more for a key that is parked"
            yield f"a dead letter of {handler} {state}: {hash_}"


def _parked_in(document: Any) -> frozenset[Any]:
    if isinstance(document, Letter):
        return frozenset() if document.parked is None else frozenset({document.parked})
    return document.parked if isinstance(document, Partition) else frozenset()
