"""The command line. Its modules import nothing heavy at the top, because `celery` loads them at every start."""
