"""
The listener: standby -> lease -> take-over -> stream -> window -> dispatch -> watermark.

::

    standing by --acquire--> taking over --> leading --lease lost, or asked to stop--> stepping down
         ^                                                                               |
         +-------------------------------------------------------------------------------+

One thread leads and decides. One reads the stream. One renews the lease. One removes stored changes that
are committed. One reads the ends of the oplog. One asks the broker about queues while something is out. The leading
thread trusts the lease until its own monotonic clock says otherwise, then stops to dispatch immediately, without
waiting for an answer. A listener that has lost its lease stands by. It does not exit.
"""
