"""Finding the user's app and its bridges for a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from celery import Celery


def app_of(ctx: click.Context) -> Celery:
    """
    The app that `-A` names, with its task modules imported.

    Raises:
        click.ClickException: without `-A`, or when the app has no bridge.
    """
    from mongo_celery.registry import chosen_bridges

    app: Celery = ctx.obj.app
    with one_sentence_errors():
        app.loader.import_default_modules()
        app.finalize()
        chosen_bridges(app, [])
    return app


class one_sentence_errors:  # noqa: N801 - a context manager that reads as a phrase
    """Turn errors that users can cure into one sentence without a traceback, and status 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, click.ClickException):
            return
        from pymongo.errors import PyMongoError

        from mongo_celery.errors import MongoCeleryError

        if isinstance(error, MongoCeleryError):
            raise click.ClickException(str(error)) from None
        if isinstance(error, PyMongoError):
            text = str(error).split(", Timeout:")[0]
            raise click.ClickException(f"MongoDB did not answer: {text}. Check the URL and the server.") from None


def with_clear_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose errors are one sentence."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        with one_sentence_errors():
            return command(*args, **kwargs)

    return run
