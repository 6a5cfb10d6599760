"""What has to be said beside figures, so that nobody takes them for more than they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_NOISE = 0.05
"""Which share of the cores others may have without a word about it."""


def load_remarks(others: float | None, uncounted: Sequence[str]) -> Iterator[str]:
    """
    Of the machine and the servers.

    Args:
        others: which share of the cores went to processes that have nothing to do with the run.
        uncounted: servers whose processor time is in no figure.
    """
    if uncounted:
        servers = " and ".join(uncounted)
        yield f"The processor time of {servers} is in no figure, since the servers were given: CPU is not compared."
    if others is not None and others > _NOISE:
        who = "Other processes, the given servers among them," if uncounted else "Other processes"
        trusted = "ratios alone" if uncounted else "ratios alone, those by CPU most"
        yield f"{who} took {others:.0%} of the cores meanwhile: trust {trusted}."
