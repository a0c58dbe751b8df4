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
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_lock = threading.Lock()
_pool: tuple[int, ThreadPoolExecutor] | None = None
"""(threads, pool)"""


def _forget() -> None:
    """A forked child has none of the threads, and the lock as another thread held it."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


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
    # Under one lock: another caller's number of threads shuts this pool down.
    with _lock:
        pool = _threads(threads)
        futures = [pool.submit(drain) for _ in range(threads)]
    wait(futures)
    for future in futures:
        future.result()


def _threads(count: int) -> ThreadPoolExecutor:
    """The pool of this size; the caller holds the lock."""
    global _pool
    if _pool is not None and _pool[0] == count:
        return _pool[1]
    if _pool is not None:
        _pool[1].shutdown(wait=False)
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
    try:
        for _ in range(count):
            pool.submit(int)
    except RuntimeError:
        # No more threads can be had; those that wait here would keep the process from ending.
        ready.abort()
        raise
    ready.wait()
    # The setting is per thread, but the last one made is also the default of new threads.
    torch._C.set_num_threads(count)
    _pool = (count, pool)
    return pool


def _cores() -> set[int]:
    """The cores of all threads together: vLLM binds each, the one that starts ours included."""
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                cores |= os.sched_getaffinity(int(thread))
    return cores
