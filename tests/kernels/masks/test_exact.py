"""What keeps the bits of the exact lane: the code that Inductor writes, and the options it gets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blasst.kernels.masks import Segments, bind, causal, flex
from blasst.kernels.masks.inputs import Inputs

SCRIPT = Path(__file__).parent / "scripts" / "inductor_code.py"


def start(lane: str, lengths: tuple[int, ...], cache: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-W", "ignore", str(SCRIPT), lane, *map(str, lengths)]
    held = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | held | {"TRITON_INTERPRET": "0"},
    )


def facts(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    found: list[dict[str, Any]] = json.loads(out)
    return found


@pytest.mark.slow
def test_the_program_of_the_exact_lane_does_not_know_the_length(tmp_path: Path) -> None:
    """A length of whole blocks, which the throughput lane compiles for itself, then others: one
    program, with bounds, whose row sums are a chain of additions."""
    exact = start("exact", (640, 130, 1280), tmp_path)
    free = start("throughput", (640,), tmp_path)
    (plain,), (first, *others) = facts(free), facts(exact)
    assert [row.keys() for row in others] == [{"length"}] * 2
    for direction in ("forward", "backward"):
        assert first[direction]["constants"]["IS_DIVISIBLE"] == "False"
    chain = first["backward"]["arithmetic"]
    assert "pointwise" in chain
    assert len([line for line in chain if " + " in line]) == 16 - 1
    assert not any("sum" in line or "reduction" in line for line in chain)

    assert plain["forward"]["constants"]["IS_DIVISIBLE"] == "True"
    assert any("tl.sum" in line for line in plain["backward"]["arithmetic"])


@pytest.mark.parametrize("exact", [True, False])
def test_only_the_exact_lane_pins_options(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []
    real = flex.torch.compile

    def compiled(f: Any, *, options: Any, **how: Any) -> Any:
        seen.append(("options", options))
        return real(f, backend="eager", **how)

    monkeypatch.setattr(torch, "compile", compiled)
    flex._compiled.cache_clear()
    mask = bind(causal(), Segments.from_position_ids(torch.arange(32)[None]))
    q = torch.randn(1, 32, 2, 8)
    flex.run(
        Inputs(q, q, q, mask, 0.3), backend="TRITON", geometry=flex.TRITON_GEOMETRY, exact=exact
    )
    flex._compiled.cache_clear()
    assert seen == [("options", flex.exact_options(8) if exact else None)]
    assert flex.exact_options(8)["unroll_reductions_threshold"] > 8
