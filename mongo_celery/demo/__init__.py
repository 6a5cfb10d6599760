"""
The demo: the project's main job in one command, with faults, and a verdict.

::

    writer (own process) --> orders, customers --> bridge: 2 listeners, 1 worker with 2 processes
        |                                             |
        | record of what it wrote                     | names in orders, summaries, journal
        +----------------------> verdict <------------+

First the writer is as fast as it can be and nothing is broken: so the demo can say how many changes a second flow.
Then it writes over some seconds, and processes are killed and frozen.

The package reads upward: `history` (pure: facts of a run and checks of the guarantees; the tests use it too),
`setting` (names and URLs that all processes share), `plan` and `record` (what is written, what was written),
`verdict` (pure), `app` and `writer` (what the processes run), `evidence` (what is read back), `progress`, `faults`,
`view`, `servers`, then `run`, which joins them, and `command`.
"""
