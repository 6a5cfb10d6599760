"""
An operator's work with a bridge from Python: status, pause, resume, retry, skip, check.

Nothing here prints or knows click. The commands in `cli` are views of it, and a health endpoint can call the same
functions.
"""
