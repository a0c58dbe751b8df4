"""Which layers can skip, decided once at the start, with every reason against the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blasst.kernels.types import Problem
from blasst.plugin.capability import PLAIN_KV_DTYPES, chosen_impl, device, engine_reasons
from blasst.plugin.versions import cpu_isa

OUR_BACKEND = "BLASST"
VEC_ISA = "vec"


@dataclass(frozen=True)
class LayerFacts:
    """What is known of one attention layer. sliding_window: tokens, None = full attention.
    cache_isa: name of the CPU cache layout, None off the CPU. problem: None unless plain
    self-attention of ours."""

    name: str
    backend: str
    layer_class: str = "Attention"
    attn_type: str = "decoder"
    sliding_window: int | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    kv_cache_dtype: str = "auto"
    cache_isa: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Verdict:
    """One layer's line in the table. impl None = vLLM's stock path, for these reasons; kind: the
    first of them as metrics name it, one of LAYER_REASONS."""

    name: str
    impl: str | None
    reasons: tuple[str, ...]
    problem: Problem | None = field(default=None, compare=False)
    kind: str = field(default="kernel", compare=False)


def layer_reasons(facts: LayerFacts) -> list[tuple[str, str]]:
    """Why the layer's attention is not what the kernels compute, whichever kernel it is: pairs of
    one of LAYER_REASONS and words."""
    if facts.backend != OUR_BACKEND:
        return [("other_backend", f"vLLM gave it the backend {facts.backend}")]
    isa = facts.cache_isa
    found = [
        (
            "layer_class",
            facts.layer_class != "Attention",
            f"it is a {facts.layer_class}, not plain self-attention",
        ),
        ("attention_type", facts.attn_type != "decoder", f"{facts.attn_type} attention"),
        (
            "sliding_window",
            facts.sliding_window is not None,
            f"sliding window of {facts.sliding_window} tokens",
        ),
        ("soft_cap", bool(facts.soft_cap), f"logit soft cap {facts.soft_cap:g}"),
        ("sinks", facts.sinks, "attention sinks"),
        ("alibi", facts.alibi, "ALiBi"),
        (
            "kv_cache_dtype",
            facts.kv_cache_dtype not in PLAIN_KV_DTYPES,
            f"the KV cache is quantised ({facts.kv_cache_dtype})",
        ),
        (
            "cache_layout",
            isa not in (None, VEC_ISA),
            f"this CPU's cache layout is {isa!r}, only {VEC_ISA!r} can be read in place",
        ),
    ]
    return [(kind, text) for kind, holds, text in found if holds]


def judge(facts: LayerFacts, engine_wide: Sequence[str], impl: str) -> Verdict:
    """The verdict on one layer. `engine_wide`: reasons that hold for all layers."""
    found = [*layer_reasons(facts), *(("engine", text) for text in engine_wide)]
    chosen = None
    if facts.problem is not None:
        chosen, against = chosen_impl(facts.problem, impl)
        found += [("kernel", text) for text in against]
    named = None if found or chosen is None else str(chosen)
    reasons = tuple(text for _, text in found)
    return Verdict(facts.name, named, reasons, facts.problem, found[0][0] if found else "kernel")


def judge_all(layers: Mapping[str, Any], vllm_config: Any, impl: str) -> list[Verdict]:
    """Verdicts on all attention layers of a worker, in the model's order."""
    engine_wide = engine_reasons(vllm_config)
    return [
        judge(facts_of(name, layer, vllm_config), engine_wide, impl)
        for name, layer in layers.items()
        if hasattr(layer, "get_attn_backend")
    ]


def facts_of(name: str, layer: Any, vllm_config: Any) -> LayerFacts:
    """Read the facts from vLLM's layer object."""
    backend = layer.get_attn_backend().get_name()
    impl = getattr(layer, "impl", None)
    if backend != OUR_BACKEND or impl is None:
        return LayerFacts(name, backend, type(layer).__name__)
    device_type, capability = device()
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return LayerFacts(
        name=name,
        backend=backend,
        layer_class=type(layer).__name__,
        attn_type=_value(getattr(impl, "attn_type", "decoder")),
        sliding_window=_window(getattr(impl, "sliding_window", None)),
        soft_cap=float(getattr(impl, "logits_soft_cap", 0.0) or 0.0),
        sinks=getattr(impl, "sinks", None) is not None,
        alibi=getattr(impl, "alibi_slopes", None) is not None,
        kv_cache_dtype=str(getattr(impl, "kv_cache_dtype", "auto")),
        cache_isa=cpu_isa(layer, impl) if device_type == "cpu" else None,
        problem=Problem(
            head_dim=impl.head_size,
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            dtype=dtype,
            device_type=device_type,
            capability=capability,
            page_size=vllm_config.cache_config.block_size,
        ),
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """The table printed at start: layers with the same verdict share a line."""
    groups: dict[tuple[str | None, tuple[str, ...]], list[str]] = {}
    for v in verdicts:
        groups.setdefault((v.impl, v.reasons), []).append(v.name)
    lines = [f"blasst: {sum(v.impl is not None for v in verdicts)} of {len(verdicts)} layers skip"]
    for (impl, reasons), names in groups.items():
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        path = f"skips on {impl}" if impl is not None else f"dense: {'; '.join(reasons)}"
        lines.append(f"  {len(names):3d} x  {span}  {path}")
    return "\n".join(lines)


def _value(member: Any) -> str:
    # A string enum in some releases, a plain string in others.
    return str(getattr(member, "value", member))


def _window(value: Any) -> int | None:
    # vLLM's implementations keep -1 or (-1, -1) for "no window", (left, right) on CUDA.
    if isinstance(value, tuple):
        value = value[0] + 1 if value[0] >= 0 else None
    return None if value is None or value < 0 else int(value)
