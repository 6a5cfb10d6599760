"""
What outbox, transactions, a bridge's stream and what stands in it cost on this machine:
`python -m tests.benchmarks [outbox] [transactions] [stream] [spill] [--quick]`.

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

`spill` (`spill_suite`, `spill_costs`, `spill_handover`, `spill_rig`):

- *others*: changes per second of all other partitions while a hot document takes most writes, a retry waits for an
  hour, or a handler is halted under thousands of writes; beside the same load alone. All of it and its second half,
  with a buffer that has room for everything, with one that would be filled eight times, and past an oplog that has
  rolled over what stands. There it goes on in the end, so that what is lost would be waited for in vain.
- *backlogs*: how many changes of a backlog that flows, eight times as large as the buffer, were stored: of all
  partitions alike, and of three documents.
- *cost*: processor time for storing one change of 1 kB and of 10 kB and for reading it back, beyond that of one that
  stays in memory.
- *handovers*: seconds until the next term has started a handler, and until a layout with twice as many partitions is
  in force, and the listener's memory, with nothing stored and with 100 000 changes behind a retry of an hour.

`outbox_programs`, `transfer_programs`, `outbox_app`, `watched_app` and `spill_app` are what the measured processes run;
they leave their answers as files (`answers`).
"""
