"""The broker: bounded connections, the queues that an app knows, and notices."""
