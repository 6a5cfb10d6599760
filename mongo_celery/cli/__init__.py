"""The command line. Modules here import nothing heavy at the top: `celery` loads them at every start."""
