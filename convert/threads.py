"""How many workers a command gets."""

from __future__ import annotations

import os

from quant.errors import UsageError

MOST_THREADS = 1024
"""More would only take memory: each needs buffers of its own."""


def worker_count(threads: int | None) -> int:
    """``threads``, or the processors that this process may use when None.

    Raises:
        UsageError: fewer than one, or more than MOST_THREADS.
    """
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise UsageError(f"{threads} threads cannot do anything", "give --threads 1 or more")
    if threads > MOST_THREADS:
        raise UsageError(f"{threads} threads are too many", f"give --threads {MOST_THREADS} at most")
    return threads
