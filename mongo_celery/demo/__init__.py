"""
The demo: the package's main job in one command, with faults and a verdict.

`app` is the Celery app. Its handler writes a summary of each order. `run` is the script: it starts servers and
processes, writes orders, kills the leading listener and a worker process, and counts the results. `command` is the
command line, and shows progress.
"""
