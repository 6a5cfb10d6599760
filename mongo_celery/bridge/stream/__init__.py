"""Sources and filters; opening, reading and reopening the change stream that serves it."""
