"""The window does not grow with what is done."""

from __future__ import annotations

from mongo_celery.bridge.window import Mark, PendingChange, Queue, Window


def place(number: int) -> Mark:
    """The place of a change, in stream order."""
    return Mark({"_data": f"{number:09d}"}, f"{number:09d}", None)


def test_a_partition_that_stands_still_does_not_make_the_window_grow() -> None:
    """
    P5 with bounded memory: behind one change that is not done, what is done folds together.

    Otherwise a halted partition beside busy ones would cost memory for every change that the others finish.
    """
    window, halted, flowing = Window(), Queue(), Queue()
    window.add(PendingChange(place(1), 0, b"stands still"), halted)
    for number in range(2, 30_000):
        window.add(PendingChange(place(number), 1, b"flows"), flowing)
        window.complete(flowing, f"{number:09d}")

    assert window.count == 1
    before = window.watermark
    assert before is None
    assert len(window._order) < 2_000

    window.complete(halted, place(1).data)

    assert window.watermark == place(29_999)
    assert (window.count, window.size, len(window._order)) == (0, 0, 0)
