"""Python's garbage collector, kept from looking at all objects of the process while a checkpoint's tables are made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Not collect while thousands of small objects are made that all live on.

    They make the collector look at every object of the process, a quarter of a second each time with torch and
    Lightning alone. In another thread than the main one nothing is paused: training goes on beside it.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
