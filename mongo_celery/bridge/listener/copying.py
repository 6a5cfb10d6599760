"""
Copying what is stored of a subscription to the partitions of its new layout, and what stands there with it.

The old partitions are closed, and nothing is stored or marked there any more; so what is copied does not change, and a
copy can be repeated. It lies under the generation of the new layout, which is this term's version: nobody else writes
there, and nobody reads there before the layout is in force.

A partition that stands does so because of its first change: that one has halted, waits for its retry, or must not
begin. So `state`, `head` and `retry` of the old partition go with it, in the stored change itself, and are put in force
when that becomes first in its new partition; two that meet there stand one after the other.

Keys that are parked are so in the partitions to which they belong now. What waits for them are dead letters, which do
not move.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bson.int64 import Int64
from pymongo.client_session import ClientSession

from mongo_celery.bridge.change import event_of, token_data, token_of
from mongo_celery.bridge.listener.admission import keyless
from mongo_celery.bridge.partitioning import Partitioner, document_hash
from mongo_celery.bridge.state.dead_letters import signed
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.spill import StoredChange
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_FIRST_CHUNK, _LEAST_CHUNK, _LARGEST_CHUNK = 500, 20, 4000
_CALL_SECONDS = 0.1
_READ_BYTES = 16 << 20
_STANDING = ("halted", "paused")
_FLOWING: Mapping[str, Any] = {"state": "flowing", "head": None, "retry": None}


class Copying:
    """
    The copying of one subscription.

    Args:
        subscription: under its old layout, all partitions of which are closed.
        images: of these, read after all that is to be copied was marked.
        layout: the new one; its generation is this term's version.
        rule: by which that spreads changes.
        session: in which the images were read.
        parked: hashes of the keys that are parked; the layout's key is as it was, where there are any.

    Attributes:
        inherited: fields that new partitions have from the old ones, by `_id`; complete when the copying is done.
    """

    def __init__(
        self,
        store: Store,
        subscription: Subscription,
        images: Sequence[Image],
        layout: Layout,
        rule: Partitioner,
        session: ClientSession,
        parked: Iterable[int] = (),
    ) -> None:
        self.inherited: dict[str, dict[str, Any]] = {}
        self._store = store
        self._subscription = subscription
        self._layout = layout
        self._session = session
        self._sources = [image for image in images if image.spilled is not None and image.spilled["to"] > image.data]
        self._left = deque((image, image.data) for image in self._sources)
        self._rekeyed = _rekeyed_by(rule, subscription.name) if layout.key != subscription.plan.layout.key else None
        self._stands = _all_stand(images)
        self._chunk = _FIRST_CHUNK
        self._single = ""
        self._uncarried = deque(self._sources)
        self._parked: dict[int, list[Int64]] = {}
        for hash_ in sorted(parked):
            self._parked.setdefault(hash_ % layout.partitions, []).append(Int64(signed(hash_)))
        self._uninspected = deque(range(layout.partitions) if self._sources or self._stands or self._parked else ())
        self._say_left([image for image in images if image not in self._sources])

    def work(self, until: float) -> bool:
        """
        Go on for a while, a call at least; whether all is done.

        Args:
            until: monotonic time.

        Raises:
            PyMongoError: to be called again; what was done stays done.
        """
        return all(time.monotonic() < until for _ in self._steps())

    def _steps(self) -> Iterator[None]:
        while self._left:
            image, after = self._left[0]
            place = self._copy_some(image, after)
            self._left.popleft()
            if place is not None:
                self._left.appendleft((image, place))
            yield
        while self._uncarried:
            self._carry(self._uncarried[0])
            self._single = max(self._single, self._unclean(self._uncarried[0]))
            self._uncarried.popleft()
            yield
        while self._uninspected:
            self._inspect(self._uninspected[0])
            self._uninspected.popleft()
            yield

    def _copy_some(self, image: Image, after: str) -> str | None:
        """As many as a server that is busy can copy within the time of a call, and no other thing has to wait long."""
        began, chunk = time.monotonic(), self._chunk
        self._chunk = max(chunk // 2, _LEAST_CHUNK)
        place = self._copy(image, after, chunk)
        seconds = time.monotonic() - began
        if seconds < _CALL_SECONDS:
            self._chunk = min(2 * chunk, _LARGEST_CHUNK)
        elif seconds < 2 * _CALL_SECONDS:
            self._chunk = chunk
        return place

    def _copy(self, image: Image, after: str, limit: int) -> str | None:
        spill, layout, until = self._store.spill, self._layout, _marked(image)
        where, to = self._old(image), self._new("")
        version, session = layout.generation, self._session
        if self._rekeyed is None:
            return spill.copy(where, after, until, to, layout.partitions, version, limit=limit, session=session)
        return spill.copy_by(
            where, after, until, to, layout.partitions, version, self._rekeyed, limit=limit, session=session
        )

    def _old(self, image: Image) -> str:
        return self._subscription.trackers[image.index].partition_id

    def _new(self, index: int | str) -> str:
        name, generation = self._subscription.name, self._layout.generation
        return self._store.partitions.partition_id(name, generation, 0)[:-1] + str(index)

    # -- what stands -------------------------------------------------------------------------------

    def _carry(self, image: Image) -> None:
        """Record with the first change of an old partition what this was."""
        first = self._first(image)
        if first is not None and image.stood is not None and image.stood > first.data:
            self._let_go(image, image.stood)
        if first is not None and self._is_gone(image, first):
            self._say_left([image])
        standing = self._standing(image, first) if first is not None else None
        if first is None or standing is None:
            return
        self._store.spill.stand(self._new(self._index(first)), first.data, standing)

    def _let_go(self, image: Image, data: str) -> None:
        """A change that has stood, and was rewound, does not stand again because it once did."""
        stood = self._store.spill.fetch(self._old(image), [data], self._session).get(data)
        if stood is not None and stood.standing is not None:
            self._store.spill.stand(self._new(self._index(stood)), data, _FLOWING)

    def _index(self, change: StoredChange) -> int:
        """Of its new partition."""
        return (change if self._rekeyed is None else self._rekeyed(change)).hash % self._layout.partitions

    def _first(self, image: Image) -> StoredChange | None:
        found = self._store.spill.read(
            self._old(image), image.data, _marked(image), limit=1, max_bytes=1, session=self._session
        )
        return found[0] if found else None

    def _standing(self, image: Image, first: StoredChange) -> Mapping[str, Any] | None:
        if first.standing is not None and image.stood != first.data:
            return None  # from a layout before, and yet to be put in force: it was copied with the change
        state, retry = image.was or "flowing", image.retry if is_counted(image) else None
        if retry is not None and retry.get("of") not in (None, first.data):
            retry = None
        if self._is_gone(image, first):
            state, retry = "flowing", None
        if state == "paused" and self._stands:
            state = "flowing"  # the whole layout is paused
        if state == "flowing" and retry is None and first.standing is None:
            return None
        return {"state": state, "head": image.head if state == "halted" else None, "retry": retry}

    def _is_gone(self, image: Image, first: StoredChange) -> bool:
        """Whether a partition had halted at a change that is no longer there; the first one now is another."""
        return image.was == "halted" and image.head is not None and token_data(image.head["resumeToken"]) != first.data

    def _say_left(self, images: Sequence[Image]) -> None:
        for image in images:
            if image.was in _STANDING and not self._stands:
                logger.warning(
                    "partition %s was %s, and has no change in front of it%s: in the new layout nothing stands in its "
                    "place",
                    self._old(image),
                    image.was,
                    ", since its handler no longer gets the one at which it halted" if image.was == "halted" else "",
                    extra={"event": "standing_left", "partition": self._old(image)},
                )

    # -- the new partitions ------------------------------------------------------------------------

    def _unclean(self, image: Image) -> str:
        """The place up to which changes of an old partition have to run one by one; empty where they need not."""
        count, after = image.single - image.committed, image.data
        while count > 0:
            changes = self._store.spill.read(
                self._old(image), after, _marked(image), limit=count, max_bytes=_READ_BYTES, session=self._session
            )
            if not changes:
                break
            count, after = count - len(changes), changes[-1].data
        return after if image.single > image.committed else ""

    def _inspect(self, index: int) -> None:
        """See what was copied to a new partition, and how it begins."""
        where = self._new(index)
        fields: dict[str, Any] = {"state": "paused"} if self._stands else {}
        if index in self._parked:
            fields["parkedKeys"] = self._parked[index]
        last = self._store.spill.last(where, self._session)
        if last is not None:
            marks = [image.spilled for image in self._sources if image.spilled is not None]
            oldest = min(marks, key=lambda mark: mark["since"])
            fields |= {"resumeToken": None, "spilled": {**oldest, "to": last.data}}
            if self._single:
                fields["single"] = Int64(self._store.spill.count(where, self._single, self._session))
        if fields:
            self.inherited[where] = fields


def is_counted(image: Image) -> bool:
    """Whether anything is counted of a partition's first change, it waits for its time, or stands for others."""
    retry = image.retry or {}
    return any(retry.get(name) for name in ("count", "crashes", "notBefore", "waiting", "error", "passedOver"))


def _marked(image: Image) -> str:
    return str(image.spilled["to"]) if image.spilled is not None else ""


def _all_stand(images: Sequence[Image]) -> bool:
    """Whether nothing has flowed, since a person has paused all that could."""
    states = {image.was for image in images}
    return "paused" in states and states <= set(_STANDING)


def _rekeyed_by(rule: Partitioner, name: str) -> Callable[[StoredChange], StoredChange]:
    """What gives changes their new hash; one that is refused already keeps the one by which it was refused."""

    def rekeyed(change: StoredChange) -> StoredChange:
        if change.refusal is not None:
            return change
        event = event_of(change.raw)
        try:
            return replace(change, hash=rule.hash(event))
        except Exception as error:  # noqa: BLE001 - a user's function may raise whatever it likes
            refusal = keyless(name, error)
            return replace(change, hash=document_hash(event), refusal=refusal, token=token_of(change.raw))

    return rekeyed
