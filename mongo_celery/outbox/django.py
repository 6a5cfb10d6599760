"""
Saving instances of Django models (django-mongodb-backend) with their tasks, and the session of Django's transactions.

Nothing of Django is imported before an instance of a model arrives. An instance is saved by its own `save`, which may
be overridden. Only Django's write inside of that is the outbox's. The values are those that Django would write:
`pre_save` of each field, then its value for the database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from pymongo.client_session import ClientSession
from pymongo.errors import DuplicateKeyError
from pymongo.results import InsertOneResult, UpdateResult

from mongo_celery.errors import ConfigurationError, OutboxRefusedError
from mongo_celery.mongo.transaction.scopes import current, join_transaction

Insert = Callable[..., InsertOneResult]
Update = Callable[..., UpdateResult]

_VENDOR = "mongodb"


@contextmanager
def transaction(using: str | None) -> Iterator[ClientSession]:
    """
    Django's `atomic`, and the session of its transaction; inside one of `transactional` over Django's client, a part.

    Args:
        using: as of `mongodb_alias`.

    Raises:
        ConfigurationError: as of `mongodb_alias`; or a transaction of another client of the same cluster is open here.
    """
    from django.db import connections
    from django_mongodb_backend.transaction import atomic  # type: ignore[import-untyped]

    from mongo_celery.locking.django import django_client, joined

    alias = mongodb_alias(using)
    session = current(django_client(alias))
    with ExitStack() as stack:
        if session is not None:
            stack.enter_context(join_transaction(session))
            stack.enter_context(joined(session, alias))
        stack.enter_context(atomic(using=alias))
        yield connections[alias].session


def mongodb_alias(using: str | None = None) -> str:
    """
    The alias of the database of MongoDB that is meant.

    Args:
        using: an alias; None for Django's default, or where that is a relational one, for the only one of MongoDB's.

    Raises:
        ConfigurationError: the database is not MongoDB's; or none was named, and there is none or are several.
    """
    from django.db import DEFAULT_DB_ALIAS, connections

    if using is None and connections[DEFAULT_DB_ALIAS].vendor != _VENDOR:
        found = sorted(alias for alias in connections if connections[alias].vendor == _VENDOR)
        if len(found) != 1:
            which = f"several, {', '.join(found)}" if found else "none"
            raise ConfigurationError(
                f"Django's default database is {connections[DEFAULT_DB_ALIAS].display_name}'s, and of MongoDB's there "
                f"is {which}: name the one that is meant with using=..."
            )
        return str(found[0])
    alias = using or DEFAULT_DB_ALIAS
    if connections[alias].vendor != _VENDOR:
        raise ConfigurationError(
            f"the database {alias!r} is {connections[alias].display_name}'s; name one of django-mongodb-backend."
        )
    return alias


@dataclass(slots=True)
class _Saving:
    """
    An instance that is being saved through an outbox.

    Attributes:
        instance: of a model.
        insert: the outbox's `insert_one`, with what is to follow.
        update: the outbox's `update_one`, with what is to follow.
        is_written: whether Django has come to its write.
    """

    instance: Any
    insert: Insert
    update: Update
    is_written: bool = False


_SAVING: ContextVar[_Saving | None] = ContextVar("mongo_celery_outbox_saving", default=None)


def save(instance: Any, collection: str, *, insert: Insert, update: Update, options: Mapping[str, Any]) -> Any:
    """
    Call an instance's own `save`, and write through an outbox where Django would write the instance.

    Inside `django_mongodb_backend.transaction.atomic` its session is used, and nothing is dispatched before the
    commit. If `save` writes the instance more than once, the first write carries the tasks.

    Args:
        instance: of a model.
        collection: name of the outbox's collection.
        insert: the outbox's `insert_one`, with what is to follow.
        update: the outbox's `update_one`, with what is to follow.
        options: of the instance's `save`.

    Raises:
        ConfigurationError: it is no instance of a model, one of another collection, or has an expression as a value.
        IntegrityError, DatabaseError: Django's, as of its own `save`.
        OutboxRefusedError: nothing was written; also where the instance's `save` has not saved it.
    """
    meta = getattr(instance, "_meta", None)
    if meta is None or not hasattr(meta, "concrete_fields"):
        raise ConfigurationError(f"{type(instance).__name__} is no Django model; use insert_one or update_one.")
    if meta.db_table != collection:
        raise ConfigurationError(
            f"{type(instance).__name__} is stored in {meta.db_table!r}, and this outbox is on {collection!r}; make one "
            "for each collection.",
        )
    if len(meta.get_parent_list()) and not meta.proxy:
        raise ConfigurationError(f"{type(instance).__name__} inherits from a model with a collection of its own.")
    around = _SAVING.get()
    if around is not None and around.instance is instance:
        raise ConfigurationError(
            f"save() of {type(instance).__name__} saves the instance by its outbox, which calls save() again. Nothing "
            "was written. Call super().save() there, and the outbox's save from outside."
        )
    _install()
    saving = _Saving(instance, insert, update)
    token = _SAVING.set(saving)
    try:
        instance.save(**options)
    finally:
        _SAVING.reset(token)
    if not saving.is_written:
        raise OutboxRefusedError(
            f"save() of {type(instance).__name__} has not saved the instance, so its tasks and events are not stored."
        )
    return instance


def _install() -> None:
    """Have Django's write of an instance ask for an outbox; a second time changes nothing."""
    from django.db.models import Model

    own: Any = Model._save_table  # noqa: SLF001 - where Django writes, between its own `save` and its signals
    if getattr(own, "_mongo_celery_outbox", False):
        return

    @wraps(own)
    def save_table(self: Any, raw: bool = False, cls: Any = None, *rest: Any, **options: Any) -> Any:
        saving = _SAVING.get()
        if saving is None or saving.instance is not self or saving.is_written:
            return own(self, raw, cls, *rest, **options)
        updated = _write(saving, *rest, **options)
        saving.is_written = True  # not if it fails: a `save` that tries again writes the tasks, too
        return updated

    save_table._mongo_celery_outbox = True  # type: ignore[attr-defined] # noqa: SLF001
    Model._save_table = save_table  # noqa: SLF001


