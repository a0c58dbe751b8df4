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
