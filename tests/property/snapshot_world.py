"""The scenarios of a snapshot: what exists, what is written meanwhile, what may go wrong, and the rules left out."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

# Entries of the oplog beside "key was set" (key + 1) and "key was deleted" (minus that).
MARK = 0
"""A write elsewhere: what the stream shows of it is a post-batch token."""
DROP, AWAY, BACK = 97, 98, 99
"""The source is dropped; renamed away; renamed back, with the UUID that it had."""


class Broken(StrEnum):
    """One rule of the snapshot left out or replaced by the simpler one."""

    NOTHING = "nothing"
    TOKEN_BEFORE_CHANGES = "an item's token is the high-watermark token of T"
    TOKEN_OF_NEXT = "an item's token is the high-watermark token of T + 1, and a number"
    NUMBERED_BY_CHUNK = "items are numbered within their chunk, whatever other snapshots do"
    NO_PASS = "nothing is written behind T"
    PASS_ONCE = "what moves the stream past T is written once, whether or not it was acknowledged"
    ROW_KEPT = "an item is run although its key was changed in the window"
    DELETION_IGNORED = "a deletion in the window drops no item"
    WINDOW_TO_H = "the window ends at H, though the stream is past it"
    H_BEFORE_READ = "H is noted before the chunk is read"
    H_IS_PLACE = "T is H, though the stream is past it"
    NOT_AGAIN = "an item that is dropped is not read again where the change brings no document"
    AGAIN_AS_READ = "an item that is dropped is appended as it was read, behind the window"
    AGAIN_KEPT = "what is read again is run although its key was changed once more"
    BEGIN_BEFORE_TAKE_OVER = "a snapshot begins before the partitions are taken over"
    BEGIN_AHEAD = "the next chunk begins when the last is appended, before the cursor moves"
    BEGIN_COUNTS_UP = "a begin adds one to whatever is there, and the author counts by itself"
    READ_LOCAL = "a chunk is read as it is now, in the majority or not"
    APPENDED_AT_ONCE = "a chunk is appended as soon as it is read"
    BRACKETED = "what is left is what is greater than the last _id, within its type"
    FEWER_IS_END = "fewer than were asked for is the end"
    EMPTY_IS_END = "an empty answer is the end, whatever became of the source"
    UUID_IS_ENOUGH = "an empty answer is the end if the source has the known UUID afterwards"
    END_AT_L = "renames and drops are looked for up to L"
    MATCHING_NONE_IS_END = "a chunk of which nothing matches is the end"
    WATERMARK_AT_ITEM = "watermarks may be an item's token"
    ITEMS_HOLD = "items hold the watermark"
    CURSOR_AT_DISPATCH = "the cursor moves when the items are dispatched"
    CURSOR_AT_APPEND = "the cursor moves when the items are appended"
    CURSOR_AT_INSERT = "an item that is inserted counts, before the mark"
    CURSOR_LOCAL = "the cursor believes a commit that is not in the majority yet"
    CURSOR_UNGUARDED = "the cursor compares nothing"
    CURSOR_IGNORES_EPOCH = "the cursor compares begun, not the epoch"
    CURSOR_IGNORES_BEGUN = "the cursor compares the epoch, not begun"
    RECORDS_LAST = "a take-over raises the records when it begins anew, not before it dispatches"
    CHUNK_SURVIVES = "a chunk is kept when the stream is opened again at the watermark"
    STOPPED_STAYS = "a take-over raises the records of snapshots that run, and not of those that are stopped"
    REWIND_KEEPS_MARK = "a rewind leaves a mark that was reached"
    LETTER_BY_TOKEN = "a dead letter of an item is kept by its token"
    LOOKED_UP_KEPT = "an item is run although its key was looked up after T"
    DROPPED_AWAITED = "a cursor waits for the items that are dropped"
    PINNED_LATE = "the stream's start is pinned after the first chunk"
    ROOM_FOR_CHUNK_ONLY = "a snapshot begins when there is room for its chunk and nothing else"
    UNBOUNDED = "a snapshot begins without room for a chunk"
    NO_UNTIL = "a snapshot goes on until nothing is left, whatever is inserted behind it"
    UNTIL_OF_EACH_TERM = "each term takes the largest _id anew"
    UNTIL_BEFORE_START = "the largest _id is taken when the snapshot is asked for, before the stream's start"
    UNTIL_LOCAL = "the largest _id is read as it is now, in the majority or not"
    UNTIL_OF_CHUNK = "the largest _id is that of the first chunk's documents"
    UNTIL_EXCLUDED = "what is left is less than the largest _id"


class Fault(StrEnum):
    """What may go wrong; all kinds of a scenario draw from one budget."""

    LAPSE = "a claim lapses while its handler runs"
    HALT = "a handler fails for good: its partition halts"
    LETTER = "a handler fails for good: its change becomes a dead letter"
    ROLLBACK = "a failover loses a commit that was seen, but not by the majority"
    REOPEN = "the stream breaks and is opened again at the watermark"
    UNREADABLE = "a chunk cannot be read"
    SHORT = "the server returns fewer documents than it could"
    ANSWERED_LATER = "the answer to a begin is given when it is asked for again, with the time of that"
    ELECTION = "a new primary lacks what is not in the majority"
    STOP = "somebody stops a snapshot, and lets it go on at any later time"


class Late(StrEnum):
    """Further kinds of writes whose answer may be lost: on the record of a snapshot."""

    BEGIN = "begin"
    PASS = "pass"
    CURSOR = "cursor"


class Progress(StrEnum):
    """The state of a snapshot."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"
    GONE = "source gone"


