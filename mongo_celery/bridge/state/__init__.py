"""
The bridge's state in MongoDB, one collection a module: every query has one home.

All reads are majority reads on the primary and all writes majority writes, but for what a success leaves
(`handled`, and then the position), which is written with w:1. Expiry is judged by the server's clock alone:
`$$NOW` inside the update that decides. Every value of a user that enters a pipeline goes through `$literal`.
Else a string that begins with `$` would be taken for a field path.
"""
