"""Opening, reading and reopening a change stream, and deciding where it starts."""
