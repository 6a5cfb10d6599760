"""
The argument of a bulk handler: consecutive changes of one partition, and a way to name the one that failed.

Pure but for `fenced`, which is that of a change: all of them were claimed together, so they bear one fencing token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from mongo_celery.bridge.change import Change, describe_change
from mongo_celery.errors import HandlerUsageError
from mongo_celery.mongo.identity import id_key

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession
    from pymongo.collection import Collection

    from mongo_celery.bridge.fenced import FencedCollection
    from mongo_celery.bridge.fenced.fence import Origin


class ChangeFailed(Exception):  # noqa: N818 - what a handler says, not an error of its own: see its cause
    """
    One change of a list has failed, and those before it are finished. `Changes.failed_at` makes it.

    Attributes:
        place: of the failed change in the list, from 0.
        changes: that list; empty in a copy that was stored somewhere.
    """

    def __init__(self, message: str, place: int, changes: Sequence[Change] = ()) -> None:
        super().__init__(message, place)
        self.place = place
        self.changes = changes

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args  # no documents: a result backend may keep it

    @property
    def error(self) -> Exception | None:
        """The error of the change; a missing `from` is the error that was being handled. None where none is."""
        found = self.__context__ if self.__cause__ is None and not self.__suppress_context__ else self.__cause__
        return found if isinstance(found, Exception) else None


class Changes(tuple[Change, ...]):
    """
    Changes of one partition, in order, as a handler of `on_changes` gets them: at least one.

    All of them were claimed together: they have one partition, one session and one fencing token.
    """

    __slots__ = ()

    def __new__(cls, changes: Iterable[Change]) -> Self:
        """Changes of one execution; a unit test may give a plain list to its handler instead."""
        made = super().__new__(cls, changes)
        if not made:
            raise HandlerUsageError("A handler of on_changes gets one change at least.")
        return made

    @property
    def session(self) -> ClientSession | None:
        """The open transaction's session in a handler with `transactional=True`, else None."""
        return self[0].session

    def with_session(self, session: ClientSession) -> Changes:
        """The same changes, bound to a transaction's session."""
        return Changes(change.with_session(session) for change in self)

    def fenced(self, collection: Collection[dict[str, Any]] | str) -> FencedCollection:
        """
        A view of a collection whose writes carry the fencing token of these changes, as `Change.fenced` gives it.

        Args:
            collection: a PyMongo collection, or `"db.collection"` on the bridge's cluster.

        Raises:
            HandlerUsageError: a change was built by hand, without a fence, or they have several.
        """
        if len({(change.partition, change.fencing_token) for change in self}) > 1:
            raise HandlerUsageError(
                "The changes of a list are of one partition and one execution, and these have several fences: in a "
                "unit test build all of them with the same one.",
            )
        return self[0].fence_collection(collection, None if self[0].fence.origin is None else self._origins)

    def _origins(self, collection: Collection[dict[str, Any]]) -> Callable[[Any], Origin | None]:
        """The last change of each document, by its `_id`; of any other `_id` only if all are of one document."""
        codec = collection.codec_options
        found = {id_key(change.document_key.get("_id"), codec): change.fence.origin for change in self}
        is_one = len({origin.document for origin in found.values() if origin is not None}) == 1
        last = self[-1].fence.origin if is_one else None
        return lambda document_id: found.get(id_key(document_id, codec), last)

    def failed_at(self, failed: int | Change) -> ChangeFailed:
        """
        Return the exception to raise, `from` the error, if one change failed and all before it are finished.

        Then retries and the failure policy concern that change alone, those before it are done, and those behind it
        are given again. Whoever raises anything else is given smaller lists until the change that fails is alone; so
        is who says it of another list than the one that was given.

        Args:
            failed: its place in this list, from 0, or the change itself.

        Raises:
            HandlerUsageError: the list has no such change.
        """
        if isinstance(failed, Change):
            place = next((at for at, change in enumerate(self) if change is failed), -1)
        else:
            place = failed if isinstance(failed, int) and not isinstance(failed, bool) else -1
        if not 0 <= place < len(self):
            raise HandlerUsageError(f"failed_at() takes a change of the list or its place, from 0 to {len(self) - 1}.")
        return ChangeFailed(f"its handler says that {describe_change(self[place])} has failed", place, self)
