"""
The costs of the bridge on this machine, beside plain Celery.

Absolute figures mean little on shared CPUs. So the modes of a round run one after the other, and rounds repeat. The
median over rounds is compared with `raw_chain`, the price of two Celery tasks, by rate and by the CPU time of all
processes, which is more stable.

**One rule for all modes.** In shared memory (`stopwatch`), a handler notes the start of each call, and the second task
of `raw_chain` its end. The rate of a mode is *(n - 1) / (last end - first start)*. So no figure includes a process
start or the opening of a stream. It also excludes changes that a listener reads before the first handler starts: such a
mode gets many more changes. The worker runs some changes first, and its feeder restarts when the worker is idle. The
last end of a bridge is the moment when its partition documents show all changes as committed.

**One set of processes at a time.** Each measurement starts its own worker and feeder, with unique names.

`setting` and `stopwatch` do not depend on the rest. `app` is the code of the measured processes. `stage` starts and
ends them, `run` measures the modes, and `command` shows the results. The suites of `tests/benchmarks` use the same
stage.
"""
