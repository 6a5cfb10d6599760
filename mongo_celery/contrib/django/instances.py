"""
A change's document as an instance of a Django model.

The values are the same as in Django's queries: the codec of Django's connection decodes the document, and the
converters of backend and fields process it.
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
    Return a change's document as a model instance, as a query at that moment would return it.

    ::

        @bridge.on_change(Order)
        def index(change):
            order = instance(change, Order)
            if order is None:                       # deleted, by this change or since

    Use it for reading only. Its `save()` would overwrite newer values of every field. Change the document
    through `change.fenced`, or by `Order.objects.filter(pk=order.pk).update(...)`.

    It has the model's declared fields. For other fields, use `change.full_document`. A declared field that is missing
    in the document is None, as in Django's queries. Relations and data in other collections are loaded when you access
    them, with their state at that time.

    Args:
        change: a change of the model's collection.
        model: a model of django-mongodb-backend.
        before: return the document before the change, if the bridge has `full_document_before_change`.

    Returns:
        The instance, or None if the change has no such document.

    Raises:
        ConfigurationError: the model's instances are not documents.
        HandlerUsageError: the change belongs to another collection, or the model cannot hold a field's value.
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
    """Return the concrete model and the connection to its database."""
    name = getattr(model, "__name__", repr(model))
    concrete = getattr(getattr(model, "_meta", None), "concrete_model", None)
    if concrete is None:
        raise ConfigurationError(f"{name} is not a Django model with a collection. Pass a model class, such as Order.")
    if concrete._meta.get_parent_list():  # noqa: SLF001
        raise ConfigurationError(
            f"{name} inherits from a model with a separate collection, so each instance is stored in two "
            "collections. A change has only one of them. Pass a model without such a parent."
        )
    connection = connections[router.db_for_write(model)]
    if connection.vendor != "mongodb":
        raise ConfigurationError(
            f"{name} is stored in {connection.alias!r}, a {connection.display_name} database. Pass a model of "
            "django-mongodb-backend."
        )
    return concrete, connection


def _check_namespace(change: Change, model: Any, database: str, table: str) -> None:
    ns = change.ns
    if (ns.get("db"), ns.get("coll")) != (database, table):
        raise HandlerUsageError(
            f"{model.__name__} is stored in {database}.{table}, but this change is from {change.namespace}. If the "
            "handler watches several collections, check change.ns first."
        )


def _convert(document: Mapping[str, Any], field: Any, model: Any, connection: Any) -> Any:
    value = document.get(field.column)
    expression = field.get_col(field.model._meta.db_table)  # noqa: SLF001
    converters = [*connection.ops.get_db_converters(expression), *expression.get_db_converters(connection)]
    try:
        for convert in converters:
            value = convert(value, expression, connection)
    except Exception as error:
        # Only the cause has the field's message, which may quote the document.
        raise HandlerUsageError(
            f"Document {document.get('_id')!r} cannot be loaded: the value of {field.column!r} has the type "
            f"{type(document.get(field.column)).__name__}, but {model.__name__}.{field.name} is a "
            f"{field.get_internal_type()} ({type(error).__name__}, see its cause). Use change.full_document "
            "instead."
        ) from error
    return value
