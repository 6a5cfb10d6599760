"""
What this machine makes of it: the bridge beside plain Celery and plain loops, in one run.

Absolute figures say little on shared processors, so the modes of one round follow each other, rounds
repeat, and the median of the rounds is set in relation to `raw_chain`, the price of two Celery tasks: by
rate, and by the processor time of all processes, which is steadier.

**One rule for all modes.** Every handler notes the start of each call, and a second task or a saved
token its end, in shared memory (`stopwatch`): well under a microsecond. A mode's rate is
*(n - 1) / (last end - first start)*. So no start of a process, no connection and no opening of a stream
is in any figure, but everything that happens between changes is. What a listener has read when the first
handler starts is not, either: where it reads ahead, so many changes follow that it is little. Where a worker
takes part, it has run some changes before (`warm_up`), and the process that feeds it is started anew once it
is idle: the publisher, the loop or the listener. For `bridge_*` the last end is the moment at which the
partition documents say that everything is committed. Documents that a stream reads were written beforehand.
`listener_alone` has no handler that starts: its time is that between the first and the last batch that
MongoDB gives to its stream.

**One set of processes at a time.** Each measurement starts its own worker and feeder and ends them; none
of another mode runs meanwhile. Names of queues, databases and bridges are used once, so that given
servers keep nothing of it and no mode meets another's messages.

The package reads upward: `payload`, `setting`, `stopwatch` and `usage` know nothing of the rest; `handler_work`,
`raw_app`, `bridge_app`, `bulk_app` and `programs` are what the measured processes run; `stage` starts and ends
them; `modes` are what is compared, and `rates`, `latency`, `memory` and `takeover` measure them; `figures` and
`aims` judge; `run` puts all in order; `tables`, `plot` and `report` show it. Beside that `workload`, `capacity`
and `limits` say what a user's own changes come to, and `capacity_view` shows that; `command` is the command line.
"""
