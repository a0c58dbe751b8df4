"""Threads for the CPU implementation: each runs torch on one core, on work taken from one list.

Parallel loops inside torch meet at a barrier after every operation, and one busy neighbour on a
core then stalls all others (measured: 50 times slower on a shared machine); independent threads
lose only their share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None
"""(process, threads, pool): a forked child has no threads and makes its own."""


def run_all(items: Iterable[Callable[[], None]]) -> None:
    """Run every item, started in this order, on torch.get_num_threads() threads."""
    threads = torch.get_num_threads()
    pending = iter(items)
    failed = threading.Event()
    guard = threading.Lock()

    def drain() -> None:
        with torch.inference_mode():
            while not failed.is_set():
                with guard:
                    item = next(pending, None)
                if item is None:
                    return
                try:
                    item()
                except BaseException:
                    failed.set()
                    raise

    if threads == 1:
        drain()
        return
    pool = _threads(threads)
    futures = [pool.submit(drain) for _ in range(threads)]
    for future in futures:
        future.result()


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is not None and _pool[:2] == (os.getpid(), count):
            return _pool[2]
        if _pool is not None and _pool[0] == os.getpid():
            _pool[2].shutdown(wait=False)
        ready = threading.Barrier(count + 1)
        cores = _cores()

        def start() -> None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)
            # Not torch.set_num_threads: vLLM's CPU worker puts a function that does nothing there.
            torch._C.set_num_threads(1)
            # A thread takes the default, which changes below, over its own setting unless it has
            # asked once.
            torch.get_num_threads()
            ready.wait()

        pool = ThreadPoolExecutor(count, "blasst-cpu", start)
        for _ in range(count):
            pool.submit(int)
        ready.wait()
        # The setting is per thread, but the last one made is also the default of new threads.
        torch._C.set_num_threads(count)
        _pool = (os.getpid(), count, pool)
        return pool


def _cores() -> set[int]:
    """The cores of all threads together: vLLM binds each, the one that starts ours included."""
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                cores |= os.sched_getaffinity(int(thread))
    return cores
