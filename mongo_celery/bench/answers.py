"""What a measured program has found, left as a file beside the stopwatch's; and the sign for several to begin."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mongo_celery.bench.setting import Setting

_GO = "go"
_LOOK_SECONDS = 0.002


def answer(setting: Setting, found: dict[str, Any]) -> None:
    """Leave an answer; whoever looks sees all of it or nothing."""
    whole = Path(setting.clock) / f"{os.getpid()}.answer"
    part = whole.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(whole)


def answers(setting: Setting) -> list[dict[str, Any]]:
    """All answers so far."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(setting.clock).glob("*.answer"))]


def forget_answers(setting: Setting) -> None:
    """Before the next question."""
    for path in Path(setting.clock).glob("*.answer"):
        path.unlink()


def give_sign(setting: Setting) -> None:
    """Let the programs begin that wait for it."""
    (Path(setting.clock) / _GO).touch()


def await_sign(setting: Setting) -> None:
    """Say that this process is ready, and wait until all are."""
    (Path(setting.clock) / f"{os.getpid()}.ready").touch()
    while not (Path(setting.clock) / _GO).exists():
        time.sleep(_LOOK_SECONDS)


def ready(setting: Setting) -> int:
    """How many programs wait for the sign."""
    return len(list(Path(setting.clock).glob("*.ready")))
