"""One process: the stock engine, then ours, with chunked prefill, prefix caching, mixed batches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"VLLM_BLASST_MIN_CONTEXT": "64", "VLLM_BLASST_STATS_INTERVAL_S": "0.1"}

from common import drop, engine, finish, outputs, pages, params, prompts, tokens

LENGTHS = (1500, 40, 700, 1025, 384)
MAG = 2500


def main() -> None:
    given = prompts(LENGTHS)
    stock = engine("CPU_ATTN")
    want = tokens(outputs(stock, given, params()))
    refused = refusal(stock, given[:1], blasst_mag=MAG)
    drop(stock)
    llm = engine()
    result: dict[str, Any] = {
        "foreign_refused": refused,
        "stock": want,
        "plain": tokens(outputs(llm, given, params())),
        "plain_again": tokens(outputs(llm, given, params())),
        "one_by_one": [tokens(outputs(llm, [p], params()))[0] for p in given],
        "lambda_0": tokens(outputs(llm, given, params(blasst_lambda=0))),
    }
    llm.reset_prefix_cache()
    result |= mixed(llm, given)
    result |= cache(llm)
    result |= several(llm)
    result |= bad(llm)
    finish(result)


def refusal(llm: Any, given: Any, **extra: Any) -> str:
    try:
        outputs(llm, given, params(**extra))
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def totals() -> dict[str, Any]:
    (rank,) = pages("rank")
    (front,) = pages("front")
    return {
        "tiles": rank["tiles"],
        **{k: rank[k][0] for k in rank if k.startswith(("prefill", "decode", "unstamped"))},
        "admitted": sum(front["requests_admitted"]),
        "ttft": sum(front["ttft_count"]),
        "buckets": sum(front["ttft_bucket"]),
        "rejected": front["requests_rejected"][0],
    }


def mixed(llm: Any, given: Any) -> dict[str, Any]:
    """Voting and dense requests in one batch; what the oracle says of the very tensors."""
    import torch

    from blasst.kernels.plan import Plan
    from blasst.kernels.reference import reference_attention

    real = Plan.run
    calls: list[dict[str, Any]] = []

    def record(self: Plan, q: Any, kv: Any, cu: Any, batch: Any, **options: Any) -> Any:
        got = real(self, q, kv, cu, batch, **options)
        mine = slice(*cu[[0, -1]].tolist())
        oracle = reference_attention(
            q[mine], kv, cu - cu[0], spec=self.spec, skip_lambda=options["skip_lambda"]
        )
        calls.append(
            {
                "counts": oracle.counts(kv.k.shape[2]).tolist(),
                "margin": oracle.smallest_margin,
                "error": float((options["out"][mine].double() - oracle.out).abs().max()),
                "lambdas": options["skip_lambda"].tolist(),
            }
        )
        return got

    before = totals()
    Plan.run = record
    try:
        wanted = [
            params(blasst_mag=MAG),
            params(blasst_mag=MAG),  # 40 tokens: below the minimum context, dense
            params(blasst_mag="off"),
            params(blasst_lambda="0.4"),
            params(),
        ]
        mixed_tokens = tokens(outputs(llm, given, wanted))
    finally:
        Plan.run = real
    predicted = torch.zeros(2, 2, 2, dtype=torch.int64)
    for i, call in enumerate(calls):
        predicted[i % 2] += torch.tensor(call["counts"])  # layer by layer
    return {
        "mixed": mixed_tokens,
        "before": before,
        "after": totals(),
        "predicted": predicted.flatten().tolist(),
        "smallest_margin": min(c["margin"] for c in calls),
        "largest_error": max(c["error"] for c in calls),
        "lambdas": sorted({v for c in calls for v in c["lambdas"]}),
    }


def cache(llm: Any) -> dict[str, Any]:
    """Tokens found in the prefix cache by one request after the other, same prompt."""
    (prompt,) = prompts([900], seed=2)
    found = []
    for extra in (
        {},
        {"blasst_mag": MAG},
        {"blasst_mag": MAG},
        {"blasst_mag": 4500},
        {"blasst_mag": "off"},
    ):
        (out,) = outputs(llm, [prompt], params(2, **extra))
        found.append(out.num_cached_tokens)
    return {"cached": found}


def several(llm: Any) -> dict[str, Any]:
    """n = 2 completions of one prompt: both carry the stamp."""
    from vllm import SamplingParams

    before = totals()
    (prompt,) = prompts([600], seed=3)
    wanted = SamplingParams(n=2, temperature=1.0, max_tokens=4, extra_args={"blasst_mag": MAG})
    outputs(llm, [prompt], wanted)
    return {
        "n2_before": before,
        "n2_after": totals(),
        "caller_extra_args": wanted.extra_args,
    }


def bad(llm: Any) -> dict[str, Any]:
    given = prompts([100])
    return {
        "refused": [
            refusal(llm, given, **extra)
            for extra in (
                {"blasst_mag": -1},
                {"blasst_mag": "many"},
                {"blasst_mag": 1e9},
                {"blasst_lambda": float("nan")},
                {"blasst_lambda": 1.0},
                {"blasst_mag": 2500, "blasst_lambda": 0.1},
                {"blasst_magg": 2500},
                {"blasst_stamp": [0.5, 1]},
            )
        ],
        "rejected": totals()["rejected"],
    }


if __name__ == "__main__":
    main()
