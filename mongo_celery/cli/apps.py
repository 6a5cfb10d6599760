"""Finding the user's app and its bridges for a command, and saying in one sentence what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

    from mongo_celery.bridge.bridge import Bridge
    from mongo_celery.mongo.verdicts import Concern


def app_of(ctx: click.Context) -> Celery:
    """
    The app that `-A` names, with its task modules imported.

    Raises:
        click.ClickException: without `-A`, or when the app has no bridge.
    """
    from mongo_celery.app import bridges_by_name, chosen_bridges

    app: Celery = ctx.obj.app
    if not ctx.find_root().params.get("app") and not bridges_by_name(app):
        raise click.ClickException(f"name your Celery app with -A: celery -A shop {_words(ctx)}")
    with one_sentence_errors():
        app.loader.import_default_modules()
        app.finalize()
        chosen_bridges(app, [])
    return app


def bridges_of(ctx: click.Context, name: str | None) -> list[Bridge]:
    """The bridge of that name, or all of the app that `-A` names; errors as of `app_of`."""
    from mongo_celery.app import chosen_bridges

    app = app_of(ctx)
    with one_sentence_errors():
        return chosen_bridges(app, [name] if name else [])


def one_bridge_of(ctx: click.Context, name: str | None) -> Bridge:
    """The bridge that a command acts on; an app with several bridges has to name one."""
    bridges = bridges_of(ctx, name)
    if len(bridges) > 1:
        names = ", ".join(bridge.name for bridge in bridges)
        raise click.ClickException(f"this app has several bridges: choose one of {names} with --bridge.")
    return bridges[0]


def _words(ctx: click.Context) -> str:
    """The command as typed after `celery`, without its options."""
    return ctx.command_path.partition(" ")[2]


class one_sentence_errors:  # noqa: N801 - a context manager that reads as a phrase
    """
    Turn errors that users can cure into one sentence without a traceback, and status 1.

    Args:
        concern: gives whom an error of MongoDB concerns; it is asked only after the server has answered.
    """

    def __init__(self, concern: Callable[[], Concern] | None = None) -> None:
        self._concern = concern

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        sentence = sentence_for(error, self._concern)
        if sentence is not None:
            raise click.ClickException(sentence) from None


def sentence_for(error: BaseException | None, concern: Callable[[], Concern] | None = None) -> str | None:
    """What to tell the user about an error; None where it has to go its own way. Arguments as above."""
    if error is None or isinstance(error, click.ClickException):
        return None
    from pymongo.errors import OperationFailure, PyMongoError

    from mongo_celery.bridge.operations.reach import in_words
    from mongo_celery.errors import MongoCeleryError
    from mongo_celery.mongo.redaction import short, without_credentials
    from mongo_celery.mongo.verdicts import Concern

    if isinstance(error, PyMongoError):
        # Whatever else is raised may come from opening what the concern would name.
        if concern is not None and isinstance(error, OperationFailure):
            known = in_words(error, concern())
        else:
            known = in_words(error, Concern("what this command needs", "readWrite there"))
        if known is error:
            return f"MongoDB refused: {short(error)}. Check the URL and the server."
        error = known
    return without_credentials(str(error)) if isinstance(error, MongoCeleryError) else None
