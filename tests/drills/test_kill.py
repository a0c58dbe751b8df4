"""kill -9 of real processes of a deployment under load; the full form is in docs/operate.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blasst.deploy.drills.kill import Plan, run

MAKE_MODEL = Path(__file__).parents[1] / "plugin" / "scripts" / "make_model.py"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, MAKE_MODEL, folder], check=True, env=env, timeout=120)
    return folder


@pytest.mark.vllm
@pytest.mark.slow
def test_killed_processes_lose_no_change_and_answer_under_no_wrong_lambda(model, tmp_path):
    folder = tmp_path / "drill"
    folder.mkdir()
    plan = Plan(
        model=model,
        folder=folder,
        changes=30,
        sidecar_kills=4,
        engine_kills=("worker",),
        mags=(500.0, 2000.0, 4000.0),
        prompt_tokens=1200,
        vocabulary=250,
        pause_s=0.3,
    )
    result = run(plan)
    print(result.numbers)
    assert result.faults == []
    numbers = result.numbers
    assert numbers["acknowledged"] >= 30
    assert numbers["kills"]["sidecar"]["times"] == 4
    assert numbers["kills"]["worker"]["times"] == 1
    assert numbers["checked_by_content"] >= 10
    assert numbers["own_threshold"] >= 3
    assert numbers["generations_seen"] >= 20
    assert numbers["tiles_skipped"] > 0
