"""
How a bridge enters a Celery worker: its queues, the option `--listener`, and the embedded listener.

`worker --listener` embeds a listener as `-B` embeds beat: a process of its own where the pool is prefork,
a thread elsewhere. It is a worker step, not a consumer step: a consumer restarts with every broker
reconnect, and the lease must not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import click
from celery import Celery, bootsteps, signals

from mongo_celery.errors import ConfigurationError
from mongo_celery.registry import bridges_by_name

logger = logging.getLogger("mongo_celery.worker")

LISTENER_OPTION = click.Option(
    ("--listener",),
    is_flag=True,
    help="Also run the listener of this app's bridges, as -B runs beat. Safe on any number of workers: one leads.",
)
"""One object for all apps: Celery keeps a set of options by identity."""


_ENDING_STATES = ("closing", "terminating")


class ListenerStep(bootsteps.StartStopStep):
    """Runs the listeners inside a worker that was started with `--listener`."""

    label = "Listener"
    conditional = True

    def __init__(self, parent: Any, listener: bool = False, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self.enabled = bool(listener)

    def create(self, worker: Any) -> Any:
        """The service that the worker starts and stops."""
        from mongo_celery.listener.embedded_service import embedded_listener

        as_process = worker.pool_cls.__module__.endswith("prefork")
        return embedded_listener(worker.app, as_process=as_process, is_ending=partial(_is_ending, worker))


def _is_ending(worker: Any) -> bool:
    """Whether a worker shuts down: told by a signal, or already stopping its steps."""
    from celery.worker import state as worker_state  # a web server has no use for all that it imports

    told: tuple[Any, ...] = (worker_state.should_stop, worker_state.should_terminate)  # an exit status, and 0 is one
    if any(each is not None and each is not False for each in told):
        return True
    return worker.blueprint.human_state() in _ENDING_STATES


def install(app: Celery) -> None:
    """Give an app's workers the option and the step. Once for each app."""
    app.user_options["worker"].add(LISTENER_OPTION)
    app.steps["worker"].add(ListenerStep)


@signals.celeryd_init.connect(weak=False)
def _declare_partition_queues(instance: Any = None, options: Mapping[str, Any] | None = None, **_: Any) -> None:
    """
    After imports and configuration, before -Q and -X are applied.

    Celery turns an exception in here into a line of its log and starts the worker, which would then
    consume no partition: only `SystemExit` gets through.
    """
    from mongo_celery.broker import declare_queues

    if instance is None:
        return
    for bridge in bridges_by_name(instance.app).values():
        try:
            names = bridge.options.queue_names
        except ConfigurationError as error:
            _set_up_logging(instance, options or {})
            logger.critical(
                "the worker ends, for bridge %s cannot work: %s",
                bridge.name,
                error,
                extra={"event": "configuration_refused", "bridge": bridge.name},
            )
            raise SystemExit(1) from None
        declare_queues(instance.app, names)


def _set_up_logging(worker: Any, options: Mapping[str, Any]) -> None:
    """As the worker would do it later: a detached one has nothing but its log file to say why it ends."""
    worker.app.log.setup(logging.INFO, options.get("logfile"), redirect_stdouts=False, hostname=worker.hostname)


@signals.after_setup_logger.connect(weak=False)
def keep_commands_out_of_logs(**_: Any) -> None:
    """
    At `-l DEBUG` PyMongo would log each command: whole documents, and the signing key as it is read.

    Whoever wants that sets the level of the logger `pymongo.command`, or `pymongo`, explicitly. Also
    called where clients are made: an app that sets up logging by itself never sends the signal.
    """
    commands = logging.getLogger("pymongo.command")
    if commands.level == logging.NOTSET and logging.getLogger("pymongo").level == logging.NOTSET:
        commands.setLevel(logging.INFO)


@signals.celeryd_after_setup.connect(weak=False)
def _check_annotations(instance: Any = None, **_: Any) -> None:
    """A `task_annotations` entry that overrides the protocol's attributes is an error in every worker's log."""
    from mongo_celery.tasks import overridden_attributes

    if instance is None or not bridges_by_name(instance.app):
        return
    for task, attributes in overridden_attributes(instance.app).items():
        logger.error(
            "task_annotations override %s of %s, which the bridge depends on; exclude the task there",
            ", ".join(attributes),
            task,
            extra={"event": "attributes_overridden"},
        )
