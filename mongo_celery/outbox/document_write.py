"""A write to one document: what is to be done, what came of it, and which document a filter means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo.results import UpdateResult

from mongo_celery.mongo.identity import NO_ID, parse_filter_id
from mongo_celery.mongo.writes import Modifications
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import PendingField

Document = dict[str, Any]


_OPTIONS = ("array_filters", "collation", "hint", "let", "comment")


@dataclass(frozen=True, slots=True)
class Written:
    """
    A write that was acknowledged by a majority.

    Attributes:
        document_id: `_id` of the document; `NO_ID` where it is not known, None where none matched.
        matched: whether a document was there before.
        upserted: whether the write created the document.
        document: what the user asked to be returned.
    """

    document_id: object = None
    matched: bool = False
    upserted: bool = False
    document: Any = None

    def result(self) -> UpdateResult:
        """As PyMongo's `update_one` gives it; an update that adds entries always modifies."""
        raw: Document = {"n": int(self.matched or self.upserted), "nModified": int(self.matched), "ok": 1.0}
        if self.upserted:
            raw |= {"upserted": self.document_id, "updatedExisting": False}
        else:
            raw["updatedExisting"] = self.matched
        return UpdateResult(raw, acknowledged=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentWrite:
    """
    What the user wants done to one document.

    Attributes:
        filter: which document.
        update: operators or a pipeline; None for a replacement.
        replacement: the new document; None for an update.
        upsert: whether to create it.
        sort: which one if several match.
        projection: of the document that is returned; only with `return_document`.
        return_document: whether the user wants it before or after the write; None for neither.
        options: further options of PyMongo's `find_one_and_update`.
    """

    filter: Mapping[str, Any]
    update: Modifications | None = None
    replacement: Mapping[str, Any] | None = None
    upsert: bool = False
    sort: Any = None
    projection: Any = None
    return_document: bool | None = None
    options: Mapping[str, Any]

    @property
    def pinned(self) -> object:
        """The `_id` that the filter demands, or `NO_ID`; a collation may mean another one than it says."""
        return NO_ID if "collation" in self.options else parse_filter_id(self.filter)

    @property
    def shows_id(self) -> bool:
        """Whether what a write returns has the document's `_id`."""
        if self.return_document is None or self.projection is None:
            return True
        return bool(self.projection.get("_id", True)) if isinstance(self.projection, Mapping) else True

    def __post_init__(self) -> None:
        unknown = set(self.options) - set(_OPTIONS)
        if unknown:
            raise TypeError(f"unexpected options {sorted(unknown)}; an outbox's writes take {', '.join(_OPTIONS)}.")

    def with_entries(self, field: PendingField, entries: Sequence[Entry]) -> Any:
        """Return the write and the entries as one update."""
        if self.replacement is not None:
            return field.replacement(self.replacement, entries)
        assert self.update is not None
        return field.with_entries(self.update, entries)


def refuse_replacement(field: PendingField, replacement: Mapping[str, Any]) -> None:
    """Refuse a replacement that names the field, or is an update."""
    field.refuse_in_document(replacement)
    if any(str(key).startswith("$") for key in replacement):
        raise ValueError("replacement can not include $ operators")  # PyMongo's own words


def names_id(write: DocumentWrite) -> bool:
    """Whether filter, update or replacement say what `_id` a new document gets, or anything else about it."""
    if write.replacement is not None:
        return "_id" in write.replacement or _mentions_id(write.filter)
    parts = [write.update] if isinstance(write.update, Mapping) else list(write.update or ())
    changes = [each for part in parts for each in part.values() if isinstance(each, Mapping)]
    named = [str(name) for each in changes for name in (*each, *each.values()) if isinstance(name, str)]
    return _mentions_id(write.filter) or any(_is_id(name) for name in named)


def _mentions_id(condition: Mapping[str, Any]) -> bool:
    nested = (each for name in ("$and", "$or", "$nor") for each in condition.get(name, ()))
    return any(map(_is_id, condition)) or any(map(_mentions_id, nested)) or "_id" in str(condition.get("$expr", ""))


def _is_id(path: str) -> bool:
    return path.split(".", 1)[0] == "_id"
