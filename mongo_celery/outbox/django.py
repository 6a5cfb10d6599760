"""
Saving instances of Django models (django-mongodb-backend) with their tasks, and the session of Django's transactions.

Nothing of Django is imported before an instance of a model arrives. The values are those that Django's own `save`
would write: `pre_save` of each field, then its value for the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pymongo.client_session import ClientSession
from pymongo.errors import DuplicateKeyError
from pymongo.results import InsertOneResult, UpdateResult

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.transaction.frames import current, part_of

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
            stack.enter_context(part_of(session))
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


def save(instance: Any, collection: str, *, insert: Insert, update: Update) -> Any:
    """
    Save an instance through an outbox.

    Args:
        instance: of a model.
        collection: name of the outbox's collection.
        insert: the outbox's `insert_one`, with what is to follow.
        update: the outbox's `update_one`, with what is to follow.

    Inside `django_mongodb_backend.transaction.atomic` its session is used, and nothing is dispatched before the
    commit. Afterwards the instance has its primary key, and `pre_save` and `post_save` were sent.

    Raises:
        ConfigurationError: it is no instance of a model, one of another collection, or has an expression as a value.
        IntegrityError: Django's; a value that must be unique is there already.
        OutboxRefusedError: nothing was written.
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

    from django.db import IntegrityError, connections, router
    from django.db.models.signals import post_save, pre_save

    model = type(instance)
    instance._prepare_related_fields_for_save(operation_name="save")  # noqa: SLF001 - as Django's own `save` does first
    alias = router.db_for_write(model, instance=instance)
    connection = connections[alias]
    pre_save.send(sender=model, instance=instance, raw=False, using=alias, update_fields=None)
    try:
        created = _write(instance, connection, insert, update)
    except DuplicateKeyError as error:
        raise IntegrityError(str(error)) from error
    instance._state.adding, instance._state.db = False, alias  # noqa: SLF001 - Django's own place for it
    post_save.send(sender=model, instance=instance, created=created, raw=False, using=alias, update_fields=None)
    return instance


def _write(instance: Any, connection: Any, insert: Insert, update: Update) -> bool:
    """Whether the document is new."""
    adding = instance._state.adding  # noqa: SLF001
    meta = instance._meta  # noqa: SLF001
    session = getattr(connection, "session", None)
    values = {}
    for field in meta.concrete_fields:
        value = field.pre_save(instance, adding)
        if hasattr(value, "resolve_expression"):
            raise ConfigurationError(
                f"{field.name} is a database expression, such as F(); use outbox.update_one with an update operator."
            )
        prepared = field.get_db_prep_save(value, connection)
        if not field.primary_key:
            values[field.column] = prepared
    column = meta.pk.column
    if instance.pk is None:
        inserted = insert(values, session=session)
        instance.pk = meta.pk.to_python(inserted.inserted_id)
        return True
    identity = meta.pk.get_db_prep_save(instance.pk, connection)
    if adding and meta.pk.has_default():  # Django takes it for a new one, too
        insert({column: identity, **values}, session=session)
        return True
    return update({column: identity}, {"$set": values}, upsert=True, session=session).matched_count == 0
