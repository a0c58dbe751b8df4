"""The Triton kernel compiles for every target without a GPU: shared memory, spills, pipelining."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the Triton kernel needs triton")

# bytes of a block, by compute capability
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
CASES = {
    "vote, ragged": {"VOTE": True, "PAGE": 0},
    "vote, pages": {"VOTE": True, "PAGE": 16},
    "dense, ragged": {"VOTE": False, "PAGE": 0},
    "head_dim 64": {"VOTE": True, "PAGE": 16, "HEAD_DIM": 64},
    "block lists": {"VOTE": True, "PAGE": 0, "LISTS": True},
}

# Every case where shared memory is large, before Hopper and on it; the usual one elsewhere.
BUILDS = [
    *((capability, name) for capability in (80, 90) for name in CASES),
    *((capability, "vote, pages") for capability in SHARED_MEMORY if capability not in (80, 90)),
    (86, "head_dim 64"),
]

COMPILE = """
import json
import subprocess
import sys
import tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from blasst.kernels.triton.config import config_for, own_geometry, shared_bytes
from blasst.kernels.triton.device import prefill_kernel as kernel

KINDS = {
    **dict.fromkeys(("Q", "K", "V", "Out"), "*bf16"),
    **dict.fromkeys(("Lse", "SkipLambda"), "*fp32"),
    **dict.fromkeys(("CuSeqlensQ", "KeyLengths", "PageTable"), "*i32"),
    "Counters": "*i64",
    "scale_log2": "fp32",
    "num_kv_heads": "i32",
    # The innermost strides are 1.
    "strides": (
        ("i32", "i32", "constexpr"),
        ("i32", "i32", "i32", "constexpr"),
        ("i32", "i32", "i32", "constexpr"),
        ("i32", "i32", "constexpr"),
        "i32",
        "i32",
    ),
}

def build(capability, limit, case):
    values = {"CAUSAL": True, "HEAD_DIM": 128, "LISTS": False, **case}
    values["COUNT"] = values["VOTE"]
    paged = values["PAGE"] > 0
    how = {"paged": paged, "lists": values["LISTS"]}
    geometry = own_geometry(values["HEAD_DIM"], divmod(capability, 10), **how)
    values |= {"TILE_M": geometry.tile_m, "TILE_N": geometry.tile_n}
    config = config_for(geometry, values["HEAD_DIM"], shared_memory=limit, **how)
    values |= {
        "V_AHEAD": config.v_ahead,
        "STAGES": config.num_stages,
        "DEMAND_STAGES": config.demand_stages,
        "CHUNK": config.chunk,
        "BALLOT": config.ballot,
        "WAIT": config.max_registers is not None,
    }
    kinds = dict(KINDS)
    if config.boxes:
        box = f"tensordesc<bf16[1, {geometry.tile_n}, {values['HEAD_DIM']}]>"
        kinds |= {"KBoxes": box, "VBoxes": box}
    else:
        values |= {"KBoxes": None, "VBoxes": None}
    if not values["VOTE"]:
        values |= {"SkipLambda": None, "Counters": None}
    if values["LISTS"]:
        kinds["Lists"] = ("*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32")
    else:
        values["Lists"] = None
    kinds |= dict.fromkeys(values, "constexpr")
    at = kernel.arg_names.index
    constants = {(at(name),): value for name, value in values.items()}
    divisible = [["tt.divisibility", 16]]
    pointers = [n for n, kind in kinds.items() if isinstance(kind, str) and kind[0] == "*"]
    hints = {(at(name),): divisible for name in pointers}
    for i, inner in ((0, 2), (1, 3), (2, 3), (3, 2)):
        constants[at("strides"), i, inner] = 1
        hints |= {(at("strides"), i, j): divisible for j in range(inner)}
    source = triton.compiler.ASTSource(kernel, kinds, constants, hints)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "maxnreg": config.max_registers,
        },
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        ptxas = [get_ptxas(capability).path, "-v", "-o", "/dev/null", file.name]
        arch = f"-arch=sm_{capability}" + ("a" if capability >= 90 else "")
        remarks = subprocess.run([*ptxas, arch], capture_output=True, text=True, check=True).stderr
    return {
        "remarks": remarks,
        "config": vars(config),
        "cubin": len(built.asm["cubin"]),
        "shared": built.metadata.shared,
        "bound": shared_bytes(geometry, values["HEAD_DIM"], config, paged),
        "ttgir": built.asm["ttgir"],
    }

