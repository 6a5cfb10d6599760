"""The Celery app of the suites `backlog` and `handlers`: any number of handlers that do nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mongo_celery.bench.setting import BenchSetting, make_app, make_bridge
from mongo_celery.bridge.change import Change, Changes

_FILE = "handlers.json"


@dataclass(frozen=True, slots=True)
class Wanted:
    """
    The handlers of a measurement, left for its processes beside their clocks.

    Attributes:
        count: how many.
        together: whether all are handlers of the one collection that is written; else the first is, and each other
            one has a collection of its own, in which nothing happens.
        lists: changes of a list; 0 for handlers of single changes.
        begin_with_existing: whether they begin with a snapshot of their collection.
    """

    count: int = 1
    together: bool = True
    lists: int = 0
    begin_with_existing: bool = False

    def leave(self, setting: BenchSetting) -> None:
        (Path(setting.clock) / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def of(cls, setting: BenchSetting) -> Wanted:
        """What was left; the defaults where nothing was, so that the module can be imported."""
        path = Path(setting.clock) / _FILE
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls()


setting = BenchSetting.from_environment()
app = make_app(setting)
bridge = make_bridge(app, setting)


def _register(number: int, wanted: Wanted) -> None:
    name = f"handler_{number}"
    source = f"{setting.database}.{'orders' if wanted.together or not number else f'quiet_{number}'}"

    def handle(_change: Change) -> None:
        """A handler of single changes."""

    def handle_many(_changes: Changes) -> None:
        """A handler of lists."""

    chosen = handle_many if wanted.lists else handle
    chosen.__name__ = chosen.__qualname__ = name
    start = "snapshot" if wanted.begin_with_existing else None
    if wanted.lists:
        bridge.on_changes(source, name=name, batch_size=wanted.lists, start_from=start)(handle_many)
    else:
        bridge.on_change(source, name=name, start_from=start)(handle)


for _number in range(Wanted.of(setting).count):
    _register(_number, Wanted.of(setting))
