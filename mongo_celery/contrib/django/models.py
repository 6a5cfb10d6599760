"""
Rights on the admin pages, in Django's own form: models without tables, and their permissions.

What the pages show lies in MongoDB, and is read by the functions that the commands use. Of each page there are three
permissions: `view` it; `act` on what it shows; see the `contents` of documents and messages, which are no operator's
business by itself.
"""

from __future__ import annotations

from django.db import models


def _page(name: str, one: str, many: str) -> type:
    """What Django is to know of a page: no table, and nothing that could be added, changed or deleted."""
    options = {
        "app_label": "mongo_celery",
        "managed": False,
        "default_permissions": ("view",),
        "permissions": [(f"act_on_{name}", f"Can act on {many}"), (f"see_contents_of_{name}", f"Can see into {many}")],
        "verbose_name": one,
        "verbose_name_plural": many,
    }
    return type("Meta", (), options)


class ChangeBridge(models.Model):  # type: ignore[misc] # Django has no types
    """The page of bridges, with their handlers and partitions."""

    Meta = _page("changebridge", "change bridge", "change bridges")

    def __str__(self) -> str:
        """There is none."""
        return "change bridge"


class ChangeDeadLetter(models.Model):  # type: ignore[misc]
    """The page of changes that were set aside."""

    Meta = _page("changedeadletter", "dead letter of a bridge", "dead letters of bridges")

    def __str__(self) -> str:
        """There is none."""
        return "dead letter of a bridge"


class TaskOutbox(models.Model):  # type: ignore[misc]
    """The page of outboxes, with their dead letters."""

    Meta = _page("taskoutbox", "outbox", "outboxes")

    def __str__(self) -> str:
        """There is none."""
        return "outbox"


class TwoPhaseTransaction(models.Model):  # type: ignore[misc]
    """The page of two-phase transactions."""

    Meta = _page("twophasetransaction", "two-phase transaction", "two-phase transactions")

    def __str__(self) -> str:
        """There is none."""
        return "two-phase transaction"
