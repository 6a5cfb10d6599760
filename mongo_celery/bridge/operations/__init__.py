"""
What operators do with a bridge, without a command line: look, pause, resume, retry, skip, check.

Nothing here prints or knows click; the commands in `cli` are views of it, and a health endpoint can call
the same functions.
"""