def _write(
    saving: _Saving,
    force_insert: Any = False,
    force_update: bool = False,
    using: str | None = None,
    update_fields: Collection[str] | None = None,
) -> bool:
    """Write an instance as Django would; return True if it was there."""
    from django.db import DatabaseError, IntegrityError, connections

    instance, connection = saving.instance, connections[using]
    meta, session = instance._meta, getattr(connection, "session", None)  # noqa: SLF001
    must_be_there = bool(force_update or update_fields)
    if must_be_there and instance.pk is None:
        raise ValueError("Cannot force an update in save() with no primary key.")  # Django's own words
    is_new = force_insert or (instance._state.adding and meta.pk.has_default())  # noqa: SLF001 - as Django takes it
    is_inserted = not must_be_there and (is_new or instance.pk is None)
    adding = bool(is_inserted or instance._state.adding)  # noqa: SLF001
    values = _values_of(instance, connection, update_fields, adding=adding)
    column = meta.pk.column
    try:
        if is_inserted:
            identity = {} if instance.pk is None else {column: meta.pk.get_db_prep_save(instance.pk, connection)}
            inserted = saving.insert({**identity, **values}, session=session)
            instance.pk = meta.pk.to_python(inserted.inserted_id)
            return False
        this = {column: meta.pk.get_db_prep_save(instance.pk, connection)}
        done = saving.update(this, {"$set": values}, upsert=not must_be_there, session=session)
    except DuplicateKeyError as error:
        raise IntegrityError(str(error)) from error
    if must_be_there and not done.matched_count:
        raise DatabaseError("Forced update did not affect any rows.")  # Django's own words
    return bool(done.matched_count)


def _values_of(
    instance: Any, connection: Any, update_fields: Collection[str] | None, *, adding: bool
) -> dict[str, Any]:
    """Return what Django would write, but the primary key, by column."""
    values = {}
    for field in instance._meta.concrete_fields:  # noqa: SLF001
        is_left_out = update_fields and not {field.name, field.attname} & set(update_fields)
        if field.primary_key or is_left_out or getattr(field, "generated", False):
            continue
        value = field.pre_save(instance, adding)
        if hasattr(value, "resolve_expression"):
            raise ConfigurationError(
                f"{field.name} is a database expression, such as F(); use outbox.update_one with an update operator."
            )
        values[field.column] = field.get_db_prep_save(value, connection)
    return values
