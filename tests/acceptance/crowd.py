"""Programs that are killed and frozen while they work, and replaced."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

from tests.fixtures.process import ProjectProcess, wait_for


class Crowd:
    """
    So many running programs, as long as `fill` is called.

    Args:
        start: starts the next program, which gets a number.
        size: how many run at a time, the frozen ones included.
        chance: chooses whom something happens to.
    """

    def __init__(self, start: Callable[[int], ProjectProcess], size: int, chance: random.Random) -> None:
        self.started: list[ProjectProcess] = []
        self._start, self._size, self._chance = start, size, chance
        self._frozen: list[ProjectProcess] = []

    def fill(self) -> list[ProjectProcess]:
        """Replace those that have ended, and return all that run."""
        running = [each for each in self.started if each.running]
        for _ in range(self._size - len(running)):
            self.started.append(self._start(len(self.started)))
            running.append(self.started[-1])
        return running

    def kill(self) -> bool:
        self._chance.choice(self.fill()).kill()
        return True

    def freeze(self) -> bool:
        """Freeze one, unless half of them are."""
        if len(self._frozen) >= self._size // 2:
            return False
        self._frozen.append(self._chance.choice(self.fill()))
        self._frozen[-1].pause()
        return True

    def thaw(self) -> bool:
        if self._frozen:
            self._frozen.pop(0).resume()
        return True

    def end(self, *, kill: bool = False) -> None:
        """Let all go on to their end, or kill them; none has ended by an error of its own."""
        for each in self.started:
            if each.running:
                each.kill() if kill else each.resume()
        wait_for(lambda: not any(each.running for each in self.started))
        assert {each.returncode for each in self.started} <= {0, -signal.SIGKILL}
