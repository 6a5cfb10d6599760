"""
The bridge's state in MongoDB, with one module per collection. Every query is in one place.

All reads are majority reads on the primary, and all writes are majority writes. The only exceptions are the writes
after a success (`handled`, then the position), with w:1. Only the server's clock decides about expiry: `$$NOW` inside
the deciding update. Every user value in a pipeline goes through `$literal`. Otherwise a string that begins with `$`
would be a field path.
"""
