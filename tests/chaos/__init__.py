"""
A seeded run of everything at once: faults, poison and standing partitions, while a writer goes on.

`python -m tests.chaos --help` says how. What happens when is drawn from the seed (`plan`); what has happened is read
from the server's own oplog (`following`, `reading`), and judged by pure checks (`checks`, `verdict`). That all of this
sees what it is to see is shown by builds that are broken on purpose (`broken`).
"""
