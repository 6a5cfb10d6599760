"""
The demo: the project's main job in one command, with faults, and a verdict.

`app` is the Celery app, with one handler that keeps a summary of each order. `run` is the script: it starts servers and
processes, writes orders, kills the leading listener and a process of the worker, and counts what has come out.
`command` is the command line, and shows what happens.
"""
