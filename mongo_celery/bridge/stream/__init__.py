"""What is listened to; opening, reading and reopening the change stream that serves it."""
