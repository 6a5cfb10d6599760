"""
Draws the pictures of docs/internals.md, as SVG, from what is written here.

    python docs/pictures/draw.py

Nothing but Python is needed, and the same text gives the same file: a test compares them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
_STYLE = """\
  .paper { fill: #ffffff; stroke: #d0d7de; }
  .life { stroke: #afb8c1; stroke-dasharray: 4 4; }
  .box { fill: #eef4fb; stroke: #54718f; stroke-width: 1.4; }
  .stands { fill: #fdf0e7; stroke: #b0632a; stroke-width: 1.4; }
  .line { fill: none; stroke: #24292f; stroke-width: 1.4; marker-end: url(#head); }
  .lost { fill: none; stroke: #b3261e; stroke-width: 1.4; stroke-dasharray: 6 3; marker-end: url(#lost); }
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #24292f; }
  .name { font-weight: 600; }
  .refused { fill: #b3261e; }
  #head path, .dot { fill: #24292f; }
  #lost path { fill: #b3261e; }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #161b22; stroke: #30363d; }
    .life { stroke: #6e7681; }
    .box { fill: #1c2a3a; stroke: #7aa2c8; }
    .stands { fill: #3a2a1c; stroke: #d9925a; }
    .line { stroke: #d0d7de; }
    .lost { stroke: #ff8278; }
    text { fill: #e6edf3; }
    .refused { fill: #ff8278; }
    #head path, .dot { fill: #d0d7de; }
    #lost path { fill: #ff8278; }
  }"""
_ROLE = 'role="img" aria-labelledby="title told"'
_WIDTH, _LEFT, _TOP, _STEP = 860, 100, 66, 40


@dataclass(frozen=True)
class Step:
    """One line of a sequence: a message between two actors, or what one does by itself (`to` is None then)."""

    of: int
    to: int | None
    text: str
    lost: bool = False


@dataclass(frozen=True)
class State:
    """A box of a diagram of states, by the middle of it."""

    name: str
    x: int
    y: int
    stands: bool = False
    width: int = 120


@dataclass(frozen=True)
class Arrow:
    """A path between boxes, given by points, and its text with the point where that begins."""

    points: Sequence[tuple[int, int]]
    text: str
    at: tuple[int, int]


def sequence(title: str, told: str, actors: Sequence[str], steps: Sequence[Step]) -> str:
    """A diagram of messages in time, from above to below."""
    height = _TOP + _STEP * len(steps) + 30
    apart = (_WIDTH - 2 * _LEFT) // (len(actors) - 1)
    places = [_LEFT + apart * number for number in range(len(actors))]
    return _svg(title, told, height, _actors(actors, places, height), _steps(steps, places))


def _actors(actors: Sequence[str], places: Sequence[int], height: int) -> Iterator[str]:
    for name, x in zip(actors, places, strict=True):
        yield f'<line class="life" x1="{x}" y1="46" x2="{x}" y2="{height - 14}"/>'
        yield f'<rect class="box" x="{x - 62}" y="16" width="124" height="30" rx="6"/>'
        yield f'<text class="name" x="{x}" y="36" text-anchor="middle">{escape(name)}</text>'


def _steps(steps: Sequence[Step], places: Sequence[int]) -> Iterator[str]:
    for number, step in enumerate(steps):
        y = _TOP + _STEP * number + 18
        kind, mark = ("lost", ' class="refused"') if step.lost else ("line", "")
        x = places[step.of]
        if step.to is None:
            yield f'<circle cx="{x}" cy="{y - 4}" r="4" class="dot"/>'
            side, anchor = (x - 10, "end") if step.of == len(places) - 1 else (x + 10, "start")
            yield f'<text{mark} x="{side}" y="{y}" text-anchor="{anchor}">{escape(step.text)}</text>'
            continue
        end = places[step.to] + (-2 if step.to > step.of else 2)
        yield f'<path class="{kind}" d="M {x} {y} L {end} {y}"/>'
        middle = (x + places[step.to]) // 2
        yield f'<text{mark} x="{middle}" y="{y - 6}" text-anchor="middle">{escape(step.text)}</text>'


def states(title: str, told: str, boxes: Sequence[State], arrows: Sequence[Arrow], height: int) -> str:
    """A diagram of states and of what leads from one to another."""
    return _svg(title, told, height, _arrows(arrows), _boxes(boxes))


def _boxes(boxes: Sequence[State]) -> Iterator[str]:
    for box in boxes:
        kind = "stands" if box.stands else "box"
        left = box.x - box.width // 2
        yield f'<rect class="{kind}" x="{left}" y="{box.y - 18}" width="{box.width}" height="36" rx="8"/>'
        yield f'<text class="name" x="{box.x}" y="{box.y + 5}" text-anchor="middle">{escape(box.name)}</text>'


def _arrows(arrows: Sequence[Arrow]) -> Iterator[str]:
    for arrow in arrows:
        path = " L ".join(f"{x} {y}" for x, y in arrow.points)
        yield f'<path class="line" d="M {path}"/>'
        yield f'<text x="{arrow.at[0]}" y="{arrow.at[1]}">{escape(arrow.text)}</text>'


def _svg(title: str, told: str, height: int, *parts: Iterator[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_ROLE}>',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="told">{escape(told)}</desc>',
        f"<style>\n{_STYLE}\n</style>",
        f"<defs>{_head('head')}{_head('lost')}</defs>",
        f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
        *(line for part in parts for line in part),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _head(name: str) -> str:
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse"'
    return f'<marker id="{name}" {size}><path d="M 0 0 L 10 5 L 0 10 z"/></marker>'


_MONGODB, _LISTENER, _BROKER, _WORKER = range(4)
_FOUR = ("MongoDB", "listener", "broker", "worker")


def run() -> str:
    """One change from the stream to its position."""
    return sequence(
        "A change, from the stream to its position",
        "MongoDB sends a change to the listener. The listener publishes a run to the broker, which gives it "
        "to a worker. The worker claims the run in MongoDB and gets a larger fencing token, runs the handler, "
        "whose writes carry the token, and records that it is handled. A commit task follows through the "
        "broker and moves the position in MongoDB. The listener sees the new position and dispatches the next "
        "run of that partition.",
        _FOUR,
        [
            Step(_MONGODB, _LISTENER, "a change"),
            Step(_LISTENER, None, "assigns it to a partition, by its key"),
            Step(_LISTENER, _BROKER, "run: handler, commit"),
            Step(_BROKER, _WORKER, "run"),
            Step(_WORKER, _MONGODB, "claim: token 41 becomes 42"),
            Step(_WORKER, None, "the handler runs, under token 42"),
            Step(_WORKER, _MONGODB, "its fenced writes, stamped with 42"),
            Step(_WORKER, _MONGODB, "handled"),
            Step(_WORKER, _BROKER, "commit task"),
            Step(_BROKER, _WORKER, "commit task"),
            Step(_WORKER, _MONGODB, "commit: moves the position"),
            Step(_LISTENER, _MONGODB, "reads partitions"),
            Step(_LISTENER, _BROKER, "next run of it"),
        ],
    )


def fencing() -> str:
    """A worker that freezes, and wakes up too late."""
    actors = ("MongoDB", "listener", "worker A", "worker B")
    mongodb, listener, first, second = range(4)
    return sequence(
        "A worker that freezes, and wakes up too late",
        "The listener dispatches a run to worker A, which claims it under token 42 and freezes. Its claim "
        "lapses by the server's clock. The listener's sweep dispatches the run again, worker B claims it "
        "under token 43, writes, and records that it is handled. Worker A wakes up: its write carries token "
        "42, the target has seen 43, and the write is refused. Its record is refused as well.",
        actors,
        [
            Step(listener, first, "run"),
            Step(first, mongodb, "claim: token 42"),
            Step(first, None, "freezes"),
            Step(mongodb, None, "the claim lapses, by MongoDB's clock"),
            Step(listener, mongodb, "sweep: not handled, no claim"),
            Step(listener, second, "the same run, again"),
            Step(second, mongodb, "claim: token 43"),
            Step(second, mongodb, "write, stamped with 43; handled"),
            Step(first, None, "wakes up"),
            Step(first, mongodb, "write with 42: refused", lost=True),
            Step(first, mongodb, "handled with 42: refused", lost=True),
        ],
    )


def partition() -> str:
    """The states of a partition's head."""
    boxes = [
        State("free", 90, 150),
        State("claimed", 340, 150),
        State("handled", 550, 150),
        State("committed", 760, 150),
        State("parked", 220, 290, stands=True),
        State("waiting", 440, 290, stands=True),
        State("halted", 640, 290, stands=True),
        State("dead letter", 760, 40),
    ]
    arrows = [
        Arrow([(150, 150), (280, 150)], "claim, token + 1", (158, 142)),
        Arrow([(400, 150), (490, 150)], "success", (416, 142)),
        Arrow([(610, 150), (700, 150)], "commit", (628, 142)),
        Arrow([(310, 132), (310, 80), (90, 80), (90, 132)], "the claim lapses: a crash is counted", (94, 72)),
        Arrow([(310, 168), (310, 222), (250, 222), (250, 272)], "retry", (256, 216)),
        Arrow([(180, 272), (180, 250), (90, 250), (90, 168)], "it is due", (98, 242)),
        Arrow([(340, 168), (340, 246), (430, 246), (430, 272)], "outage", (346, 240)),
        Arrow([(440, 308), (440, 336), (62, 336), (62, 168)], "MongoDB and broker answer again", (200, 330)),
        Arrow([(370, 168), (370, 204), (640, 204), (640, 272)], "fails permanently: halt", (440, 198)),
        Arrow([(640, 308), (640, 362), (42, 362), (42, 168)], "a person: retry", (470, 356)),
        Arrow([(370, 132), (370, 40), (700, 40)], "fails permanently: dead_letter, park_key, skip", (392, 32)),
        Arrow([(760, 58), (760, 132)], "position", (766, 100)),
        Arrow([(700, 290), (842, 290), (842, 40), (820, 40)], "a person: skip", (712, 283)),
    ]
    return states(
        "The states of a partition's first change",
        "A free change is claimed, which raises the fencing token. After its success it is handled, and a commit "
        "moves the position. If its claim lapses, it is free again, and a crash is counted. A retry parks it "
        "until it is due. In an outage it waits until MongoDB and broker answer again. After a permanent failure "
        "it is halted until a person retries or skips it, or it becomes a dead letter immediately, by the "
        "handler's failure policy. Then the position moves on.",
        boxes,
        arrows,
        380,
    )


def outbox() -> str:
    """A document with its tasks, and the three who send them."""
    actors = ("your code", "MongoDB", "dispatcher", "broker")
    code, mongodb, dispatcher, broker = range(4)
    return sequence(
        "The outbox: a document and its tasks are one write",
        "Your code writes a document with its pending tasks to MongoDB, in one write, and notifies the "
        "dispatcher. The dispatcher, a thread of the same process, claims the document, publishes its tasks "
        "to the broker, and removes them from the document. If the process dies before, the sweep of beat or "
        "the listener of a bridge finds the pending tasks, and does the same.",
        actors,
        [
            Step(code, mongodb, "document + tasks"),
            Step(code, dispatcher, "notify"),
            Step(dispatcher, mongodb, "claim"),
            Step(dispatcher, broker, "tasks, same ids each time"),
            Step(dispatcher, mongodb, "remove the sent tasks"),
            Step(code, None, "killed in between: the tasks are in MongoDB"),
            Step(dispatcher, mongodb, "sweep or listener: claim"),
            Step(dispatcher, broker, "tasks"),
            Step(dispatcher, mongodb, "remove the sent tasks"),
        ],
    )


PICTURES = {"run": run, "fencing": fencing, "partition": partition, "outbox": outbox}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())
