"""Compiles FlashAttention-4 with one of our masks for a GPU that is not here.

compile_fa4.py ARCH SMS DETERMINISTIC: prints the kernels that were compiled.
"""

import os
import sys

ARCH, SMS, DETERMINISTIC = sys.argv[1], sys.argv[2], sys.argv[3] == "deterministic"
os.environ.update(
    CUTE_DSL_ARCH=ARCH,
    FLASH_ATTENTION_ARCH=ARCH,
    FLASH_ATTENTION_NUM_SMS=SMS,
    CUTE_DSL_DISABLE_FILE_CACHING="1",
)

from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from blasst.kernels.masks.bound import bind  # noqa: E402
from blasst.kernels.masks.chat import shared_prefix_sample  # noqa: E402
from blasst.kernels.masks.cute_mod import cute_mask_mod  # noqa: E402
from blasst.kernels.masks.fa4 import (  # noqa: E402
    GEOMETRIES,
    backward_tensors,
    load_fa4,
    sparse_tensors,
)
from blasst.kernels.masks.mods import (  # noqa: E402
    document,
    padding,
    shared_prefix,
    sliding_window,
)
from blasst.kernels.masks.segments import pack  # noqa: E402


class Hardware:
    """What tile schedulers ask the driver while a kernel is traced."""

    def __init__(self, device_id: int = 0) -> None: ...

    def get_device_multiprocessor_count(self) -> int:
        return int(SMS)

    def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
        return int(SMS) // cluster_size

    def get_l2_cache_size_in_bytes(self) -> int:
        return 50 << 20


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape that says it is on a GPU; for use in FakeTensorMode."""
    return torch.empty(t.shape, dtype=t.dtype, device="cuda")


def faked(tensors: Any) -> Any:
    """FA4's block-sparse tensors with every tensor on that GPU."""
    return type(tensors)(*(on_gpu(t) if isinstance(t, torch.Tensor) else t for t in tensors))


def main() -> None:
    import cutlass.utils

    cutlass.utils.HardwareInfo = Hardware
    torch.cuda.current_device = lambda: 0
    fa4 = load_fa4()
    interface = fa4.interface
    compile_kernel, names = interface.cute.compile, []

    def recorded(kernel: object, *args: object, **options: object) -> object:
        names.append(type(kernel).__name__)
        return compile_kernel(kernel, *args, **options)

    interface.cute.compile = recorded
    sample = shared_prefix_sample(range(500), [range(300), range(333)])
    batch = pack([sample], pad_to_multiple_of=128)
    mask = bind(shared_prefix() & document() & padding() & sliding_window(200), batch.segments)
    lists = mask.lists(GEOMETRIES[9 if ARCH == "sm_90a" else 10])
    forward = sparse_tensors(fa4, lists.by_query, lists.geometry)
    backward = backward_tensors(fa4, lists, deterministic=DETERMINISTIC)
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty(1, mask.seqlen_q, h, 128, dtype=torch.bfloat16, device="cuda")
            for h in (8, 2, 2)
        )
        masked = {
            "mask_mod": cute_mask_mod(mask),
            "aux_tensors": [on_gpu(t) for t in mask.aux_tensors],
        }
        out, lse, *_ = interface._flash_attn_fwd(
            q, k, v, block_sparse_tensors=faked(forward), return_lse=True, **masked
        )
        interface._flash_attn_bwd(
            q,
            k,
            v,
            out,
            torch.empty_like(out),
            lse,
            block_sparse_tensors=faked(backward),
            deterministic=DETERMINISTIC,
            **masked,
        )
    print(" ".join(names))


main()
