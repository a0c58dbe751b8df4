"""Model runner V2's own classes with made-up data: it does not run on a CPU without Triton."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cuda_forward
from common import finish


def filled(cls: Any, **values: Any) -> Any:
    """An instance of a dataclass of vLLM's with these values; None elsewhere."""
    names = [f.name for f in dataclasses.fields(cls)]
    missing = values.keys() - set(names)
    assert not missing, missing
    return cls(**{name: values.get(name) for name in names})


def main() -> None:
    import numpy as np
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from blasst.plugin import request_tap
    from blasst.plugin.rank import Rank, RankShape
    from blasst.plugin.stamp import Stamp, stamped

    runner_class = model_runner.GPUModelRunner
    source = inspect.getsource(runner_class.execute_model)
    signature = list(inspect.signature(runner_class.prepare_inputs).parameters)
    seen: list[Any] = []

    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any) -> Any:
        ids = sorted(scheduler_output.num_scheduled_tokens)
        lengths = np.array([scheduler_output.num_scheduled_tokens[i] for i in ids])
        return filled(
            InputBatch,
            req_ids=ids,
            num_reqs=len(ids),
            num_scheduled_tokens=lengths,
            num_computed_tokens_np=np.array([40, 50, 60]),
        )

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        self.prepare_inputs(scheduler_output, None)
        votes = request_tap.current_votes()
        assert votes is not None
        seen.append([votes.size, votes.rows, votes.computed.tolist(), votes.lambdas])

    runner_class.prepare_inputs = prepare_inputs
    runner_class.execute_model = execute_model
    request_tap.install()
    runner = object.__new__(runner_class)
    runner._blasst_rank = Rank(RankShape("0", "0", "tiny", 1, 1), None, 1.0, "cpu")

    def request(req_id: str, stamp: Stamp) -> Any:
        params = SamplingParams(extra_args=stamped(None, stamp))
        return filled(NewRequestData, req_id=req_id, sampling_params=params)

    runner.execute_model(
        filled(
            SchedulerOutput,
            scheduled_new_reqs=[request("b", Stamp(0.5)), request("a", Stamp(None))],
            num_scheduled_tokens={"b": 7, "a": 5, "c": 1},
            total_num_scheduled_tokens=13,
            scheduled_spec_decode_tokens={},
            finished_req_ids=set(),
        )
    )
    finish(
        {
            "version": vllm.__version__,
            "rows": seen,
            "after": request_tap.current_votes() is None,
            "calls_prepare": "self.prepare_inputs(" in source,
            "first_parameters": signature[:2],
            "sets_up": "initialize_kv_cache" in vars(runner_class),
            "counts": runner._blasst_rank.counts,
            "cuda": cuda_backend(),
            "forward": cuda_forward.results(),
        }
    )


def cuda_backend() -> dict[str, Any]:
    """The CUDA class imports and is FlashAttention under our name."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

    from blasst.plugin.cuda_backend import BlasstCUDABackend, BlasstCUDABuilder
    from blasst.plugin.eligibility import facts_of, layer_reasons

    impl = object.__new__(FlashAttentionImpl)
    impl.__dict__.update(
        head_size=128,
        num_heads=32,
        num_kv_heads=8,
        sliding_window=(127, 0),
        logits_soft_cap=0,
        alibi_slopes=None,
        sinks=None,
        kv_cache_dtype="fp8",
    )
    layer = SimpleNamespace(impl=impl, get_attn_backend=lambda: BlasstCUDABackend)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype="torch.bfloat16"),
        cache_config=SimpleNamespace(block_size=16),
    )
    return {
        "name": BlasstCUDABackend.get_name(),
        "flash": issubclass(BlasstCUDABackend, FlashAttentionBackend),
        "graphs": BlasstCUDABuilder.get_cudagraph_support(None, None).name,
        "classes": [
            BlasstCUDABackend.get_builder_cls().__name__,
            BlasstCUDABackend.get_impl_cls().__name__,
        ],
        "reasons": [text for _, text in layer_reasons(facts_of("layers.0", layer, config))],
    }


if __name__ == "__main__":
    main()
