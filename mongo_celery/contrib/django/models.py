"""
Permissions for the admin pages: models without tables.

`view` shows a page, `change` also allows its actions. `see_contents` shows documents, which operators do not need.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc] # Django has no types
    """A manager without a table: `dumpdata`, and the admin's `/admin/r/`, query the rows of every model."""

    def get_queryset(self) -> Any:
        """Return no rows."""
        return super().get_queryset().none()


class _Page(models.Model):  # type: ignore[misc]
    """The model of a page. `name` is the bridge's name, for the admin's log."""

    name = models.CharField(max_length=200, primary_key=True)  # valid in any database, whatever DEFAULT_AUTO_FIELD is
    objects = NoRows()
    Meta: type = type("Meta", (), {"abstract": True})

    def __str__(self) -> str:
        """Return the name of the bridge."""
        return str(self.name)


def _make_meta(name: str, **options: object) -> type:
    """Return Django's options of a page, without table, adding and deleting."""
    common = {"managed": False, "base_manager_name": "objects", "default_permissions": ("view", "change")}
    return type("Meta", (), {"verbose_name": name, **common, **options})


class ChangeBridge(_Page):
    """The pages of bridges, with their handlers and partitions."""

    Meta = _make_meta("bridge")


class ChangeDeadLetter(_Page):
    """The pages of dead letters. `see_contents` applies to both kinds of page."""

    Meta = _make_meta("dead letter", permissions=[("see_contents", "Can see the documents of changes")])
