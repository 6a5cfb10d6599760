"""The preflight of an outbox: what its writes and its delivery depend on, looked at by `outbox check`."""
