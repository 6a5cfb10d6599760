"""Sources and filters of handlers, and the reader of the change stream that serves them."""
