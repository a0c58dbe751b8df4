"""The demo with vLLM and the real model: short, but nothing of it is fake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from blasst.evals.store import read_results


@pytest.mark.vllm
@pytest.mark.slow
def test_the_demo_on_the_real_model(tmp_path: Path) -> None:
    blasst = str(Path(sys.executable).with_name("blasst"))
    command = [blasst, "demo", "--lengths", "1024", "--mag", "1000", "--json"]
    process = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=550
    )
    assert process.returncode == 0, process.stderr
    cells = {(c["threshold"], c["task"]): c for c in json.loads(process.stdout)["cells"]}
    assert len(cells) == 6
    for (threshold, task), cell in cells.items():
        assert cell["samples"] in (1, 2)
        assert 0 < cell["gold_nll"] < 5
        assert cell["ttft_s"] > 0
        if task == "niah_single_2":
            assert cell["score"] == 100
        if threshold == "dense":
            assert cell["skip_rate"] is None
        else:
            assert 0.05 < cell["skip_rate"] < 0.9
            dense = cells[("dense", task)]
            assert cell["gold_nll"] != dense["gold_nll"]
            assert cell["gold_nll"] == pytest.approx(dense["gold_nll"], rel=0.2)
    records = [r for r in read_results(tmp_path / "results.jsonl") if r["kind"] == "sample"]
    assert {len(r["layers"]) for r in records} == {30}
    assert "tokens dense, as admitted" in process.stderr
