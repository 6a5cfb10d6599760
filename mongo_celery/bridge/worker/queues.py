"""The start of a worker: declare a bridge's queues, report overridden attributes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery import signals

from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.bridge.worker.limits import worker_limits
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.redaction import keep_commands_out_of_logs

logger = logging.getLogger("mongo_celery.worker")


@signals.celeryd_init.connect(weak=False)
def _declare_partition_queues(instance: Any = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    """
    After imports and configuration, before -Q and -X are applied.

    Celery turns an exception in here into a line of its log and starts the worker, which would then
    consume no partition: only `SystemExit` gets through.
    """
    from mongo_celery.broker.connection import declare_queues

    if instance is None:
        return
    for wiring in BRIDGES.of(instance.app):
        try:
            names = wiring.queue_names
        except ConfigurationError as error:
            _set_up_logging(instance, options or {})
            logger.critical(
                "the worker ends, for bridge %s cannot work: %s",
                wiring.name,
                error,
                extra={"event": "configuration_refused", "bridge": wiring.name},
            )
            raise SystemExit(1) from None
        declare_queues(instance.app, names)


def _set_up_logging(worker: Any, options: Mapping[str, Any]) -> None:
    """As the worker would do it later: a detached one has nothing but its log file to say why it ends."""
    worker.app.log.setup(logging.INFO, options.get("logfile"), redirect_stdouts=False, hostname=worker.hostname)


@signals.celeryd_after_setup.connect(weak=False)
def _note_limits(instance: Any = None, **_: Any) -> None:
    """The time limits of the whole worker, by its command line or configuration: handlers have them, too."""
    if instance is not None:
        worker_limits[instance.app] = (instance.time_limit, instance.soft_time_limit)


@signals.celeryd_after_setup.connect(weak=False)
def _check_annotations(instance: Any = None, **_: Any) -> None:
    """A `task_annotations` entry that overrides the protocol's attributes is an error in every worker's log."""
    from mongo_celery.bridge.worker.tasks import overridden_attributes

    if instance is None or not BRIDGES.of(instance.app):
        return
    for task, attributes in overridden_attributes(instance.app).items():
        logger.error(
            "task_annotations override %s of %s, which the bridge depends on; exclude the task there",
            ", ".join(attributes),
            task,
            extra={"event": "attributes_overridden"},
        )


@signals.after_setup_logger.connect(weak=False)
def _keep_commands_out_of_logs(**_: Any) -> None:
    keep_commands_out_of_logs()
