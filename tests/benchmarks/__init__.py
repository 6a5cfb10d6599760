"""
What outbox, transactions and a bridge's stream cost on this machine:
`python -m tests.benchmarks [outbox] [transactions] [stream] [--quick]`.

Not installed and not part of the test run; `test_benchmarks.py` only sees to it that they work. What a change
costs on its way through the bridge is `mongo-celery bench`; the rules there hold here too: processes of their own,
names that are used once, one set of processes at a time, rounds whose median counts, and ratios to the plain way,
measured in the same rounds.

`outbox` (`outbox_suite`, `pending_query`):

- *writes*: milliseconds of one insert or update with what follows it: the write and `delay()` (the plain way), the
  outbox that dispatches at once, and the outbox that leaves it to a sweep; with one task, and with ten.
- *entries*: entries per second one by one at once, by a sweep beside `delay()` in the same process, and by a
  bridge's listener and a worker.
- *the sweep's query*: which index it uses, how many keys and documents it examines, and how long it takes, where 100
  of a million documents are pending; beside the same query without the index.
- *recovery*: seconds from a writer's SIGKILL until a sweep has delivered what it left behind.

`transactions` (`transaction_suite`):

- *transfers*: per second by several processes together, under low and high contention, as two-phase commits and with
  both accounts locked; beside two plain updates that nothing holds together.
- *recovery*: seconds from the SIGKILL of all processes until `recover` has brought everything under way to an end.
- *lock released*: seconds from a holder's SIGKILL until another has locked its document.

`stream` (`stream_suite`):

- *scanned*: oplog entries per second that a stream passes from the first to the last write of a neighbour, with 1,
  10, 60 and 200 sources: the bridge's stream with its sources in one database, in one database each, and with
  databases that are watched whole; beside one `$in` over the names, and beside one clause for each collection, which
  shows why there is none.

`outbox_programs`, `transfer_programs`, `outbox_app` and `watched_app` are what the measured processes run; they leave
their answers as files (`answers`).
"""
