"""
MongoEngine documents in an outbox's collection: read them as before, and save them with their tasks.

A strict model cannot read a document with an unknown field, and the outbox's field exists while entries are pending. If
you `save` an instance that was made with a primary key, MongoEngine replaces the whole document, including pending
entries. `OutboxMixin` fixes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mongoengine.base import BaseField
from mongoengine.context_managers import set_write_concern
from pymongo import ReplaceOne, UpdateOne

from mongo_celery.errors import ConfigurationError, OutboxRefusedError
from mongo_celery.outbox import Event, Outbox

_NO_FOLLOWERS: tuple[Any, ...] = ()


class PendingEventsField(BaseField):  # type: ignore[misc] # has no types
    """
    The field of an outbox in a MongoEngine document: always None, never written, and not in its JSON.

    `OutboxMixin` has one.
    """

    def __set__(self, instance: Any, value: object) -> None:
        """Refuse a value: only the outbox writes it."""
        self.validate(value)
        instance._data[self.name] = None  # noqa: SLF001 - as fields do

    def to_python(self, value: object) -> None:
        """Return None, because entries are not part of the document."""

    def to_mongo(self, value: object) -> None:
        """Return None, so that a write cannot remove entries."""

    def validate(self, value: object, clean: bool = True) -> None:  # noqa: ARG002 - as fields are asked
        """Accept only None. Any other value would be an attempt to write it."""
        if value is not None:
            self.error("This field belongs to the outbox, so it cannot be set. Give tasks= and events= to save().")


class OutboxMixin:
    """
    A MongoEngine document in an outbox's collection.

    Put it before MongoEngine's class::

        class Order(OutboxMixin, mongoengine.Document):
            customer = mongoengine.StringField(required=True)

        Order(customer="Ann").save(outbox=orders, tasks=[send_receipt.s(STORED_ID)])

    The class can read documents with pending entries. No `save` removes them, even of an instance that was made with a
    primary key. Not promised: writes that bypass `save`, such as a collection's own `replace_one`.
    """

    pendingEvents = PendingEventsField()  # noqa: N815 - its name in the document

    _followers: tuple[Outbox, Sequence[Any], Sequence[Event]] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class in which MongoEngine's methods come first."""
        super().__init_subclass__(**options)
        own = cls.__mro__.index(OutboxMixin)
        if any("_save_create" in vars(each) for each in cls.__mro__[:own] if not issubclass(each, OutboxMixin)):
            raise ConfigurationError(
                f"OutboxMixin must come before MongoEngine's class. Write class {cls.__name__}(OutboxMixin, Document).",
            )

    def save(
        self,
        *args: Any,
        outbox: Outbox | None = None,
        tasks: Sequence[Any] = _NO_FOLLOWERS,
        events: Sequence[Event] = _NO_FOLLOWERS,
        **options: Any,
    ) -> Any:
        """
        Save like MongoEngine, in one write with tasks and events.

        Args:
            args: arguments of MongoEngine's `save`.
            outbox: the outbox of the document's collection. Needed for tasks or events.
            tasks: signatures. `STORED_ID` among their arguments becomes the document's `_id`.
            events: messages to other consumers.
            options: keyword arguments of MongoEngine's `save`.

        Raises:
            ConfigurationError: you gave tasks or events without an outbox, or an outbox of another collection.
            OutboxRefusedError: nothing was written. Also raised if the document was deleted and the write had only
                tasks and events.
        """
        if outbox is not None:
            self._check(outbox)
        elif tasks or events:
            raise ConfigurationError(
                "Tasks and events need the outbox of the document. Write save(outbox=..., tasks=...)."
            )
        # A receiver of MongoEngine's signals may save the document again, without the tasks of this call.
        before, self._followers = self._followers, None if outbox is None else (outbox, tasks, events)
        try:
            saved = super().save(*args, **options)  # type: ignore[misc] # MongoEngine's
        finally:
            self._followers = before
        if outbox is not None:
            outbox.dispatch(saved.to_mongo()["_id"])
        return saved

    def _check(self, outbox: Outbox) -> None:
        mine, its = self._own("_get_collection")().full_name, outbox.collection.full_name
        if mine != its:
            raise ConfigurationError(
                f"{type(self).__name__} is stored in {mine!r}, but this outbox is for {its!r}. Pass the outbox of "
                "that collection."
            )

    def _own(self, name: str) -> Any:
        """Return an attribute of MongoEngine's classes, which have no types."""
        return getattr(self, name)

    def _with_followers(self, document: Mapping[str, Any], **options: Any) -> Any:
        if self._followers is None:
            return document
        outbox, tasks, events = self._followers
        return outbox.with_tasks(document, tasks, events, **options)

    def _save_create(self, doc: Any, force_insert: bool, write_concern: Any) -> Any:
        """Save a document that MongoEngine considers new. One with a primary key may already exist."""
        if not force_insert and "_id" in doc:
            which = self._own("_integrate_shard_key")(doc, {"_id": doc["_id"]})
            with set_write_concern(self._own("_get_collection")(), write_concern) as collection:
                if collection.bulk_write([self._replacement(which, doc)]).matched_count:
                    return doc["_id"]
        return super()._save_create(self._with_followers(doc), True, write_concern)  # type: ignore[misc]

    def _replacement(self, which: Mapping[str, Any], doc: Any) -> UpdateOne:
        """Return the whole document without its pending entries."""
        if self._followers is not None:
            outbox, tasks, events = self._followers
            carried: UpdateOne = outbox.with_tasks(ReplaceOne(which, doc), tasks, events)
            return carried
        kept = {"_id": "$_id", "pendingEvents": "$pendingEvents"}
        return UpdateOne(which, [{"$replaceWith": {"$mergeObjects": [{"$literal": doc}, kept]}}])

    def _get_update_doc(self) -> Any:
        """Return MongoEngine's operators for the changes. Tasks need an operator even without a change."""
        operators = super()._get_update_doc()  # type: ignore[misc]
        if self._followers is None:
            return operators
        return self._with_followers(operators or {"$set": {}}, id=self._own("to_mongo")()["_id"])

    def _save_update(self, doc: Any, save_condition: Any, write_concern: Any) -> Any:
        """Save a stored document. If only tasks are written, do not create a document for them."""
        if self._followers is None or save_condition is not None or super()._get_update_doc():  # type: ignore[misc]
            return super()._save_update(doc, save_condition, write_concern)  # type: ignore[misc]
        which = self._own("_integrate_shard_key")(doc, {"_id": doc["_id"]})
        with set_write_concern(self._own("_get_collection")(), write_concern) as collection:
            if not collection.update_one(which, self._get_update_doc()).matched_count:
                raise OutboxRefusedError(
                    f"Document {doc['_id']!r} of {collection.full_name} was deleted before this save, so nothing "
                    "was written. To create it again, save it with force_insert=True.",
                    document=doc["_id"],
                )
        return doc["_id"], False
