"""
Rights on the admin pages, in Django's own form: models without tables, and their permissions.

What the pages show lies in MongoDB, and is read by the functions that the commands use. Of each page there are three
permissions: `view` it; `act` on what it shows; see the `contents` of documents and messages, which are no operator's
business by itself.
"""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc] # Django has no types
    """Answers without asking for a table: `dumpdata`, and the admin's `/admin/r/`, ask for the rows of every model."""

    def get_queryset(self) -> Any:
        """None of them."""
        return super().get_queryset().none()


class _Page(models.Model):  # type: ignore[misc]
    """What the models have in common."""

    name = models.CharField(max_length=1, primary_key=True)  # any database has it, whatever DEFAULT_AUTO_FIELD says
    objects = NoRows()
    Meta: type = type("Meta", (), {"abstract": True})

    def __str__(self) -> str:
        """There is none."""
        return str(self._meta.verbose_name)


def _page(name: str, one: str, many: str) -> type:
    """What Django is to know of a page: no table, and nothing that could be added, changed or deleted."""
    options = {
        "app_label": "mongo_celery",
        "managed": False,
        "base_manager_name": "objects",
        "default_permissions": ("view",),
        "permissions": [(f"act_on_{name}", f"Can act on {many}"), (f"see_contents_of_{name}", f"Can see into {many}")],
        "verbose_name": one,
        "verbose_name_plural": many,
    }
    return type("Meta", (), options)


class ChangeBridge(_Page):
    """The page of bridges, with their handlers and partitions."""

    Meta = _page("changebridge", "bridge", "bridges")


class ChangeDeadLetter(_Page):
    """The page of changes that were set aside."""

    Meta = _page("changedeadletter", "dead letter of a bridge", "dead letters of bridges")


class TaskOutbox(_Page):
    """The page of outboxes, with their dead letters."""

    Meta = _page("taskoutbox", "outbox", "outboxes")


class TwoPhaseTransaction(_Page):
    """The page of two-phase transactions."""

    Meta = _page("twophasetransaction", "two-phase transaction", "two-phase transactions")
