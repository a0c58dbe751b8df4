"""TMA boxes with real descriptors, plain bulk copies, and the end of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blasst.kernels.verify.errors import ExecutionError
from blasst.kernels.verify.tensor_map import TensorMap, swizzled

TYPES = {2: 10, 4: 7}  # bfloat16, float32


def descriptor(array: np.ndarray[Any, Any], box: tuple[int, ...], swizzle: int = 3) -> bytes:
    """What the DSL's launcher writes for an array of up to 5 dimensions, the last contiguous."""
    shape, strides = array.shape[::-1], array.strides[::-1]
    units = [s // 16 for s in strides[1:]] + [0] * (5 - len(shape))
    dims = [n - 1 for n in shape] + [0] * (5 - len(shape))
    boxes = [n - 1 for n in box[::-1]] + [0] * (5 - len(shape))
    flags = 0x040002 | (len(shape) - 1) << 4 | TYPES[array.itemsize] << 7 | swizzle << 13
    words = [
        array.ctypes.data,
        flags | units[0] << 32,
        units[1] | units[2] << 32,
        units[3],
        dims[0] | dims[1] << 32,
        dims[2] | dims[3] << 32,
        dims[4] | boxes[0] << 56,
        boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24,
    ]
    return np.array(words + [0] * 8, np.uint64).tobytes()


def test_descriptor_round_trip() -> None:
    array = np.zeros((3, 5, 100, 64), np.uint16)
    decoded = TensorMap.decode(descriptor(array, (1, 1, 32, 64)))
    assert decoded.base == array.ctypes.data
    assert decoded.shape == (64, 100, 5, 3, 1)
    assert decoded.strides == (2, 128, 12800, 64000, 0)
    assert decoded.box == (64, 32, 1, 1, 1)
    assert (decoded.element, decoded.swizzle, decoded.box_bytes) == (2, 3, 4096)


def test_unknown_descriptor_is_refused() -> None:
    raw = bytearray(descriptor(np.zeros((8, 64), np.uint16), (8, 64)))
    raw[10] |= 0x18
    with pytest.raises(ExecutionError, match="only plain tiled tensors"):
        TensorMap.decode(bytes(raw))


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
def test_swizzle_permutes_16_byte_chunks(bits: int) -> None:
    at = np.arange(0, 1024, 16)
    moved = swizzled(at, bits)
    assert sorted(moved.tolist()) == at.tolist()
    row = at >> 7 & (1 << bits) - 1
    assert np.array_equal(moved >> 4 & 7, (at >> 4 & 7) ^ row)


MAKE = """
 mov.u32 %r0, %laneid; mov.b32 %r9, smem; add.u32 %r8, %r9, 16384;
 elect.sync %r1|%p1, -1; @%p1 mbarrier.init.shared.b64 [%r8], 1;
 fence.mbarrier_init.release.cluster; bar.sync 0; mov.b64 %q6, map_0;
"""
LOAD = """
 @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {size};
 @%p1 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
   [%r9], [%q6, {at}], [%r8];
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r8], 0; @%p9 bra D; bra W;\nD:\n"
DUMP = """
 mov.u32 %r3, 0;
L: mad.lo.u32 %r4, %r3, 512, 0; mad.lo.u32 %r4, %r0, 16, %r4; add.u32 %r5, %r4, %r9;
 ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r5]; cvt.u64.u32 %q7, %r4; add.u64 %q7, %q7, %q0;
 st.global.v4.b32 [%q7], {%r10, %r11, %r12, %r13};
 add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, BLOCKS; @%p3 bra L;
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("start", "swizzle"), [(0, 3), (90, 3), (-5, 0)])
def test_box_is_swizzled_and_zero_outside(
    start: int, swizzle: int, seed: int, kernel: Callable[..., Any]
) -> None:
    source = (np.arange(100 * 64) % 60000).astype(np.uint16).reshape(100, 64)
    out = np.zeros((32, 64), np.uint16)
    body = MAKE + LOAD.format(size=4096, rank=2, at=f"{{0, {start}}}") + WAIT
    body += DUMP.replace("BLOCKS", "8")
    k = kernel(
        body, {"out": out, "source": source}, shared_bytes=20480,
        maps=[descriptor(source, (32, 64), swizzle)],
    )  # fmt: skip
    done = k.run(seed)
    assert done.clean, done.describe()
    want = np.zeros((32, 64), np.uint16)
    for row in range(32):
        if 0 <= start + row < 100:
            want[row] = source[start + row]
    place = swizzled(np.arange(0, 4096, 2), swizzle) // 2
    assert np.array_equal(out.reshape(-1)[place], want.reshape(-1))