limits, cases, wanted = json.loads(sys.argv[1])
print(json.dumps({
    f"{capability}, {name}": build(capability, limits[str(capability)], cases[name])
    for capability, name in wanted
}))
"""


def copies(text: str) -> int:
    """Asynchronous copies of keys or values, a block each."""
    boxes = text.count("ttng.async_tma_copy_global_to_local")
    return boxes or text.count("ttg.async_copy_global_to_local")


@pytest.fixture(scope="module")
def builds() -> dict[str, dict[str, Any]]:
    """By "capability, case", as config_for would run it."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-c",
            COMPILE,
            json.dumps([SHARED_MEMORY, CASES, BUILDS]),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return built


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "case"), BUILDS)
def test_compiles_and_fits(builds: dict[str, dict[str, Any]], capability: int, case: str) -> None:
    built = builds[f"{capability}, {case}"]
    assert built["cubin"] > 0
    assert built["shared"] <= SHARED_MEMORY[capability]
    if case != "block lists":
        assert built["shared"] <= built["bound"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "case"), [b for b in BUILDS if b[1] not in ("block lists", "head_dim 64")]
)
def test_the_branch_leaves_keys_and_values_in_the_pipeline(
    builds: dict[str, dict[str, Any]], capability: int, case: str
) -> None:
    """Keys and values of the loop over full blocks come by asynchronous copies alone: a load in
    the branch of the vote, or one that the compiler did not pipeline, is waited for every time."""
    built = builds[f"{capability}, {case}"]
    assert built["config"]["num_stages"] > 1
    loop = built["ttgir"].split("scf.for")[-1]
    assert copies(loop) >= 2
    assert not [line for line in loop.splitlines() if "tt.load" in line and "128x!tt" in line]
    always = built["config"]["max_registers"] is not None
    assert ("scf.if" in loop) == (always or case.startswith("vote"))


@pytest.mark.slow
def test_values_on_demand_come_inside_the_branch(builds: dict[str, dict[str, Any]]) -> None:
    loops = builds["90, vote, ragged"]["ttgir"].split("scf.for")
    on_demand, ahead = loops[-2:]
    before, branch = on_demand.split("scf.if", 1)
    assert copies(before) == 1
    assert copies(branch) >= 1
    assert copies(ahead.split("scf.if", 1)[0]) == 2


@pytest.mark.slow
def test_a_vote_takes_no_other_threads_scores(builds: dict[str, dict[str, Any]]) -> None:
    """Between scores and vote there are the maxima of each thread's own: no shuffle of a row's
    four threads, which only kept blocks need, and no trip through shared memory."""
    for loop in builds["90, vote, ragged"]["ttgir"].split("scf.for")[-2:]:
        vote, kept = loop.split("barrier.cta.red")
        maxima = vote.split("warp_group_dot_wait")[-1]
        assert "128x4xf32" in maxima
        assert maxima.count('"tt.reduce"') == 2  # of 2 and of TILE_N / 8 columns
        assert not [x for x in loop.splitlines() if "ttg.convert_layout" in x and "128x4x" in x]
        assert kept.count('"tt.reduce"') == 2  # the row's maximum, and its sum


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_product_is_taken_apart(builds: dict[str, dict[str, Any]], case: str) -> None:
    """ptxas says so when it waits for every instruction of a product (C7510 and after)."""
    assert "serialized" not in builds[f"90, {case}"]["remarks"]
    assert "registers" in builds[f"90, {case}"]["remarks"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_scores_stay_where_the_product_puts_them(
    builds: dict[str, dict[str, Any]], capability: int
) -> None:
    """A tile of bits in another layout would take the scores of every visit through shared memory,
    and more than double a visit."""
    loop = builds[f"{capability}, block lists"]["ttgir"].split("scf.for")[-1]
    assert loop.count("ttg.async_copy_global_to_local") >= 2
    moved = [line for line in loop.splitlines() if "ttg.convert_layout" in line]
    assert not [line for line in moved if "128xf32" in line and "128x128" in line]
