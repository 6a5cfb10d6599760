"""
A fenced effect in an SQL table, with the standard library's SQLite.

One row of `fences` per (subscription, partition) remembers the newest execution that has written. It is
checked and raised in the transaction of the effect, so that a stale execution never writes after a newer one.
"""

import sqlite3

from mongo_celery import Fence
from mongo_celery.errors import StaleFencingTokenError

SCHEMA = """
CREATE TABLE fences (
    subscription TEXT, partition INTEGER, partitioning INTEGER NOT NULL, token INTEGER NOT NULL,
    PRIMARY KEY (subscription, partition)
);
CREATE TABLE totals (customer TEXT PRIMARY KEY, cents INTEGER NOT NULL);
"""

# The last WHERE is the guard: an older partitioning, or the same one with a token not larger than mine.
# The first refuses an older partitioning in every partition: a key may have moved to another index since.
RAISE_FENCE = """
INSERT INTO fences SELECT :subscription, :partition, :partitioning, :token
WHERE NOT EXISTS (SELECT 1 FROM fences WHERE subscription = :subscription AND partitioning > :partitioning)
ON CONFLICT DO UPDATE SET partitioning = excluded.partitioning, token = excluded.token
WHERE partitioning < excluded.partitioning OR (partitioning = excluded.partitioning AND token <= excluded.token)
"""


def pass_fence(db: sqlite3.Connection, fence: Fence) -> None:
    """Raise the fence's row to mine, or end the transaction: call it first, in the effect's transaction."""
    row = {
        "subscription": fence.key,
        "partition": fence.index,
        "partitioning": fence.partitioning,
        "token": fence.token,
    }
    if db.execute(RAISE_FENCE, row).rowcount == 0:
        raise fence.stale(table="totals")


def set_total(db: sqlite3.Connection, fence: Fence, customer: str, cents: int) -> str:
    """One handler's effect: the fence and the total in one transaction, both or neither."""
    try:
        with db:  # commits, or rolls back on an error
            pass_fence(db, fence)
            db.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (customer, cents))
    except StaleFencingTokenError:
        return "refused"
    return "written"


def main() -> None:
    """Two executions of one change, and what else may and may not write."""
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    first = Fence("shop/totals", partitioning=1, index=3, token=7)
    second = Fence("shop/totals", partitioning=1, index=3, token=8)
    neighbour = Fence("shop/totals", partitioning=1, index=4, token=2)
    last = Fence("shop/totals", partitioning=1, index=4, token=9)
    repartitioned = Fence("shop/totals", partitioning=2, index=3, token=1)

    def show(what: str, expected: str, outcome: str) -> None:
        print(f"{what:<58}{outcome}")
        assert outcome == expected, what

    show("token 7 starts, and hangs", "written", set_total(db, first, "ann", 100))
    show("token 8 takes over", "written", set_total(db, second, "ann", 250))
    show("token 8 writes a second time", "written", set_total(db, second, "bob", 40))
    show("token 7 wakes up", "refused", set_total(db, first, "ann", 100))
    show("token 7 tries a row that nobody has written", "refused", set_total(db, first, "eve", 1))
    show("token 2 of another partition", "written", set_total(db, neighbour, "joe", 5))
    show("token 1 of a newer partitioning", "written", set_total(db, repartitioned, "ann", 300))
    show("token 8 of the older partitioning", "refused", set_total(db, second, "ann", 250))
    show("token 9 of the older partitioning, in another partition", "refused", set_total(db, last, "ann", 250))
    totals = dict(db.execute("SELECT customer, cents FROM totals ORDER BY customer"))
    print(totals)
    assert totals == {"ann": 300, "bob": 40, "joe": 5}


if __name__ == "__main__":
    main()
