"""
Permissions on the admin pages: models without tables.

`view` shows a page, `change` also allows its actions. `see_contents` shows documents: an operator needs none.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc] # Django has no types
    """Answers without a table: `dumpdata`, and the admin's `/admin/r/`, ask for the rows of every model."""

    def get_queryset(self) -> Any:
        """Return none."""
        return super().get_queryset().none()


class _Page(models.Model):  # type: ignore[misc]
    """The model of a page; `name` is a bridge's, for the log of the admin."""

    name = models.CharField(max_length=200, primary_key=True)  # any database has it, whatever DEFAULT_AUTO_FIELD says
    objects = NoRows()
    Meta: type = type("Meta", (), {"abstract": True})

    def __str__(self) -> str:
        """Return the name of the bridge."""
        return str(self.name)


def _make_meta(name: str, **options: object) -> type:
    """Return Django's options of a page: no table, and nothing to add or delete."""
    common = {"managed": False, "base_manager_name": "objects", "default_permissions": ("view", "change")}
    return type("Meta", (), {"verbose_name": name, **common, **options})


class ChangeBridge(_Page):
    """The pages of bridges, with their handlers and partitions."""

    Meta = _make_meta("bridge")


class ChangeDeadLetter(_Page):
    """The pages of dead letters. Its `see_contents` is for both pages."""

    Meta = _make_meta("dead letter", permissions=[("see_contents", "Can see the documents of changes")])
