"""
Flask: a Celery app for each app that an application factory makes, and Celery's commands under `flask`.

Every task of such a Celery app runs inside the Flask app's context: change handlers, each with each change that it is
given, what an outbox sends, and the tasks of this package. What Celery itself calls around a task (`before_start`,
`on_failure`, signals) runs outside of it, as in every Celery app of a Flask project.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from celery import Celery, Task

from mongo_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from flask import Flask

EXTENSION = "celery"
"""Where a Flask app has its Celery app: the place that Flask's documentation gives it."""

_SETTINGS = "CELERY"
_FLASK_PYMONGO_URL = "MONGO_URI"
_BRIDGE_URL = "mongo_celery_database_url"
_PATCHING_POOLS = frozenset({"gevent", "eventlet"})
_POOL_OPTIONS = ("-P", "--pool")


def celery_init_app(app: Flask, *, base: type[Task[Any, Any]] = Task) -> Celery:
    """
    Make the Celery app of a Flask app, as the function of this name in Flask's documentation does.

    Its settings are the Flask config's `CELERY`. Bridges that are given no URL listen to `MONGO_URI`, Flask-PyMongo's
    setting, unless `CELERY` has a `mongo_celery_database_url`. Afterwards the Celery app is `app.extensions["celery"]`
    and Celery's default app, and `flask celery ...` runs Celery's commands with it. Bind the bridge to what is
    returned::

        bridge.init_app(celery_init_app(app))

    Not promised: a context for what Celery calls around a task, such as `on_failure`, nor for a task or handler with a
    `base=` of its own, which takes the place of the app's class.

    Args:
        app: the Flask app.
        base: the class of its tasks; its `__call__` is called inside the context if it has one of its own.

    Raises:
        ConfigurationError: the config has no `CELERY`, or the Flask app has a Celery app already.
    """
    if EXTENSION in app.extensions:
        raise ConfigurationError(
            f"the Flask app {app.name!r} has a Celery app already; use app.extensions[{EXTENSION!r}].",
        )
    settings = app.config.get(_SETTINGS)
    if not isinstance(settings, Mapping):
        raise ConfigurationError(
            f"the config of the Flask app {app.name!r} has no {_SETTINGS}; give Celery's settings there, such as "
            f"app.config[{_SETTINGS!r}] = {{'broker_url': 'redis://localhost:6379/0'}}.",
        )
    url = app.config.get(_FLASK_PYMONGO_URL)
    celery = Celery(app.name, task_cls=_task_class(app, base))
    celery.config_from_object({**({} if url is None else {_BRIDGE_URL: url}), **settings})
    celery.set_default()
    app.extensions[EXTENSION] = celery
    if _command.name not in app.cli.commands:
        app.cli.add_command(_command)
    return celery


def _task_class(app: Flask, base: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    """A task class that opens the context around each call."""
    calls_itself = base.__call__ is not Task.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with app.app_context():
            # Celery's own `__call__` would push another request, without id and retries.
            return base.__call__(self, *args, **kwargs) if calls_itself else self.run(*args, **kwargs)

    return type("FlaskTask", (base,), {"__call__": call, "abstract": True, "__doc__": "Runs inside the context."})


@click.command(
    EXTENSION,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Run a command of Celery's with this app's Celery app: flask celery worker.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def _command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Hand everything to `celery`, whose exit status is this one's."""
    from celery.bin.celery import celery as celery_command
    from flask.cli import ScriptInfo

    pool = _pool_in(arguments)
    if pool in _PATCHING_POOLS:
        raise click.ClickException(
            f"the pool {pool} patches Python, which is too late here; start the worker with celery -A MODULE, of a "
            "module that has the Celery app: celery_app = create_app().extensions['celery'].",
        )
    script = ctx.ensure_object(ScriptInfo)
    app = script.load_app()
    celery = app.extensions.get(EXTENSION)
    if not isinstance(celery, Celery):
        raise click.ClickException(f"the Flask app {app.name!r} has no Celery app; call celery_init_app(app).")
    which = ["--app", script.app_import_path] if script.app_import_path else []
    program = shlex.join(["flask", *which, EXTENSION])  # commands that are told to type next begin with it
    run = partial(celery_command.main, list(arguments), program, default_map={"app": celery})
    with _without_environment(celery_command, "app"):
        Context().run(run)  # Flask has opened the app's context around the command: it would be that of a whole worker


@contextmanager
def _without_environment(command: click.Command, name: str) -> Iterator[None]:
    """Inside, an option has no variable of the environment: Celery's `APP`, which is a name for many things."""
    option = next(each for each in command.params if each.name == name)
    option.envvar, before = None, option.envvar
    try:
        yield
    finally:
        option.envvar = before


def _pool_in(arguments: tuple[str, ...]) -> str | None:
    """The pool that a worker's options name, in each of the ways in which options may be written."""
    for place, argument in enumerate(arguments):
        if argument in _POOL_OPTIONS:
            return arguments[place + 1] if place + 1 < len(arguments) else None
        for option in ("-P", "--pool="):
            if argument.startswith(option):
                return argument.removeprefix(option)
    return None
