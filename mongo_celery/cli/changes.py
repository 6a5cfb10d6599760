"""`celery -A app changes`: show and steer the bridges of an app."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli import steering
from mongo_celery.cli.dead_letters import dead_letters
from mongo_celery.cli.grants import grants
from mongo_celery.cli.show import queues, show
from mongo_celery.cli.status import check, status


@click.group(epilog="Example: celery -A shop changes status")
@click.pass_context
@handle_preload_options
def changes(ctx: click.Context, **_: Any) -> None:
    """Show and control the bridges of an app."""
    del ctx


for _command in (status, check, show, *steering.COMMANDS, dead_letters, queues, grants):
    changes.add_command(_command)
