"""
The costs of outbox, transactions and the parts of a bridge on this machine, and how they grow:
`python -m tests.benchmarks [SUITE...] [--quick]`.

Not installed and not part of the test run; `test_benchmarks.py` only sees to it that they work. What a change
costs on its way through the bridge is `mongo-celery bench`; the rules there hold here too: processes of their own,
names that are used once, one set of processes at a time, rounds whose median counts, and ratios to the plain way,
measured in the same rounds.

`outbox` (`outbox_suite`, `outbox_costs`, `pending_query`):

- *costs*: milliseconds of the caller and of all processes' processors for a write with its task, beside a plain
  write and `delay()`: 15 ms apart and without a pause, of one document and in bulks of 100 and 1 000, each way in turns
  that begin when everything of the one before has arrived; p99 and longest write of 8 writers to one document; and of 8
  that insert while the broker is frozen, beside inserts without an outbox. With the project's aims for these ratios.
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
- *handovers*: seconds until the next term has started a handler, and the listener's memory, with nothing stored and
  with 100 000 changes behind a retry of an hour.

`backlog` (`backlog_suite`):

- *backlogs*: processor time of a change, and the listener's memory at its start and at its highest, where 10 000,
  100 000 and a million changes wait for a listener: all of it should be the same. The handler takes lists of 500, so
  that the listener has most to do. What takes longer than 100 000 is measured once.

`handlers` (`handlers_suite`):

- *shared*: processor time of a change for each handler that gets it, if 1, 10 or 60 handlers share a stream: all of
  them get each change, one by one and in runs; or one of them gets it, and the others watch collections of their own in
  which nothing happens.

`latency` (`latency_suite`, `latency_app`):

- *waits*: milliseconds from an insert to the start of its handler while nothing else happens, of `bridge_chain` and
  `bridge_inline`, beside the naive loop, which starts a task for each change.
- *take-overs*: seconds from SIGTERM and from SIGKILL to the leader until the first message of the next term.

`many_app` is the app of `backlog` and `handlers`, and `commits` measures from their first commit to the last.
`outbox_programs`, `outbox_cost_programs`, `transfer_programs`, `outbox_app`, `watched_app` and `spill_app` are what the
measured processes run; they leave their answers as files (`answers`).
"""
