"""Preflight of the models that read the collection: a strict one cannot read a document while something is pending."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mongo_celery.findings import Finding, failing, ok


def check_models(database: str, collection: str, field: str) -> Iterator[Finding]:
    """Look at the models that this process has imported; nothing is imported for it, and no connection is made."""
    strict: list[str] = []
    lenient: list[str] = []
    for name, is_strict in (*_of_mongoengine(database, collection, field), *_of_beanie(collection, field)):
        (strict if is_strict else lenient).append(name)
    if strict:
        names = ", ".join(sorted(strict))
        yield failing(
            "models",
            f"{names} cannot read a document of {collection} while something is pending in it: declare the field "
            f"{field} there, or let the model ignore fields that it does not know.",
        )
    elif lenient:
        yield ok("models", f"{', '.join(sorted(lenient))} can read documents in which something is pending.")


def _of_mongoengine(database: str, collection: str, field: str) -> Iterator[tuple[str, bool]]:
    """The document classes of MongoEngine for a collection, and whether each refuses the field."""
    registry: Any = sys.modules.get("mongoengine.base.common")
    connections: Any = sys.modules.get("mongoengine.connection")
    for model in list(getattr(registry, "_document_registry", {}).values()):
        meta: dict[str, Any] = getattr(model, "_meta", {})
        if meta.get("abstract") or meta.get("collection") != collection:
            continue
        settings = getattr(connections, "_connection_settings", {}).get(meta.get("db_alias", "default"), {})
        if settings.get("name", database) == database:
            known = set(getattr(model, "_db_field_map", {}).values())
            is_dynamic = getattr(model, "_dynamic", False)
            yield model.__name__, bool(meta.get("strict", True)) and field not in known and not is_dynamic


def _of_beanie(collection: str, field: str) -> Iterator[tuple[str, bool]]:
    """The document classes of Beanie for a collection, and whether each refuses the field."""
    documents: Any = sys.modules.get("beanie.odm.documents")
    for model in _below(documents.Document) if documents else ():
        settings = getattr(model, "Settings", None)
        if getattr(settings, "name", model.__name__) == collection:
            known = {each.alias or name for name, each in model.model_fields.items()}
            yield model.__name__, model.model_config.get("extra") == "forbid" and field not in known


def _below(model: Any) -> Iterator[Any]:
    for each in model.__subclasses__():
        yield each
        yield from _below(each)
