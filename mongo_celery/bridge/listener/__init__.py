"""
The listener: standby -> lease -> take-over -> stream -> window -> dispatch -> watermark.

::

    standing by --acquire--> taking over --> leading --lease lost, or asked to stop--> stepping down
         ^                                                                               |
         +-------------------------------------------------------------------------------+

One thread leads and decides, one reads the stream, and one renews the lease. Others remove committed stored changes,
read the ends of the oplog, and query the broker about queues with runs in flight. The leading thread trusts the lease
until its own monotonic clock says that it has expired. Then it stops dispatching immediately, without waiting for an
answer. A listener that has lost its lease becomes a standby. It does not exit.
"""
