"""The threads of the CPU implementation, in a process of its own: torch's settings are global."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, torch
from blasst.kernels.workers import run_all
torch.set_num_threads(3)
if sys.argv[1] == "in vLLM":
    torch.set_num_threads = lambda threads: None  # as its CPU worker does
seen = []
def item():
    a = torch.ones(64, 64)
    seen.append([torch.get_num_threads(), float((a @ a).sum())])
run_all([item] * 12)
run_all([item] * 12)
print(json.dumps([seen, torch.get_num_threads()]))
"""


@pytest.mark.parametrize("where", ["alone", "in vLLM"])
def test_each_thread_computes_on_one_core_and_the_caller_keeps_its_own(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, where], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen, callers = json.loads(done.stdout)
    assert seen == [[1, 64.0**3]] * 24
    assert callers == 3


TWO_CALLERS = """
import threading, torch
from blasst.kernels import workers
make, done = workers._threads, []
def call(threads):
    torch._C.set_num_threads(threads)
    workers.run_all([lambda: done.append(threads)] * 4)
other = threading.Thread(target=call, args=(3,))
def make_and_be_overtaken(count):
    pool = make(count)
    if count == 2:
        other.start()
        other.join(1)
    return pool
workers._threads = make_and_be_overtaken
call(2)
other.join()
assert sorted(done) == [2] * 4 + [3] * 4, done
"""


def test_callers_with_other_numbers_of_threads_do_not_take_the_pool_away() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", TWO_CALLERS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


FEW_THREADS = """
import threading, torch
from blasst.kernels.workers import run_all
torch.set_num_threads(3)
start, started = threading.Thread.start, []
def start_two(thread):
    started.append(thread)
    if len(started) > 2:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = start_two
try:
    run_all([lambda: None] * 3)
except RuntimeError as e:
    print(e)
"""


def test_a_process_that_gets_no_more_threads_says_so_and_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FEW_THREADS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "can't start new thread\n"


FORK = """
import faulthandler, os, sys, threading, torch
from blasst.kernels import workers
from blasst.kernels.api import prefill_attention
from blasst.kernels.testing import dialled_inputs
torch.set_num_threads(2)
d = dialled_inputs(num_heads=4, num_kv_heads=2, head_dim=64, seqlen=600, skip_rate=0.5)
def attend():
    out, _ = prefill_attention(
        d.q, d.kv, d.cu_seqlens_q, skip_lambda=d.skip_lambda, impl=sys.argv[1]
    )
    # Compared outside torch, whose own parallel loops do not survive a fork.
    return out.numpy().tobytes()
want = attend()
# Another thread holds the pool's lock at the moment of the fork.
held, go = threading.Event(), threading.Event()
def hold():
    with workers._lock:
        held.set()
        go.wait()
other = threading.Thread(target=hold)
other.start()
held.wait()
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(40, exit=True)
    os._exit(0 if attend() == want else 3)
go.set()
other.join()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert attend() == want
raise SystemExit(status)
"""


def test_a_forked_child_makes_its_own_threads(cpu_impl: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORK, cpu_impl], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    from blasst.kernels import workers

    def fails() -> None:
        raise RuntimeError("from a worker")

    done: list[int] = []
    with pytest.raises(RuntimeError, match="from a worker"):
        workers.run_all([fails, *(lambda i=i: done.append(i) for i in range(100))])
    workers.run_all([lambda: done.append(-1)])
    assert done[-1] == -1
