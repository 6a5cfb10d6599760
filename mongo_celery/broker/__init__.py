"""The broker: bounded connections, and an app's queues."""
