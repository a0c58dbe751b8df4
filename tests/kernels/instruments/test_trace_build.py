"""The Hopper kernel with and without clock reads, compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import sys
from dataclasses import replace
from pathlib import Path
from blasst.kernels.cute import trace
from blasst.kernels.hopper.compile import compile_prefill
from blasst.kernels.hopper.launch import config_for

folder = Path(sys.argv[1])
config = config_for("bfloat16", 128, causal=True, page_size=0, vote=True, count=True)

def build(name, config):
    compile_prefill.__wrapped__(config)
    (made,) = folder.glob("*.sass")
    made.rename(folder / name)

build("default", config)
build("traced", replace(config, trace=True))
trace.Trace.mark = lambda self, step, visit: None
build("without hooks", config)
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """SASS for compute capability 9.0."""
    pytest.importorskip("cutlass", reason="the Hopper kernel needs nvidia-cutlass-dsl")
    folder: Path = tmp_path_factory.mktemp("sass")
    environment = {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "sass",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (folder / name).read_text() for name in ("default", "traced", "without hooks")}


@pytest.mark.slow
def test_what_is_not_asked_for_costs_nothing(builds: dict[str, str]) -> None:
    assert builds["default"] == builds["without hooks"]
    assert "CLOCK" not in builds["default"]


@pytest.mark.slow
def test_the_traced_build_reads_clocks_and_multiplies_as_the_other(builds: dict[str, str]) -> None:
    """Eight marks a visit, two in the loop of each loading warp, one behind the output."""
    traced = builds["traced"]
    assert sum("CS2R" in line and "CLOCK" in line for line in traced.splitlines()) >= 8 + 2 * 2 + 1
    assert "LDL" not in traced
    assert traced.count("HGMMA") == builds["default"].count("HGMMA")
    assert traced.count("WARPGROUP.DEPBAR") == builds["default"].count("WARPGROUP.DEPBAR")
