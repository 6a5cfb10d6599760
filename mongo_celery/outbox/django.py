"""The session of Django's transactions (django-mongodb-backend). Django is imported at first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.transaction.scopes import current, join_transaction

_VENDOR = "mongodb"


@contextmanager
def transaction(using: str | None) -> Iterator[ClientSession]:
    """
    Yield the session of Django's `atomic`. Inside `transactional` over Django's client, join that transaction.

    Args:
        using: as in `mongodb_alias`.

    Raises:
        ConfigurationError: as in `mongodb_alias`, or a transaction of another client of the same cluster is open here.
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
    Return the alias of the MongoDB database.

    Args:
        using: an alias. None for Django's default or, if that is relational, the only MongoDB database.

    Raises:
        ConfigurationError: the database is not MongoDB's. Or none was named, and there is none or are several.
    """
    from django.db import DEFAULT_DB_ALIAS, connections

    if using is None and connections[DEFAULT_DB_ALIAS].vendor != _VENDOR:
        found = sorted(alias for alias in connections if connections[alias].vendor == _VENDOR)
        if len(found) != 1:
            which = f"several MongoDB databases, {', '.join(found)}" if found else "no MongoDB database"
            raise ConfigurationError(
                f"Django's default database is on {connections[DEFAULT_DB_ALIAS].display_name}, and the project has "
                f"{which}. Pass the alias of the right one with using=..."
            )
        return str(found[0])
    alias = using or DEFAULT_DB_ALIAS
    if connections[alias].vendor != _VENDOR:
        raise ConfigurationError(
            f"The database {alias!r} is on {connections[alias].display_name}. Pass the alias of a database of "
            "django-mongodb-backend."
        )
    return alias
