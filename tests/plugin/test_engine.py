"""Real vLLM engines on a tiny model. The numbers come from scripts/, run once a session each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTHS = (1500, 40, 700, 1025, 384)
TAIL_OF_ONE = 1
"""1025 = 2 * 512 + 1 may end in a chunk of one token, which counts as a decode step."""

Script = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["installed", "0.26.0", "0.33.0"])
def release(request: pytest.FixtureRequest, overlay: Callable[[str], str]) -> dict[str, str]:
    """Environment that selects a vLLM: the installed one, the oldest and the newest supported."""
    return {} if request.param == "installed" else {"PYTHONPATH": overlay(request.param)}


@pytest.fixture(scope="module")
def engine(run_script: Script, release: dict[str, str]) -> dict[str, Any]:
    return run_script("in_process.py", release)


def test_model_runner_v2_tells_who_sits_in_which_row(
    run_script: Script, release: dict[str, str]
) -> None:
    found = run_script("runner_v2.py", release)
    assert found["rows"] == [[3, [1], [40, 50, 60], [0.5]]]
    assert found["after"]
    assert found["calls_prepare"]
    assert found["sets_up"]
    assert found["first_parameters"] == ["self", "scheduler_output"]
    assert found["counts"]["prefill_tokens_vote"] == 7
    assert found["counts"]["prefill_tokens_dense"] == 5
    assert found["cuda"]["name"] == "BLASST"
    assert found["cuda"]["flash"]
    # Never ALWAYS: a prefill in a captured graph could not vote.
    assert found["cuda"]["graphs"] == "UNIFORM_BATCH"
    assert found["cuda"]["classes"] == ["BlasstCUDABuilder", "BlasstCUDAImpl"]
    check_cuda_forward(found["forward"])
    assert {"sliding window of 128 tokens", "the KV cache is quantised (fp8)"} <= set(
        found["cuda"]["reasons"]
    )


def check_cuda_forward(found: dict[str, Any]) -> None:
    """The CUDA classes on CPU tensors, FlashAttention's kernel replaced by our dense one."""
    for name, batch in found.items():
        votes = name != "nobody votes"
        assert batch["splits"] == votes, name
        half = name == "triton"  # float16
        assert batch["vote"] < (4e-3 if half else 1e-4), name
        assert batch["stock"] < (4e-3 if half else 1e-5), name
        assert batch["margin"] > 1e-3, name
        assert batch["counters"] == batch["expected"], name
        skips = sum(skipped for _, skipped in batch["counters"])
        assert (skips > 0) == (votes and name != "lambda 0"), name
        assert batch["padding_untouched"], name
        assert batch["differs"] == [], name  # from what vLLM builds for those rows alone
    # One call of vLLM's kernel for all rows that do not vote, none when all do.
    assert found["chunk at the start of a prompt"]["kernel_tokens"] == []
    assert found["dense chunk and voting chunk"]["kernel_tokens"] == [101]
    assert found["a dense row between voting rows"]["kernel_tokens"] == [200]
    assert found["decodes around a chunk"]["kernel_tokens"] == [2, 3]
    assert found["voting rows, then others"]["kernel_tokens"] == [101]
    assert found["nobody votes"]["kernel_tokens"] == [301]


