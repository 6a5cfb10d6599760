"""The sizes of a run."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """
    The sizes of a run.

    Attributes:
        rounds: how often each figure is measured.
        writes: writes of each kind in a round of the outbox.
        held: documents that are held back while others are swept.
        transfers: transfers of one process in a round.
        processes: processes that transfer together.
        live: changes whose latency is measured.
        kills: how often each take-over is measured.
        owed: changes of the longest backlog, 4,000 or more. Others: a tenth and a hundredth, if that is as many.
        reached: changes of one round of the handlers on one stream, counted by handler.
        lease_ttl: seconds of the lease of the bridge whose leader ends.
    """

    rounds: int = 5
    writes: int = 300
    held: int = 100_000
    transfers: int = 300
    processes: int = 4
    live: int = 100
    kills: int = 3
    owed: int = 1_000_000
    reached: int = 20_000
    lease_ttl: int = 10

    def changed(self, given: tuple[str, ...]) -> Sizes:
        """Return these sizes with some replaced, each given as `name=number`."""
        names = [each.name for each in fields(self)]
        changes = {}
        for text in given:
            name, _, number = text.partition("=")
            if name not in names or not number.isdecimal() or not int(number):
                raise click.BadParameter(f"{text!r} is not NAME=NUMBER with a name of {', '.join(names)}")
            changes[name] = int(number)
        return replace(self, **changes)


FULL = Sizes()
QUICK = Sizes(
    rounds=1, writes=60, held=10_000, transfers=60, live=20, kills=1, owed=40_000,
    reached=6000, lease_ttl=3,
)  # fmt: skip
