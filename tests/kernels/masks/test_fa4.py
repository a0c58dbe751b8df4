"""Direct FlashAttention-4: what it is given, what it accepts, and when it cannot be imported."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blasst.kernels.bench.mask_cases import Case, bound, inputs
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.masks import fa4
from blasst.kernels.masks.bound import AttentionMask
from blasst.kernels.masks.inputs import Inputs
from blasst.kernels.types import Geometry


def problem(name: str, batch: int = 1) -> tuple[AttentionMask, Inputs]:
    case = Case(name, 700, batch, 2, 64, "cpu", torch.float32)
    mask, (q, k, v) = bound(case), inputs(case)[0]
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    return mask, Inputs(q, k, v, mask, 0.1, want_lse=True)


class Recorder:
    """FA4's interface without a GPU: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_func(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.calls.append(options)
        return q, q[..., 0].transpose(1, 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_fa4_gets_both_orientations(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    recorder = Recorder()
    real = fa4.load_fa4()
    monkeypatch.setattr(fa4, "load_fa4", lambda: fa4.Fa4(recorder, real.block_sparsity))
    mask, x = problem("shared_prefix")
    geometry = Geometry(256, 128)
    options = {"deterministic": deterministic}
    fa4.run(x, lists=mask.lists(geometry), **options)
    call = recorder.calls[-1]
    forward, backward = call["block_sparse_tensors"], call["block_sparse_tensors_bwd"]
    assert forward.block_size == backward.block_size == (256, 128)
    assert forward.mask_block_cnt.shape == (1, 1, 3)
    assert backward.mask_block_cnt.shape == (1, 1, 6)
    assert (backward.dq_write_order is not None) == deterministic
    assert backward.spt is (True if deterministic else None)
    assert all(t.dtype == torch.int32 for t in call["aux_tensors"])
    forward_only = replace(mask.lists(geometry), by_key=None)
    with pytest.raises(UnsupportedError, match="silently dense"):
        fa4.run(x, lists=forward_only, **options)
    with torch.no_grad():
        fa4.run(x, lists=forward_only, **options)
    assert recorder.calls[-1]["block_sparse_tensors_bwd"] is None


def test_fa4_shapes_pass_its_own_checks() -> None:
    """FA4's normalization accepts our lists for both generations, forward and backward."""
    sparsity = fa4.load_fa4().block_sparsity
    mask, _ = problem("shared_prefix", batch=2)
    for geometry, q_stage in ((Geometry(128, 128), 1), (Geometry(256, 128), 2)):
        lists = mask.lists(geometry)
        loaded = fa4.Fa4(None, sparsity)
        forward = fa4.sparse_tensors(loaded, lists.by_query, geometry)
        counts, indices, factor = sparsity.infer_block_sparse_expected_shapes(
            forward,
            batch_size=2,
            num_head=4,
            seqlen_q=700,
            seqlen_k=700,
            m_block_size=128,
            n_block_size=128,
            q_stage=q_stage,
            context="forward",
            sparse_block_size_q=geometry.tile_m,
            sparse_block_size_kv=geometry.tile_n,
        )
        assert factor == 1
        assert counts[2:] == forward.mask_block_cnt.shape[2:]
        assert indices[2:] == forward.mask_block_idx.shape[2:]
        backward = fa4.backward_tensors(loaded, lists, deterministic=True)
        counts, indices = sparsity.get_block_sparse_expected_shapes_bwd(
            2, 4, 700, 700, 128, 128, geometry.tile_m // 128
        )
        assert counts[2:] == backward.mask_block_cnt.shape[2:]
        assert indices[2:] == backward.mask_block_idx.shape[2:]
        assert backward.dq_write_order.shape == backward.mask_block_idx.shape


def test_hidden_flash_attn_is_named(tmp_path: Path) -> None:
    """A flash_attn package with an __init__ in front of flash-attn-4's namespace package."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("")
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    program = textwrap.dedent(
        """
        from blasst.kernels.masks.fa4 import fa4_reasons, load_fa4
        from blasst.kernels.errors import UnsupportedError
        [reason] = fa4_reasons()
        try:
            load_fa4()
        except UnsupportedError as e:
            assert reason in str(e)
            print(reason)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "flash-attn 2.8.3" in done.stdout, done.stderr
    assert "hides flash_attn.cute" in done.stdout
    assert "pip uninstall flash-attn" in done.stdout
    assert fa4.fa4_reasons() == ()


def test_fa4_compiles_our_masks_for_both_generations() -> None:
    """Forward and backward, deterministic on SM100: FA4's own checks of our lists, its trace of our
    mask_mod, and ptxas. No GPU is needed."""
    script = Path(__file__).parent / "scripts" / "compile_fa4.py"
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in (("sm_90a", "132", "no"), ("sm_100a", "148", "deterministic"))
    ]
    try:
        said = [run.communicate(timeout=500) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (out, err), generation in zip(runs, said, ("Sm90", "Sm100"), strict=True):
        assert run.returncode == 0, err[-3000:]
        assert f"FlashAttentionForward{generation}" in out
        assert f"FlashAttentionBackward{generation}" in out


def test_head_dims_are_those_whose_tiles_are_our_blocks() -> None:
    """Larger heads have tiles of fewer keys on SM90, and none on SM100."""
    interface = fa4.load_fa4().interface
    for head_dim in range(8, 257, 8):
        backward = interface._tile_size_bwd_sm90(head_dim, head_dim, False, False, 128)
        assert (backward.n_block_size == 128) == (head_dim in fa4.HEAD_DIMS)
    for head_dim in fa4.HEAD_DIMS:
        for major in fa4.GEOMETRIES:
            interface._validate_head_dims(head_dim, head_dim, major, 8)
