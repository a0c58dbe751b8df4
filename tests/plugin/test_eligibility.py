"""Which layers skip, and the reasons that are printed for the others."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.kernels.dispatch import choose
from blasst.kernels.exchange.layout import LAYER_REASONS
from blasst.kernels.native import build
from blasst.kernels.types import Problem
from blasst.plugin import capability, eligibility
from blasst.plugin.capability import chosen_impl, engine_reasons
from blasst.plugin.eligibility import LayerFacts, Verdict, judge, layer_reasons, table
from blasst.plugin.rank_setup import layer_indices, slower

PROBLEM = Problem(head_dim=64, num_heads=4, num_kv_heads=2, dtype="float32", page_size=32)
PLAIN = LayerFacts("model.layers.0.attn", "BLASST", cache_isa="vec", problem=PROBLEM)


def test_plain_attention_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ())
    assert judge(PLAIN, [], "auto") == Verdict(PLAIN.name, "cpu", ())
    assert judge(PLAIN, [], "reference").impl == "reference"
    choose.cache_clear()
    monkeypatch.setattr(build, "reasons", lambda: ("no C compiler runs",))
    assert judge(PLAIN, [], "auto").impl == "cpu-torch"
    assert judge(PLAIN, [], "cpu").reasons == ("cpu: no C compiler runs",)
    assert slower(PROBLEM).endswith("slower than cpu: no C compiler runs")
    choose.cache_clear()


@pytest.mark.parametrize(
    ("value", "tokens"),
    [(None, None), (-1, None), ((-1, -1), None), (128, 128), ((127, 0), 128), ((0, 0), 1)],
)
def test_windows_count_tokens(value: int | tuple[int, int] | None, tokens: int | None) -> None:
    # vLLM gives what it was told on a CPU, on CUDA (tokens to the left, tokens to the right).
    assert eligibility._window(value) == tokens


@pytest.mark.parametrize(
    ("changes", "reason", "kind"),
    [
        ({"backend": "CPU_MLA"}, "vLLM gave it the backend CPU_MLA", "other_backend"),
        ({"layer_class": "ChunkedLocalAttention"}, "ChunkedLocalAttention", "layer_class"),
        ({"attn_type": "encoder_only"}, "encoder_only attention", "attention_type"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention", "attention_type"),
        ({"sliding_window": 128}, "sliding window of 128 tokens", "sliding_window"),
        ({"soft_cap": 50.0}, "logit soft cap 50", "soft_cap"),
        ({"sinks": True}, "attention sinks", "sinks"),
        ({"alibi": True}, "ALiBi", "alibi"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "quantised (fp8_e4m3)", "kv_cache_dtype"),
        ({"cache_isa": "amx"}, "'amx'", "cache_layout"),
        ({"cache_isa": ""}, "layout is ''", "cache_layout"),
    ],
)
def test_each_reason_is_told(changes: dict[str, Any], reason: str, kind: str) -> None:
    facts = dataclasses.replace(PLAIN, **changes)
    ((named, told),) = layer_reasons(facts)
    assert named == kind
    assert reason in told
    verdict = judge(facts, [], "auto")
    assert verdict.impl is None
    assert told in verdict.reasons
    assert verdict.kind == kind
    assert kind in LAYER_REASONS


def test_other_reasons_have_kinds_too() -> None:
    assert judge(PLAIN, ["dual-batch overlap"], "auto").kind == "engine"
    problem = dataclasses.replace(PROBLEM, head_dim=96)
    assert judge(dataclasses.replace(PLAIN, problem=problem), [], "auto").kind == "kernel"
    assert {"engine", "kernel"} <= set(LAYER_REASONS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 96}, "head_dim 96"),
        ({"dtype": "float64"}, "dtype float64"),
        ({"device_type": "cuda", "capability": (7, 5)}, "hopper: the GPU has compute capability"),
        ({"device_type": "cuda", "capability": (9, 0)}, "hopper: dtype float32"),
    ],
)
def test_the_kernels_own_limits_are_told(changes: dict[str, Any], reason: str) -> None:
    facts = dataclasses.replace(PLAIN, problem=dataclasses.replace(PROBLEM, **changes))
    assert reason in "; ".join(judge(facts, [], "auto").reasons)


def test_only_implementations_of_the_device_are_named() -> None:
    on_cpu = chosen_impl(dataclasses.replace(PROBLEM, head_dim=96), "auto")[1]
    assert all(reason.startswith("cpu: ") for reason in on_cpu)
    on_gpu = dataclasses.replace(PROBLEM, device_type="cuda", capability=(9, 0))
    assert not any(reason.startswith("cpu: ") for reason in chosen_impl(on_gpu, "auto")[1])


def test_speculative_decoding_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine()
    config.speculative_config = object()
    monkeypatch.setattr(capability, "device", lambda: ("cpu", None))
    assert engine_reasons(config) == []
    monkeypatch.setattr(capability, "device", lambda: ("cuda", (9, 0)))
    (reason,) = engine_reasons(config)
    assert reason.startswith("speculative decoding")


def engine(**changes: Any) -> Any:
    parallel = {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
    }
    model = {"is_mm_prefix_lm": False, "rswa_window": None}
    cache = {"kv_sharing_fast_prefill": False}
    for part in (parallel, model, cache):
        part.update({k: v for k, v in changes.items() if k in part})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**cache),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_context_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"use_ubatching": True},
        {"kv_sharing_fast_prefill": True},
        {"is_mm_prefix_lm": True},
        {"rswa_window": 512},
    ],
)
def test_engine_options_that_break_up_requests(changes: dict[str, Any]) -> None:
    assert engine_reasons(engine()) == []
    (reason,) = engine_reasons(engine(**changes))
    assert judge(PLAIN, [reason], "auto") == Verdict(PLAIN.name, None, (reason,))


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False), ("", False)])
def test_answers_that_must_not_depend_on_the_batch_are_dense(
    monkeypatch: pytest.MonkeyPatch, value: str, refused: bool
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    reasons = engine_reasons(engine())
    assert [r.split(":")[0] for r in reasons] == ["VLLM_BATCH_INVARIANT"] * refused


def test_table_groups_equal_verdicts() -> None:
    verdicts = [Verdict(f"layers.{i}", "cpu", ()) for i in range(30)]
    verdicts += [Verdict("layers.30", None, ("ALiBi", "attention sinks"))]
    lines = table(verdicts).splitlines()
    assert lines[0].endswith("30 of 31 layers skip")
    assert lines[1].split() == ["30", "x", "layers.0", "..", "layers.29", "skips", "on", "cpu"]
    assert lines[2].endswith("dense: ALiBi; attention sinks")


def test_layers_are_numbered_as_in_the_model() -> None:
    assert layer_indices(["model.layers.7.attn", "model.layers.9.attn"]) == {
        "model.layers.7.attn": 7,
        "model.layers.9.attn": 9,
    }
    # Two numbers in a name, or one number twice: then by order.
    assert list(layer_indices(["a.3.b.0", "a.4.b.0"]).values()) == [0, 1]
    assert list(layer_indices(["decoder.1.attn", "encoder.1.attn"]).values()) == [0, 1]
    assert list(layer_indices(["attn"]).values()) == [0]
