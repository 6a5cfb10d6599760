"""Which outboxes belong to a Celery app, and the one task and beat entry that sweep them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.outbox.outbox import Outbox

SWEEP_TASK = "mongo_celery.outbox.sweep"
_ATTRIBUTE = "_mongo_celery_outboxes"
_EXPIRES_SECONDS = 60.0
_EVERY = "_mongo_celery_outbox_sweep_every"


def add_outbox(
    app: Celery, outbox: Outbox, name: str | None, sweep_every: float | None, sweep: Callable[[], Any]
) -> None:
    """
    Note an outbox of an app; the app's first brings the sweep task.

    Args:
        app: the Celery app.
        outbox: to be swept.
        name: of the outbox, if it is known already.
        sweep_every: seconds between two sweeps by beat; None for no entry.
        sweep: sweeps all outboxes of the app.

    Raises:
        ConfigurationError: the app already has another outbox of that name.
    """
    outboxes = outboxes_of(app)
    if name is not None and any(other._name == name for other in outboxes):  # noqa: SLF001 - a name is not opened for this
        raise ConfigurationError(f"the app already has an outbox named {name!r}; use it, or give this one name='...'.")
    if not outboxes:
        _register_sweep(app, sweep)
    outboxes.append(outbox)
    if sweep_every is not None:
        _schedule(app, sweep_every)


def outboxes_of(app: Celery) -> list[Outbox]:
    """All outboxes of an app, in the order in which they were made."""
    found: list[Outbox] = app.__dict__.setdefault(_ATTRIBUTE, [])
    return found


def _register_sweep(app: Celery, sweep: Callable[[], Any]) -> None:
    def sweep_outboxes() -> Any:  # Celery registers functions only, and is silent about other callables
        """Deliver what was left behind in all outboxes of this app."""
        return sweep()

    register: Any = app.task
    register(name=SWEEP_TASK, shared=False, ignore_result=True, acks_late=False)(sweep_outboxes)


def _schedule(app: Celery, every: float) -> None:
    """
    One beat entry for all, as often as the most impatient outbox asks.

    Messages expire, so that they do not pile up without workers; not at once, or busy workers would never sweep.
    """
    known = app.__dict__.get(_EVERY)
    if known is not None and known <= every:
        return
    app.__dict__[_EVERY] = every
    app.add_periodic_task(every, app.signature(SWEEP_TASK), name=SWEEP_TASK, expires=max(every, _EXPIRES_SECONDS))