STORE = """
 mad.lo.u32 %r4, %r0, 16, %r9; mov.u32 %r3, 0; mov.b64 %q6, map_0;
L: st.shared.v4.b32 [%r4], {%r0, %r3, %r0, %r3};
 add.u32 %r4, %r4, 512; add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 8; @%p3 bra L;
 FENCE bar.sync 0; elect.sync %r1|%p1, -1;
 @%p1 OPCODE [%q6, {0, 2}], [%r9]; @%p1 cp.async.bulk.commit_group; WAIT
"""
OPCODE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


def stored(kernel: Callable[..., Any], target: np.ndarray[Any, Any], **words: str) -> Any:
    """Runs a store of a box of 32 rows of 128 bytes at row 2."""
    body = " mov.u32 %r0, %laneid; mov.b32 %r9, smem;" + STORE
    defaults = {"FENCE": "fence.proxy.async.shared::cta;", "OPCODE": OPCODE,
                "WAIT": "@%p1 cp.async.bulk.wait_group.read 0;"}  # fmt: skip
    for word, text in {**defaults, **words}.items():
        body = body.replace(word, text)
    box = (32, 128 // target.itemsize)
    return kernel(body, {"target": target}, maps=[descriptor(target, box, 0)]).run(seed=1)


def test_store_is_clipped_to_the_tensor(kernel: Callable[..., Any]) -> None:
    target = np.full((20, 64), 7, np.uint16)
    done = stored(kernel, target)
    assert done.clean, done.describe()
    assert (target[:2] == 7).all()
    assert target[2, :8].tolist() == [0, 0, 0, 0, 0, 0, 0, 0]
    assert target[3, :8].tolist() == [8, 0, 0, 0, 8, 0, 0, 0]


def test_reduction_adds(kernel: Callable[..., Any]) -> None:
    target = np.full((40, 32), 1.0, np.float32)
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    body_value = np.array([1], np.uint32).view(np.float32)[0]
    done = stored(kernel, target, OPCODE=opcode)
    assert done.clean, done.describe()
    assert target[2, 4] == np.float32(1.0) + body_value
    assert (target[:2] == 1.0).all()


def test_store_without_proxy_fence_is_a_race(kernel: Callable[..., Any]) -> None:
    done = stored(kernel, np.zeros((40, 64), np.uint16), FENCE="")
    assert any("PROXY" in line for line in done.describe())


def test_block_must_not_end_before_a_store_has_read(kernel: Callable[..., Any]) -> None:
    done = stored(kernel, np.zeros((40, 64), np.uint16), WAIT="")
    assert any("may still read shared memory" in line for line in done.describe())


def test_plain_copies(kernel: Callable[..., Any]) -> None:
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    body = (
        MAKE.replace(" mov.b64 %q6, map_0;", "")
        + """ @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 512;
 @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%q0], 512, [%r8];
"""
        + WAIT
        + """ @%p1 cp.async.bulk.global.shared::cta.bulk_group [%q1], [%r9], 512;
 cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    )
    done = kernel(body, {"source": source, "out": out}, shared_bytes=20480).run()
    assert done.clean, done.describe()
    assert np.array_equal(out, source)


def test_load_that_nobody_waits_for(kernel: Callable[..., Any]) -> None:
    source = np.zeros((100, 64), np.uint16)
    body = MAKE + LOAD.format(size=4096, rank=2, at="{0, 0}")
    k = kernel(body, {"source": source}, shared_bytes=20480, maps=[descriptor(source, (32, 64))])
    assert any("TMA load to" in line for line in k.run().describe())
