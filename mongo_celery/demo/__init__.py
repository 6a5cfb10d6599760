"""
The demo: the project's main job in one command, with faults, and a verdict.

::

    writer (own process) --> orders, customers --> bridge: 2 listeners, 1 worker with 2 processes
        |                                             |
        | record of what it wrote                     | names in orders, summaries, journal
        +----------------------> verdict <------------+

The package reads upward: `setting` (names and URLs that all processes share), `verdict` (pure), `plan` and
`record` (what is written, what was written), `app` and `writer` (what the processes run), `evidence` (what is
read back), `progress`, `faults`, `view`, `servers`, then `run`, which joins them, and `command`.
"""
