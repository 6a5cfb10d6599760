"""
The document of a change as an instance of a Django model.

The values are those that Django's own queries would give: the document is decoded by the codec of Django's connection,
and passes the converters of the backend and of each field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import bson
from django.db import connections, router

from mongo_celery.errors import ConfigurationError, HandlerUsageError

if TYPE_CHECKING:
    from mongo_celery.bridge.change import Change

ModelT = TypeVar("ModelT")


def instance(change: Change, model: type[ModelT], *, before: bool = False) -> ModelT | None:
    """
    The document of a change as an instance of a model, as a query would have read it at that moment.

    ::

        @shared_change(Order)
        def index(change):
            order = instance(change, Order)
            if order is None:                       # deleted, by this change or since

    It is for reading. `save()` of it would write all fields as they were over what is newer: change the document
    through `change.fenced`, or by `Order.objects.filter(pk=order.pk).update(...)`.

    It holds what the model declares. A field of the document that the model does not know is not in it: look at
    `change.full_document`. A declared field that the document lacks is None, as in Django's queries. Relations are
    loaded when they are looked at, and are as they are then; so is all that is kept in other collections.

    Args:
        change: of the model's collection.
        model: of django-mongodb-backend.
        before: the document before the change (`full_document_before_change`), for who has the bridge ask for it.

    Returns:
        None where the change has no such document.

    Raises:
        ConfigurationError: it is no model whose instances are documents.
        HandlerUsageError: the change is of another collection, or a field holds what the model cannot.
    """
    concrete, connection = _find_home(model)
    _check_namespace(change, model, connection.settings_dict["NAME"], concrete._meta.db_table)  # noqa: SLF001 - Django's
    document = change.full_document_before_change if before else change.full_document
    if document is None:
        return None
    read = bson.decode(bson.encode(document), connection.database.codec_options)
    fields = concrete._meta.concrete_fields  # noqa: SLF001
    values = [_convert(read, field, model, connection) for field in fields]
    found: ModelT = model.from_db(connection.alias, [field.attname for field in fields], values)  # type: ignore[attr-defined]
    return found


def _find_home(model: Any) -> tuple[Any, Any]:
    """The concrete model, and the connection to the database that it is stored in."""
    name = getattr(model, "__name__", repr(model))
    concrete = getattr(getattr(model, "_meta", None), "concrete_model", None)
    if concrete is None:
        raise ConfigurationError(f"{name} is no Django model with a collection; give the class of one.")
    if concrete._meta.get_parent_list():  # noqa: SLF001
        raise ConfigurationError(
            f"{name} inherits from a model with a collection of its own: its instances are in two collections, and a "
            "change is of one."
        )
    connection = connections[router.db_for_write(model)]
    if connection.vendor != "mongodb":
        raise ConfigurationError(
            f"{name} is stored in {connection.alias!r}, a database of {connection.display_name}; give a model of "
            "django-mongodb-backend."
        )
    return concrete, connection


def _check_namespace(change: Change, model: Any, database: str, table: str) -> None:
    ns = change.ns
    if (ns.get("db"), ns.get("coll")) != (database, table):
        raise HandlerUsageError(
            f"{model.__name__} is stored in {database}.{table}, and this change is of {change.namespace}; for a "
            "handler of several collections look at change.ns first."
        )


def _convert(document: Mapping[str, Any], field: Any, model: Any, connection: Any) -> Any:
    value = document.get(field.column)
    expression = field.get_col(field.model._meta.db_table)  # noqa: SLF001
    converters = [*connection.ops.get_db_converters(expression), *expression.get_db_converters(connection)]
    try:
        for convert in converters:
            value = convert(value, expression, connection)
    except Exception as error:
        # What the field says of it is the cause alone: it may quote the document.
        raise HandlerUsageError(
            f"document {document.get('_id')!r} has in {field.column!r} a value of the type "
            f"{type(document.get(field.column)).__name__}, which {model.__name__}.{field.name}, of the type "
            f"{field.get_internal_type()}, cannot hold ({type(error).__name__}, whose text is that of the cause); look "
            "at change.full_document."
        ) from error
    return value
