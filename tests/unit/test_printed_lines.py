"""Commands and quantities as they are printed: what a person copies must run, and what they read must make sense."""

from __future__ import annotations

import re
import sys

import pytest
from celery import Celery

from mongo_celery.command_line import CommandLine
from mongo_celery.findings import shorten

APP = Celery("shop", set_as_current=False)


@pytest.mark.parametrize(
    ("argv", "environment", "expected"),
    [
        (["/usr/bin/celery", "-A", "shop.celery:app", "listener"], {}, "shop.celery:app"),
        (["celery", "--app=north.shop", "worker", "-A", "later"], {}, "north.shop"),
        (["celery", "-Ashop.app", "worker"], {}, "shop.app"),
        (["/venv/celery/__main__.py", "--app", "shop.main", "worker"], {}, "shop.main"),
        (["celery", "worker"], {"APP": "shop.environment"}, "shop.environment"),
        (["celery", "worker"], {}, "shop"),
        (["/usr/bin/gunicorn", "-A", "other"], {"APP": "other"}, "shop"),
    ],
)
def test_a_printed_command_names_the_app_as_it_was_typed(
    argv: list[str], environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app's own name need not be a module. Outside `celery` nothing else is known."""
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.delenv("APP", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert CommandLine.of(APP).app == expected


def test_a_shortened_reason_keeps_its_commands_whole() -> None:
    """A text of this package may name two commands. Foreign text of any length is still bounded."""
    commands = [f"`celery -A shop changes {each} orders`" for each in ("dead-letters list", "retry")]
    reason = f"{'x' * 150}. Look at them with {commands[0]}, then run {commands[1]}. The handler's error: {'y' * 900}"
    assert re.findall("`celery [^`]+`", shorten(reason)) == commands
    assert len(shorten(reason)) < 300
    assert len(shorten("`celery " + "x" * 5000 + "`")) < 300
    assert len(shorten("`celery x` " * 5000)) < 1100