@pytest.fixture(scope="module")
def deployment(run_script: Script, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("state")
    return run_script("deployment.py", {"VLLM_BLASST_STATE_DIR": str(folder)})


@pytest.mark.parametrize("run", ["plain", "plain_again", "one_by_one", "lambda_0"])
def test_tokens_equal_the_stock_backend(engine: dict[str, Any], run: str) -> None:
    """Chunked prefill, mixed batches and (plain_again) prefix-cache hits included."""
    assert engine[run] == engine["stock"]


def test_dense_requests_in_a_voting_batch_equal_the_stock_backend(engine: dict[str, Any]) -> None:
    for row in (1, 2, 4):  # too short, off, nothing asked for
        assert engine["mixed"][row] == engine["stock"][row]


def test_counters_equal_what_the_oracle_says_of_the_same_tensors(engine: dict[str, Any]) -> None:
    # No vote was near a tie (float32 differs from the oracle by about 1e-5), so counts are exact.
    assert engine["smallest_margin"] > 1e-3
    assert engine["largest_error"] < 1e-3
    delta = [
        b - a for a, b in zip(engine["before"]["tiles"], engine["after"]["tiles"], strict=True)
    ]
    assert delta == engine["predicted"]
    assert all(skipped > 0 for skipped in delta[1::2])
    assert engine["lambdas"] == pytest.approx([2**-2.5, 0.4])


def test_prefill_tokens_are_counted_by_path(engine: dict[str, Any]) -> None:
    before, after = engine["before"], engine["after"]
    vote = after["prefill_tokens_vote"] - before["prefill_tokens_vote"]
    dense = after["prefill_tokens_dense"] - before["prefill_tokens_dense"]
    assert LENGTHS[0] + LENGTHS[3] - TAIL_OF_ONE <= vote <= LENGTHS[0] + LENGTHS[3]
    assert dense == LENGTHS[1] + LENGTHS[2] + LENGTHS[4]
    assert after["unstamped_requests"] == 0


def test_cached_prefixes_are_not_inherited_across_thresholds(engine: dict[str, Any]) -> None:
    dense, first, same, other, dense_again = engine["cached"]
    assert (dense, first, other) == (0, 0, 0)
    assert same > 0
    assert dense_again > 0


def test_both_of_two_completions_carry_the_threshold(engine: dict[str, Any]) -> None:
    before, after = engine["n2_before"], engine["n2_after"]
    assert after["unstamped_requests"] == 0
    assert after["prefill_tokens_dense"] == before["prefill_tokens_dense"]
    assert after["prefill_tokens_vote"] - before["prefill_tokens_vote"] >= 600
    assert after["admitted"] - before["admitted"] == after["ttft"] - before["ttft"] == 1
    assert engine["caller_extra_args"] == {"blasst_mag": 2500}


def test_every_admitted_request_is_timed_once(engine: dict[str, Any]) -> None:
    after = engine["n2_after"]
    assert after["ttft"] == after["admitted"] == after["buckets"] > 25


def test_bad_arguments_are_refused_with_the_remedy(engine: dict[str, Any]) -> None:
    assert len(engine["refused"]) == engine["rejected"] == 8
    for message in engine["refused"]:
        assert message.startswith("RefusedRequestError: blasst_")
        assert "give one of blasst_mag, blasst_lambda, blasst_scale" in message


def test_arguments_sent_to_another_backend_are_refused(engine: dict[str, Any]) -> None:
    assert "--attention-backend blasst" in engine["foreign_refused"]


def test_preempted_requests_are_recomputed_under_their_lambda(deployment: dict[str, Any]) -> None:
    assert deployment["preempted"] == deployment["stock"]
    before, lambda_0, dialled = deployment["counts"]
    for a, b in ((before, lambda_0), (lambda_0, dialled)):
        # More than the prompts: some were computed twice, and never without the vote.
        assert b["prefill_tokens_vote"] - a["prefill_tokens_vote"] > 5 * 300
        assert b["prefill_tokens_dense"] == 0
    assert lambda_0["skipped"] == 0
    assert dialled["skipped"] > 0


def test_precedence_of_request_file_and_environment(deployment: dict[str, Any]) -> None:
    seen = deployment["seen"]
    assert seen["environment"]["classes"] == {"mag_4500_6999": 1}
    assert seen["environment"]["mag"] == 4500
    assert seen["request"]["classes"]["mag_2500_4499"] == 1  # lambda 0.05
    assert seen["off"]["classes"]["dense"] == 1
    assert seen["file"]["classes"]["mag_2500_4499"] == 2
    assert seen["short"]["classes"]["dense"] == 2  # the file's min_context
    assert seen["dense"]["classes"]["dense"] == 3  # the file's null, against the environment
    assert seen["dense"]["mag"] is None
    assert seen["scale"]["classes"]["mag_2500_4499"] == 3  # 40 / 400 tokens


def test_generations_are_read_while_idle_and_stamped_on_requests(
    deployment: dict[str, Any],
) -> None:
    seen = deployment["seen"]
    assert (seen["read"]["read"], seen["read"]["stamped"]) == (1, 0)
    assert (seen["file"]["read"], seen["file"]["stamped"]) == (1, 1)
    assert (seen["scale"]["read"], seen["scale"]["stamped"]) == (4, 4)


def test_a_corrupt_file_leaves_the_last_value_in_force(deployment: dict[str, Any]) -> None:
    seen = deployment["seen"]["corrupt"]
    assert seen["classes"]["mag_2500_4499"] == 4
    assert (seen["errors"], seen["stamped"]) == (1, 4)
    assert "desired.json is not JSON" in deployment["log"]


def test_the_option_shares_cached_prefixes(deployment: dict[str, Any]) -> None:
    seen = deployment["seen"]
    assert seen["environment"]["cached"] == 0
    assert all(seen[name]["cached"] > 0 for name in ("request", "off", "file", "dense", "scale"))


def test_engines_of_one_process_are_counted_apart_and_outlive_their_pages(
    run_script: Script, tmp_path: Path
) -> None:
    result = run_script("two_engines.py", {"VLLM_BLASST_STATE_DIR": str(tmp_path)})
    assert result["before"] == {"first": [100, 100, 2, 2], "second": [0, 100, 1, 1]}
    # The second engine's prompt was cached by then, but for less than a block.
    assert result["after"]["first"] == result["before"]["first"]
    assert result["after"]["second"][2:] == [2, 2]


def test_two_spawned_ranks_share_the_work_of_one(run_script: Script) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    # vLLM would put each rank on a NUMA node of its own.
    result = run_script("two_ranks.py", {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"})
    assert result["plain"] == result["stock"]
    ranks = sorted(result["ranks"], key=lambda page: page["labels"]["rank"])
    assert [r["labels"]["first_kv_head"] for r in ranks] == ["0", "1"]
    for layer in range(2):
        for head in range(2):
            one = result["single"]["tiles"][4 * layer + 2 * head :][:2]
            assert ranks[head]["tiles"][2 * layer :][:2] == one
            assert one[1] > 0
    for rank in ranks:
        assert rank["prefill_tokens_vote"] == result["single"]["prefill_tokens_vote"]
        assert rank["unstamped_requests"] == [0]


@pytest.fixture(scope="module")
def refused(
    run_script: Script,
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Callable[[dict[str, Any]], Path],
) -> dict[str, str]:
    env = {
        "WORK_FOLDER": str(tmp_path_factory.mktemp("work")),
        "SMALL_HEADS": str(model_folder({"head_dim": 32})),
    }
    messages: dict[str, str] = run_script("startup_errors.py", env)["refused"]
    return messages


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two units", ("VLLM_BLASST_MAG=2500 and VLLM_BLASST_LAMBDA=0.1", "keep one")),
        ("text", ("VLLM_BLASST_MAG", "'much' is not a number", "such as 2500")),
        ("nan", ("VLLM_BLASST_LAMBDA", "nan")),
        ("huge", ("VLLM_BLASST_MAG", "1e+09", "126000")),
        ("min context", ("VLLM_BLASST_MIN_CONTEXT=-5", "prompt tokens")),
        ("impl", ("VLLM_BLASST_IMPL=cuda", "choose one of auto")),
        ("impl cannot", ("VLLM_BLASST_STRICT=1", "hopper: tensors are on cpu")),
        (
            "impl cannot, not strict",
            ("VLLM_BLASST_IMPL=hopper", "it needs a GPU", "set it to auto"),
        ),
        ("model cannot, environment", ("mag 2500", "head_dim 32", "unset it")),
        ("model cannot, desired file", ("mag 1500", "head_dim 32", "to off first")),
        ("strict", ("VLLM_BLASST_STRICT=yes", "0 or 1")),
        ("unknown", ("VLLM_BLASST_MAGG is not a setting",)),
        ("state missing", ("VLLM_BLASST_STATE_DIR=", "is not a folder", "create it")),
        ("state is a file", ("VLLM_BLASST_STATE_DIR=", "is not a folder")),
        ("state in proc", ("VLLM_BLASST_STATE_DIR=/proc/self", "cannot take")),
        ("rust", ("VLLM_USE_RUST_FRONTEND=1", "unset it")),
        ("version", ("vLLM 0.34.1 is not supported", "vllm>=0.26,<0.34")),
        ("old version", ("vLLM 0.25.9 is not supported",)),
    ],
)
def test_a_bad_start_is_refused_with_one_line(
    refused: dict[str, str], case: str, words: tuple[str, ...]
) -> None:
    message = refused[case]
    assert message.startswith(("SettingsError: ", "StartupError: "))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_other_backends_start_whatever_our_settings_say(refused: dict[str, str]) -> None:
    assert refused["other backend"] == "started"


GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 128,
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "softcap": {
        **GEMMA,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mixed": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 10000.0,
    },
    "sliding": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 128,
        "attention_bias": False,
    },
    "head_dim": {"head_dim": 32},
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 256,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "attention_bias": False,
    },
}


