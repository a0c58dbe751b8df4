"""Which route runs, and why: crossovers, lanes, determinism; what they refuse."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blasst.kernels import support
from blasst.kernels.errors import InvalidInputError, UnsupportedError
from blasst.kernels.masks import fa4, flex, routes
from blasst.kernels.masks.bound import bind
from blasst.kernels.masks.crossover import MEASURED, Crossover
from blasst.kernels.masks.mods import causal
from blasst.kernels.masks.routes import Route, RouteProblem, masked_attention
from blasst.kernels.masks.segments import Segments
from blasst.kernels.types import Geometry, Problem

GPU = RouteProblem(
    Problem(128, 16, 4, "bfloat16", "cuda", (9, 0), block_mask=True, vote=False),
    seqlen=16384,
    needs_grad=True,
)
BLACKWELL = replace(GPU, attention=replace(GPU.attention, capability=(10, 0)))
CPU = replace(GPU, attention=replace(GPU.attention, device_type="cpu", capability=None))


@pytest.mark.parametrize(
    ("problem", "route"),
    [
        (GPU, Route.FA4),
        (replace(GPU, compiling=True), Route.FLEX_FA4),
        (replace(GPU, compiling=True, seqlen=8192), Route.FLEX_TRITON),
        (replace(GPU, seqlen=4096), Route.FA4),
        (replace(GPU, seqlen=2048), Route.FLEX_TRITON),
        (replace(GPU, lane="exact"), Route.FLEX_TRITON),
        (replace(GPU, determinism="strict"), Route.FLEX_TRITON),
        (replace(GPU, determinism="strict", needs_grad=False), Route.BLASST),
        (replace(GPU, needs_grad=False), Route.BLASST),
        (replace(GPU, needs_grad=False, compiling=True), Route.FLEX_FA4),
        (replace(GPU, needs_grad=False, lane="exact"), Route.FLEX_TRITON),
        (replace(GPU, needs_grad=False, seqlen=1024), Route.FLEX_TRITON),
        (replace(GPU, determinism="warn"), Route.FA4),
        (replace(GPU, determinism="warn", lane="exact"), Route.FLEX_TRITON),
        (replace(GPU, fa4_reasons=("hidden",)), Route.FLEX_TRITON),
        (BLACKWELL, Route.FLEX_TRITON),
        (replace(GPU, attention=replace(GPU.attention, dtype="float32")), Route.FLEX_TRITON),
        (replace(GPU, attention=replace(GPU.attention, head_dim=192)), Route.FLEX_TRITON),
        (replace(GPU, attention=replace(GPU.attention, head_dim=96)), Route.FLEX_TRITON),
        (CPU, Route.EAGER),
        (replace(CPU, needs_grad=False), Route.BLASST),
        (replace(CPU, needs_grad=False, compiling=True), Route.EAGER),
        (replace(CPU, attention=replace(CPU.attention, head_dim=48)), Route.EAGER),
    ],
)
def test_auto(problem: RouteProblem, route: Route) -> None:
    assert routes.choose(problem, "auto", MEASURED).route is route


def test_crossover_is_data(tmp_path: Path) -> None:
    table = tmp_path / "masks.json"
    rows = [
        {"route": "flex-fa4", "needs_grad": True, "major": 10, "head_dim": 128, "tokens": 2048},
        {"route": "blasst", "needs_grad": False, "major": 9, "head_dim": 128, "tokens": 512},
    ]
    table.write_text(json.dumps({"crossover": rows}))
    loaded = Crossover.load(table)
    assert routes.choose(BLACKWELL, "auto", loaded).route is Route.FLEX_FA4
    assert routes.choose(GPU, "auto", loaded).route is Route.FLEX_TRITON
    short = replace(GPU, needs_grad=False, seqlen=512)
    assert routes.choose(short, "auto", loaded).route is Route.BLASST
    assert routes.choose(replace(short, seqlen=511), "auto", loaded).route is Route.FLEX_TRITON
    table.write_text("{}")
    with pytest.raises(InvalidInputError, match="blasst bench masks"):
        Crossover.load(table)


def test_auto_says_once_what_runs_and_why(caplog: pytest.LogCaptureFixture) -> None:
    table = Crossover({("blasst", False, 9, d): 4096 for d in (48, 128)}, "a table")
    inference = replace(GPU, needs_grad=False)
    routes._log.cache_clear()
    with caplog.at_level("INFO", logger="blasst.kernels"):
        for _ in range(2):
            routes.choose(inference, "auto", table)
            routes.choose(inference, "flex-triton", table)
        hidden = replace(inference, attention=replace(inference.attention, head_dim=48))
        assert routes.choose(hidden, "auto", table).route is Route.FLEX_TRITON
    said = [r.message for r in caplog.records if "masked" in r.message]
    assert said[0] == (
        "masked attention runs on blasst: faster from 4096 tokens on in inference (a table)"
    )
    assert len(said) == 2
    assert "runs on flex-triton: no faster route" in said[1]
    assert "not blasst: " in said[1]
    assert "head_dim 48" in said[1]


STRICT = replace(GPU, determinism="strict")
VOTE = replace(GPU, attention=replace(GPU.attention, vote=True))


@pytest.mark.parametrize(
    ("problem", "impl", "text"),
    [
        (STRICT, "flex-fa4", "use_deterministic_algorithms"),
        (STRICT, "fa4", "use flex-triton"),
        (replace(GPU, lane="exact"), "flex-fa4", "flex-triton only"),
        (replace(GPU, lane="exact"), "fa4", "flex-triton only"),
        (replace(GPU, lane="exact", determinism="warn"), "flex-fa4", "whatever deterministic"),
        (replace(GPU, lane="exact", determinism="warn"), "fa4", "whatever deterministic"),
        (replace(BLACKWELL, lane="exact", determinism="strict"), "fa4", "flex-triton only"),
        (replace(GPU, lane="exact"), "eager", "flex-triton only"),
        (replace(GPU, lane="exact"), "blasst", "flex-triton only"),
        (replace(CPU, lane="exact"), "auto", "needs a CUDA GPU"),
        (replace(GPU, lane="exact", compiling=True), "auto", "torch.compiler.disable"),
        (replace(GPU, lane="exact", compiling=True), "flex-triton", "torch.compiler.disable"),
        (GPU, "blasst", "no backward"),
        (VOTE, "flex-triton", "skip_lambda"),
        (VOTE, "auto", "no backward"),
        (replace(CPU, needs_grad=False, seqlen_k=16383), "blasst", "16384 query rows and 16383"),
        (replace(GPU, attention=replace(GPU.attention, capability=(8, 0))), "fa4", "8.0"),
        (replace(GPU, fa4_reasons=("pip uninstall flash-attn",)), "fa4", "pip uninstall"),
    ],
)
def test_refusals(problem: RouteProblem, impl: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        routes.choose(problem, impl, MEASURED)


def test_blackwell_orders_dq_when_asked_to() -> None:
    strict = replace(BLACKWELL, determinism="strict")
    assert routes.choose(strict, "fa4", MEASURED).route is Route.FA4
    for route in (Route.FA4, Route.FLEX_FA4):
        assert routes.needs_write_order(strict, route)
        assert not routes.needs_write_order(replace(strict, needs_grad=False), route)
        assert not routes.needs_write_order(BLACKWELL, route)
        assert not routes.needs_write_order(STRICT, route)


def test_a_torch_whose_flex_attention_knows_no_write_order() -> None:
    assert flex.orders_dq() == hasattr(
        bind(causal(), Segments.from_position_ids(torch.arange(20)[None])).flex(Geometry()),
        "dq_write_order",
    )
    old = replace(BLACKWELL, determinism="strict", flex_orders_dq=False)
    with pytest.raises(UnsupportedError, match=r"torch 2\.13"):
        routes.choose(old, "flex-fa4", MEASURED)
    assert routes.choose(old, "fa4", MEASURED).route is Route.FA4
    warned = replace(old, determinism="warn")
    assert not routes.needs_write_order(warned, Route.FLEX_FA4)
    assert routes.needs_write_order(warned, Route.FA4)


def test_a_kernel_gets_lists_of_its_own_blocks_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "_package", lambda module, distribution: [])
    hopper = replace(GPU, needs_grad=False)
    assert routes.blasst_geometry(hopper) == Geometry(64, 128)
    given = replace(hopper.attention, geometry=Geometry(128, 128))
    assert routes.blasst_geometry(replace(hopper, attention=given)) == Geometry(128, 128)
    assert routes.blasst_geometry(replace(CPU, needs_grad=False)) == Geometry(128, 128)


def test_warn_only_says_so_on_a_throughput_route(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = bind(causal(), Segments.from_position_ids(torch.arange(64)[None]))
    q, k, v = torch.zeros(3, 1, 64, 2, 16)
    warn = replace(GPU, determinism="warn")
    monkeypatch.setattr(routes, "_problem", lambda *a: warn)
    monkeypatch.setattr(fa4, "run", lambda *a, **o: (q, q))
    with pytest.warns(routes.NotReproducibleWarning, match="exact"):
        masked_attention(q, k, v, mask, impl="fa4")
    monkeypatch.setattr(routes, "_problem", lambda *a: replace(warn, needs_grad=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked_attention(q, k, v, mask, impl="fa4")