class World(NamedTuple):
    """A scenario: what exists, what is written meanwhile and what may go wrong.

    Args:
        name: A sentence for reports.
        keys: How many documents there may be; the partition of a key is ``key % partitions``.
        writes: What somebody else writes, in this order (see ``MARK`` and the following).
        absent: The keys that do not exist at the beginning.
        snapshots: How many run at once; ``chunk``: how many documents one read asks for.
        terms: How many terms may begin without need.
        partitions: How many there are.
        faults: Which kinds may happen; ``budget``: how many of them altogether.
        late: Which writes may land late; ``delays``: how many altogether.
        spills: Whether what is buffered may be stored.
        rewind: The time to which the operator may rewind, once.
        transactional: Whether a handler's effect happens with its commit.
        operator: Whether somebody retries or sets aside what is halted.
        matches: The keys of the documents that each snapshot wants; empty: all.
        mixed: Whether every key has a type of its own.
        lookup: Whether a change shows the document as it is when the change is read.
        partial: Whether a change of a document that was there brings no document.
        apart: Whether keys and documents are read at different times, and the stream may pass H before it is known.
        room: How many changes and items a listener keeps in memory; 0: any number.
        fresh: The keys that were inserted after the snapshot was asked for, and before the stream's start.
        broken: The rule left out.
    """

    name: str
    keys: int
    writes: tuple[int, ...] = ()
    absent: frozenset[int] = frozenset()
    snapshots: int = 1
    chunk: int = 2
    terms: int = 1
    partitions: int = 1
    faults: frozenset[Fault] = frozenset()
    budget: int = 0
    late: frozenset[StrEnum] = frozenset()
    delays: int = 0
    spills: bool = False
    rewind: int | None = None
    transactional: bool = False
    operator: bool = False
    matches: tuple[frozenset[int], ...] = ()
    mixed: bool = False
    lookup: bool = False
    partial: bool = False
    apart: bool = False
    room: int = 0
    fresh: frozenset[int] = frozenset()
    broken: Broken = Broken.NOTHING

    def matched(self, snapshot: int, key: int) -> bool:
        """Tell whether a snapshot wants a document."""
        return not self.matches or key in self.matches[snapshot]

    @property
    def restarts(self) -> bool:
        """Whether a stream may be opened a second time, so that it matters which watermark is stored when."""
        reopened = self.terms > 1 or self.rewind is not None
        return reopened or Fault.REOPEN in self.faults or self.broken is Broken.WATERMARK_AT_ITEM
