"""
SELECT ... FOR UPDATE for Django querysets (django-mongodb-backend).

Django's `select_for_update()` does nothing on MongoDB, and its `atomic` repeats nothing: a conflict is an error. So
`joined` adds Django's queries to a transaction of `transactional`, which repeats its body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from django.core.exceptions import FieldDoesNotExist, ObjectDoesNotExist
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from django.db.models import Model, QuerySet
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionRequiredError
from mongo_celery.locking.call import LockOptions, lock_call, lock_ids
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.steps import run_sync
from mongo_celery.mongo.transaction import after_commit, current

_TRANSIENT = "TransientTransactionError"
_SELF = "self"


def django_client(using: str = DEFAULT_DB_ALIAS) -> MongoClient[Any]:
    """Return the client of Django's queries, for `transactional`."""
    connection = _mongo_connection(using)
    connection.ensure_connection()
    client: MongoClient[Any] = connection.connection
    return client


@contextmanager
def joined(session: ClientSession | None = None, using: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """
    Add Django's queries to a transaction of `transactional`. Also usable as a decorator.

    ::

        @transactional(django_client)
        def sell(seat, *, session):
            with joined(): ...

    Callbacks of `django_mongodb_backend.transaction.on_commit` run after the commit. They also run if the body caught
    an error from this block, because earlier writes are then committed. If an attempt fails, its callbacks are
    discarded. A transient error of the server is raised as the driver's error, so the body repeats: Django would hide
    it in a `DatabaseError`. An `atomic` inside is part of the same transaction.

    Args:
        session: the session from `transactional`. By default that of this thread's innermost transaction. If another
            thread handed over the session, pass it here.
        using: alias of the database in Django.

    Raises:
        TransactionRequiredError: there is no session, or it has no transaction in progress.
        ConfigurationError: it belongs to another client or transaction than Django's queries (see `django_client`), or
            `transactional` does not run its transaction, so its commit would not be noticed.
    """
    connection, client = _mongo_connection(using), django_client(using)
    session = current(client) if session is None else session
    if session is None:
        raise TransactionRequiredError(
            "joined() found no transaction of Django's client in this thread. Call it in a function of "
            "`transactional(django_client)`, or pass the session of another thread."
        )
    if not session.in_transaction:
        raise TransactionRequiredError
    if connection.session is session:
        with _transient_errors_shown():
            yield
        return
    if connection.session is not None:
        raise ConfigurationError(
            "Django is inside another transaction, and can serve only one at a time. Remove the `atomic` around "
            "`joined`, or call functions with independent=True outside of the outer `joined`."
        )
    if session.client is not client:
        raise ConfigurationError(
            "The session belongs to another client than Django's. Use transactional(django_client)."
        )
    if not after_commit(_nothing, session):
        raise ConfigurationError(
            "`transactional` does not run this session's transaction, so on_commit callbacks would never be "
            "called. Pass the session of transactional(django_client), or use Django's own atomic."
        )
    connection.session, connection.in_atomic_block_mongo, connection.run_on_commit = session, True, []
    try:
        with _transient_errors_shown():
            yield
    finally:
        waiting, connection.run_on_commit = connection.run_on_commit, []
        connection.session, connection.in_atomic_block_mongo = None, False
        for _, function, _ in waiting:
            after_commit(function, session)  # discarded if the attempt is aborted


@contextmanager
def _transient_errors_shown() -> Iterator[None]:
    """Raise the driver's error if Django hides a repeatable one in its own."""
    try:
        yield
    except DatabaseError as error:
        cause = error.__cause__
        if isinstance(cause, PyMongoError) and cause.has_error_label(_TRANSIENT):
            raise cause from None
        raise


def select_for_update(
    queryset: QuerySet[Any], *, of: Sequence[str] = (_SELF,), **options: Unpack[LockOptions]
) -> list[Any]:
    """
    Read a queryset's instances and lock their documents until the transaction ends.

    The queryset runs again, even if it has cached results. Then one write per collection locks the documents, in the
    order of the collections' names. A document that changed in between is a conflict. The models need no lock field:
    Django ignores unknown fields.

    Args:
        queryset: a queryset of instances, on MongoDB, with any filter, order or slice.
        of: the documents to lock: `"self"` and relations, such as `"hall"` or `"hall__city"`. By default the queryset's
            own documents. An empty tuple, which means all to Django, is refused. Without `select_related`, each
            relation needs separate queries. A reference to a missing document, which MongoDB allows, locks nothing.
        options: see `LockOptions` of `mongo_celery.locking`. `field` must not be a field of the model.

    Returns:
        The instances, in the queryset's order.

    Raises:
        TransactionRequiredError: it is not inside `joined` or `django_mongodb_backend.transaction.atomic`.
        DocumentLockedError: as in `mongo_celery.select_for_update`.
        ConfigurationError: it is not a queryset of instances on MongoDB, or `of` names an unknown relation or one in
            another Django database.
        OperationFailure: a write conflict, labelled as transient. Do not catch it in `transactional`. Django's own
            `atomic` does not repeat it.
    """
    if not isinstance(queryset, QuerySet):
        raise ConfigurationError(f"select_for_update takes a Django QuerySet, not {type(queryset).__name__}.")
    connection = _mongo_connection(queryset.db)
    if connection.session is None:
        raise TransactionRequiredError(
            "A queryset can only be locked inside a transaction. Write `with joined():` around it, in a "
            "function of `transactional(django_client)`."
        )
    _check(queryset.model, of)
    instances = list(queryset.all())
    if any(not isinstance(each, Model) for each in instances):
        raise ConfigurationError(
            "select_for_update takes a queryset of instances. Leave out values() and similar methods."
        )
    for collection, ids in _documents(instances, of, connection, queryset.db):
        call = lock_call(collection, {"_id": {"$in": ids}}, connection.session, ClientSession, **options)
        run_sync(lock_ids(call, ids))
    return instances


def _documents(instances: Sequence[Any], of: Sequence[str], connection: Any, using: str) -> list[tuple[Any, list[Any]]]:
    """Return the ids of the documents to lock, each once, by collection in order of name."""
    codec = connection.database.codec_options
    tables: dict[str, dict[Any, Any]] = {}
    for each in _wanted(instances, of):
        if each._state.db != using:  # noqa: SLF001 - Django's public name
            raise ConfigurationError(
                f"{type(each).__name__} is stored in the database {each._state.db!r}, "  # noqa: SLF001 - as above
                f"but the transaction belongs to {using!r}. Leave it out of of=."
            )
        meta = each._meta  # noqa: SLF001 - Django's public name
        document_id = meta.pk.get_db_prep_save(each.pk, connection)
        tables.setdefault(meta.db_table, {})[id_key(document_id, codec)] = document_id
    return [(connection.database[table], list(ids.values())) for table, ids in sorted(tables.items())]


def _mongo_connection(using: str) -> Any:
    connection = connections[using]
    if connection.vendor != "mongodb":
        raise ConfigurationError(f"Django's database {using!r} is not on MongoDB. Pass the name of one that is.")
    return connection


def _check(model: type[Model], of: Sequence[str]) -> None:
    """Before any read, refuse an empty `of`, an unknown path, or a path to an embedded document."""
    if isinstance(of, str) or not of:
        raise ConfigurationError(
            f"of={of!r} names nothing to lock. Pass a tuple of names, such as ('self', 'hall'), or leave it out."
        )
    for path in of:
        reached: Any = model
        for name in () if path == _SELF else path.split("__"):
            reached = _related(reached, name)
            if reached is None:
                raise ConfigurationError(
                    f"of={path!r} is not a relation of {model.__name__}. Pass the name of one of its ForeignKeys."
                )


def _related(model: Any, name: str) -> Any:
    try:
        field = model._meta.get_field(name)  # noqa: SLF001
    except FieldDoesNotExist:
        return None
    return field.related_model if field.many_to_one or (field.one_to_one and field.concrete) else None


def _wanted(instances: Iterable[Any], of: Sequence[str]) -> Iterator[Any]:
    for instance in instances:
        for path in of:
            reached = instance
            for name in () if path == _SELF else path.split("__"):
                reached = None if reached is None else _reached(reached, name)
            if reached is not None:
                yield reached


def _reached(instance: Any, name: str) -> Any:
    try:
        return getattr(instance, name)
    except ObjectDoesNotExist:
        return None


def _nothing() -> None:
    """A callback that shows whether any would run after a commit."""
