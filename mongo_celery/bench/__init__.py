"""
The costs of the bridge on this machine, beside plain Celery.

Absolute figures say little on shared processors. So the modes of one round follow each other, rounds repeat, and the
median of the rounds is compared with `raw_chain`, the price of two Celery tasks: by rate, and by the processor time of
all processes, which is steadier.

**One rule for all modes.** A handler notes the start of each call, and the second task of `raw_chain` its end, in
shared memory (`stopwatch`). The rate of a mode is *(n - 1) / (last end - first start)*. So no start of a process and
no opening of a stream is in a figure. Nor is the part that a listener has read before the first handler starts: where
it reads ahead, many more changes follow. The worker has run some changes before, and the process that feeds it starts
anew once the worker is idle. The last end of a bridge is the moment at which its partition documents show that all
changes are committed.

**One set of processes at a time.** Each measurement starts its own worker and feeder, under names that are used once.

`setting`, `stopwatch` and `usage` know nothing of the rest. `app` is the code of the measured processes, `stage`
starts and ends them, `run` measures the modes, and `command` shows the results. The suites of `tests/benchmarks` use
the same stage.
"""
