"""The broker: bounded connections, and the queues that an app knows."""