@pytest.fixture(scope="module")
def fallbacks(run_script: Script, model_folder: Callable[[dict[str, Any]], Path]) -> dict[str, Any]:
    folders = {name: str(model_folder(changes)) for name, changes in MODELS.items()}
    return run_script("fallbacks.py", {"MODELS": json.dumps(folders)})


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("softcap", "logit soft cap 50"),
        ("sliding", "sliding window of 128 tokens"),
        ("head_dim", "head_dim 32 is not one of 64, 128"),
        ("mla", "multi-head latent attention (MLA)"),
    ],
)
def test_a_model_that_cannot_skip_runs_dense_and_refuses_thresholds(
    fallbacks: dict[str, Any], model: str, reason: str
) -> None:
    report = fallbacks["models"][model]
    assert report["tokens"] == 3
    assert "cannot take effect here" in report["threshold"]
    assert reason in report["threshold"]
    assert report["page"]["labels"]["impl"] == "none"
    assert report["page"]["vote"] == 0
    strict = fallbacks["models"][f"{model} strict"]["start"]
    assert strict.startswith("StartupError: VLLM_BLASST_STRICT=1")
    assert reason in strict


def test_layers_that_can_skip_do_beside_layers_that_cannot(fallbacks: dict[str, Any]) -> None:
    report = fallbacks["models"]["mixed"]
    assert report["threshold"] == "admitted"
    assert report["page"]["vote"] == 200
    assert "1 of 2 layers skip" in fallbacks["log"]
    strict = fallbacks["models"]["mixed strict"]["start"]
    assert strict.startswith("NotEligibleError: VLLM_BLASST_STRICT=1 and 1 of 2 layers")
