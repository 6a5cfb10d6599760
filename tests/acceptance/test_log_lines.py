"""The lines of a listener under a Django project's own LOGGING: each has a time, and none is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.fixtures.process import ROOT

pytest.importorskip("django")

_TIME = re.compile(r"\d\d:\d\d:\d\d")
_SECONDS_MAX = 120.0


def logging_with(format_: str | None = None, *, keeps: bool = True, **root: Any) -> str:
    """Django's LOGGING with one handler for all, and a formatter where one is given."""
    handler = {"class": "logging.StreamHandler", **({"formatter": "own"} if format_ else {})}
    return json.dumps(
        {
            "version": 1,
            "disable_existing_loggers": not keeps,
            "formatters": {"own": {"format": format_ or "", "style": "{"}},
            "handlers": {"console": handler},
            "root": {"handlers": ["console"], "level": "INFO", **root},
        }
    )


BARE = logging_with()
SIMPLE = logging_with("own {levelname} {message}")
EMPTY = logging_with(handlers=[])
TIMED = logging_with("own {asctime} {message}")


@pytest.mark.parametrize(
    ("config", "variables", "begins"),
    [
        pytest.param(SIMPLE, {"PROJECT_HIJACK": "1"}, r"\[20.*: CRITICAL/", id="Celery's own, in place of Django's"),
        pytest.param(BARE, {}, r"\[20.*: CRITICAL/", id="a handler without a formatter", marks=pytest.mark.slow),
        pytest.param(SIMPLE, {}, r"\[20.*\] own CRITICAL ", id="a format without a time"),
        pytest.param(TIMED, {}, "own 20", id="a format that has one", marks=pytest.mark.slow),
        pytest.param(logging_with(keeps=False), {"PROJECT_SETUP": "1"}, r"\[20.*: CRITICAL/", id="other loggers off"),
        pytest.param(
            logging_with(handlers=[]),
            {"PROJECT_SETUP": "1"},
            r"\[20.*: CRITICAL/",
            id="no handler at all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_line_has_one_time(config: str, variables: dict[str, str], begins: str) -> None:
    """Whoever set up logging, and in whatever format; a format of the project's stays what it is."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.acceptance.django_project", "listener"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.acceptance.django_project",
            "PROJECT_LOGGING": config,
            **variables,
        },
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.splitlines() if "has failed" in line]
    assert len(lines) == 1, done.stderr
    for line in lines:
        assert len(_TIME.findall(line)) == 1, line
    assert re.match(begins, lines[0]), lines[0]
