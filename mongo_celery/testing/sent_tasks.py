"""Tasks that lie in the broker: what handlers, outboxes and a test itself have sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SentTask:
    """
    One message that nobody has taken yet.

    Attributes:
        name: of the task.
        args: as a worker would give them.
        kwargs: as a worker would give them.
        id: of the task; of an outbox's, the same in each delivery.
        queue: where it lies.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    id: str
    queue: str

    @classmethod
    def of(cls, queue: str, message: Any) -> SentTask:
        """From a message of Celery's."""
        headers = message.headers
        args, kwargs, _ = message.payload
        return cls(headers["task"], tuple(args), dict(kwargs), headers["id"], queue)

    def fits(self, name: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> bool:
        """Whether it is of this task, with these arguments; None for any."""
        return (
            self.name == name
            and (args is None or tuple(args) == self.args)
            and (kwargs is None or dict(kwargs) == self.kwargs)
        )

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.name}({', '.join(given)})"
