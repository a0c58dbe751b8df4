"""Which request sits in which batch row: read from vLLM's model runner, V1 or V2, once a step.

Both runners keep the ids in batch order; attention metadata has no request ids before vLLM 0.31,
and logits processors, the public hook, do not run with speculative decoding.
"""

from __future__ import annotations

import sys
from typing import Any

from blasst.plugin.metadata import Votes
from blasst.plugin.patching import Method, wrap_method
from blasst.plugin.rank import Rank
from blasst.plugin.rank_setup import set_up_rank
from blasst.plugin.registration import selected

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_ATTRIBUTE = "_blasst_rank"

_votes: Votes | None = None


def current_votes() -> Votes | None:
    """Of the batch that is being computed; None: no row votes, or no batch is (warm-up, drafts)."""
    return _votes


def install() -> None:
    """Hook whichever runner this worker has loaded. Idempotent."""
    for module, prepare in ((RUNNER_V1, "_prepare_inputs"), (RUNNER_V2, "prepare_inputs")):
        if module in sys.modules:
            runner = sys.modules[module].GPUModelRunner
            wrap_method(runner, "initialize_kv_cache", _set_up)
            wrap_method(runner, "execute_model", _follow_step)
            wrap_method(runner, prepare, _read_rows)


def _set_up(stock: Method) -> Method:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        if selected(self.vllm_config):
            known: Rank | None = getattr(self, _ATTRIBUTE, None)
            setattr(self, _ATTRIBUTE, set_up_rank(self.vllm_config, self.device, known))
        return result

    return initialize_kv_cache


def _follow_step(stock: Method) -> Method:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        global _votes
        rank: Rank | None = getattr(self, _ATTRIBUTE, None)
        if rank is None:
            return stock(self, scheduler_output, *args, **kwargs)
        rank.note(scheduler_output.scheduled_new_reqs, scheduler_output.finished_req_ids)
        try:
            return stock(self, scheduler_output, *args, **kwargs)
        finally:
            _votes = None
            rank.end_step()

    return execute_model


def _read_rows(stock: Method) -> Method:
    def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        global _votes
        result = stock(self, scheduler_output, *args, **kwargs)
        rank: Rank | None = getattr(self, _ATTRIBUTE, None)
        if rank is not None:
            # V2 returns its batch, V1 keeps it and is given the lengths; ids are in row order.
            if hasattr(result, "req_ids"):
                req_ids, lengths = result.req_ids, result.num_scheduled_tokens[: result.num_reqs]
                computed = result.num_computed_tokens_np
            else:
                req_ids, lengths = self.input_batch.req_ids, args[0]
                computed = self.input_batch.num_computed_tokens_cpu
            _votes = rank.rows(
                req_ids,
                lengths,
                computed,
                scheduler_output.total_num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
            )
        return result

    return prepare_inputs
