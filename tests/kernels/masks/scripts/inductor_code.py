"""What Inductor writes for an H200, on a machine without one: FlexAttention of both lanes.

usage: inductor_code.py LANE LENGTH...    one process is one history of lengths; JSON on stdout

CPU tensors are traced, forward and backward; each graph is then given CUDA tensors without content,
and nothing is compiled or run. All that is faked lies in this file.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.fx_utils
import torch.nn.attention.flex_attention as torch_flex
import torch.utils._triton
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from blasst.kernels.masks import Segments, bind, document, flex, padding, shared_prefix
from blasst.kernels.masks.inputs import Inputs

HEAD_DIM = 16
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, total_memory=1 << 37,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
    gcnArchName="",
)  # fmt: skip


class Ended(Exception):
    """The code of a graph is known; nothing can run it."""


def pretend() -> None:
    """An H200 for Inductor and Triton, and FlexAttention's backward on the CPU."""
    answers: dict[str, Any] = {
        "is_available": True, "get_compute_capability": 90, "current_device": 0,
        "device_count": 1, "is_triton_capable": True, "raise_if_triton_unavailable": None,
        "is_bf16_supported": True, "get_device_properties": H200, "get_raw_stream": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: H200)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    torch.cuda.get_device_properties = lambda *_: H200  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch.utils._triton.triton_hash_with_backend = lambda *_: "none"  # type: ignore[assignment]
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    torch_flex._validate_device = lambda *_: None  # type: ignore[assignment]
    hop: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # the name is an operator's
    hop._permute_strides = lambda out, like: out.new_empty_strided(out.shape, like)  # no copy
    torch._inductor.fx_utils.FakeTensorUpdater.incremental_update = lambda _: 0  # type: ignore[method-assign,assignment]
    torch._functorch.config.force_non_lazy_backward_lowering = True


def written(graph: Any, inputs: list[Any], options: dict[str, Any], *, backward: bool) -> str:
    """Inductor's program for the graph, as if the inputs were on a GPU."""
    code: list[str] = []

    def keep(lowering: GraphLowering) -> None:
        code.append(str(lowering.codegen()[0].value))  # type: ignore[union-attr]
        raise Ended

    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")

    with torch.no_grad(), mode:
        moved = [move(x) for x in inputs]
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = tree_map(move, node.meta["val"])
    for node in graph.graph.nodes:
        if str(node.target) == "flex_attention":  # off on a CPU, where there is no backward
            *before, kernel_options, score, mask = node.args
            node.args = (*before, kernel_options | {"OUTPUT_LOGSUMEXP": True}, score, mask)
    GraphLowering._compile_to_module = keep  # type: ignore[assignment, method-assign]
    try:
        with torch.no_grad(), config.patch(options | {"force_disable_caches": True}):
            compile_fx_inner(graph, moved, is_backward=backward)
    except Exception as e:
        if not code:
            raise e
    return code[0]


def facts(code: str) -> dict[str, Any]:
    """Of the kernels in a program: constants of templates, and all arithmetic of the others."""
    constants: dict[str, str] = {}
    arithmetic: list[str] = []
    for body in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.S):
        if "@triton_heuristics.template" in body:
            constants |= dict(re.findall(r"^ +(\w+) ?: tl\.constexpr = (.*)$", body, re.M))
            continue
        arithmetic += re.findall(r"^ +tmp\d+ = (?!tl\.load|tl\.full)(.*)$", body, re.M)
        arithmetic += re.findall(r"@triton_heuristics\.(\w+)", body)
    return {"constants": constants, "arithmetic": arithmetic}


def main(lane: str, *lengths: str) -> None:
    pretend()
    found: list[dict[str, Any]] = []
    real, kernel_options = torch.compile, flex._kernel_options
    on_gpu: Any = SimpleNamespace(q=SimpleNamespace(is_cuda=True))
    flex._kernel_options = lambda _, backend, exact: kernel_options(on_gpu, backend, exact)

    def compiled(f: Any, *, options: dict[str, Any] | None = None, **how: Any) -> Any:
        def take(backward: bool) -> Any:
            def compiler(graph: Any, inputs: list[Any]) -> Any:
                found[-1][("forward", "backward")[backward]] = facts(
                    written(graph, inputs, options or {}, backward=backward)
                )

                def run(*_: Any) -> Any:
                    raise Ended

                run._boxed_call = True  # type: ignore[attr-defined]
                return run

            return compiler

        return real(f, backend=aot_autograd(fw_compiler=take(False), bw_compiler=take(True)), **how)

    torch.compile = compiled  # type: ignore[assignment]
    for length in map(int, lengths):
        found.append({"length": length})
        layout = Segments.from_position_ids(torch.arange(length)[None] % 50)
        mask = bind(shared_prefix() & document() & padding(), layout)
        q, k, v = (
            torch.zeros(1, length, heads, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
            for heads in (2, 1, 1)
        )
        try:
            flex.run(
                Inputs(q, k, v, mask, 0.25),
                backend="TRITON",
                geometry=flex.TRITON_GEOMETRY,
                exact=lane == "exact",
            )
        except Ended:
            continue
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
