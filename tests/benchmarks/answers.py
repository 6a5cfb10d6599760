"""What a measured program has found, left as a file beside the stopwatch's; and the sign for several to begin."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stage import Scene

_GO = "go"
_LOOK_SECONDS = 0.002


def answer(setting: BenchSetting, found: dict[str, Any]) -> None:
    """Leave an answer; whoever looks sees all of it or nothing."""
    whole = Path(setting.clock) / f"{os.getpid()}.answer"
    part = whole.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.rename(whole)


def ask(scene: Scene, module: str, *arguments: str) -> dict[str, Any]:
    """Run a program alone to its end; what it answers."""
    process = scene.program(module, *arguments)
    progress = scene.laps("progress")
    scene.wait(f"an answer of {module}", lambda: answers(scene.setting), progress.count)
    (found,) = answers(scene.setting)
    scene.stop(process)
    for path in Path(scene.setting.clock).glob("*.answer"):  # before the next question
        path.unlink()
    return found


def answers(setting: BenchSetting) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(setting.clock).glob("*.answer"))]


def give_sign(setting: BenchSetting) -> None:
    (Path(setting.clock) / _GO).touch()


def await_sign(setting: BenchSetting) -> None:
    """Say that this process is ready, and wait until all are."""
    (Path(setting.clock) / f"{os.getpid()}.ready").touch()
    while not (Path(setting.clock) / _GO).exists():
        time.sleep(_LOOK_SECONDS)


def ready(setting: BenchSetting) -> int:
    return len(list(Path(setting.clock).glob("*.ready")))
