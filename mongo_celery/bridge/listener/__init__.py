"""
The listener: standby -> lease -> take-over -> stream -> window -> dispatch -> watermark.

::

    standing by --acquire--> taking over --> leading --lease lost, or asked to stop--> stepping down
         ^                                                                               |
         +-------------------------------------------------------------------------------+

One thread leads and decides; one reads the stream; one renews the lease, and reports; one removes stored changes that
are committed; one reads the ends of the oplog; one asks the broker about queues while something is out. The leading
thread trusts the lease until its own monotonic clock says otherwise, then stops to dispatch immediately, without
waiting for an answer. A listener that has lost its lease stands by; it does not exit.
"""
