"""
The figures of the documentation that `mongo-celery bench` does not measure: `python -m tests.benchmarks [SUITE...]`.

These are not tests: `test_benchmarks.py` only checks that each suite runs. The rules of `mongo-celery bench` hold here
too: processes of their own, names that are used once, rounds whose median counts, and ratios to the plain way that was
measured in the same rounds.

- `outbox`: milliseconds of the caller and of all processes' processors for a write with its task, beside a plain write
  and `delay()`: single ones, bulks, and many writers or many tasks of one document. Each way begins when everything of
  the one before has arrived. Then milliseconds of a sweep among documents that are held back.
- `transactions`: transfers per second by several processes, as two-phase commits and with both accounts locked, beside
  two plain updates, with many accounts and with two.
- `backlog`: processor time of a change, and the listener's memory, with 10 000 to a million waiting changes. The
  handler takes lists of 500, so the listener has most to do.
- `handlers`: processor time of a change for each handler that gets it, with 1, 10 or 60 handlers on a stream. Either
  all of them get each change, or one does and the others watch idle collections.
- `latency`: milliseconds from an insert to its handler while nothing else happens, beside a naive loop that starts a
  task for each change; and seconds from SIGTERM and SIGKILL to the first message of the next term.

The modules named `_programs` and `_app` are run by the measured processes. They leave their answers as files
(`answers`). Backlogs are measured from the first commit to the last.
"""
