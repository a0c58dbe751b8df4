"""Every entry of the tables of arithmetic, called on rows of lanes, against Python's numbers.

What a name means is read from its parts here, a second time.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.verify import effects, float_ops, integer_ops, move_ops, semantics

Array = np.ndarray[Any, Any]
LANES = 32
TYPES = {"pred": np.bool_, "f32": np.float32, "f32x2": np.float32, "bf16x2": np.uint32,
         "f16x2": np.uint32, "bf16": np.uint16, "f16": np.uint16, "u8": np.uint16,
         "s8": np.int16}  # fmt: skip
TINY = 2.0**-126
COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
           "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
           "hi": operator.gt, "hs": operator.ge}  # fmt: skip
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
EXACT = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
         "fma": lambda a, b, c: a * b + c, "div": lambda a, b: a / b, "rcp": lambda a: 1 / a,
         "abs": abs, "neg": lambda a: -a}  # fmt: skip
NEAR = {"ex2": lambda a: 2.0**a, "lg2": lambda a: math.log2(a), "rsqrt": lambda a: a**-0.5,
        "sqrt": lambda a: a**0.5, "sin": math.sin, "cos": math.cos, "tanh": math.tanh}  # fmt: skip
WHOLE = {"rni": round, "rzi": int, "rmi": math.floor, "rpi": math.ceil}
FORM = re.compile(r"(\w+)((?:\.(?:approx|full|rn|rz|rm|rp|ftz|NaN))*)\.(f32|f32x2)(?:/3)?$")
FLOATS = [n for n in float_ops.TABLE if FORM.match(n) and not n.startswith("copysign")]
PACKED = [name for name in float_ops.TABLE if re.search(r"\.b?f16x2$", name)]
CASTS = [name for name in move_ops.TABLE if re.match(r"cvt\.[us]\d+\.[us]\d+$", name)]
TO_INTEGER = [name for name in move_ops.TABLE if re.match(r"cvt\.r.i", name)]
FROM_INTEGER = [name for name in move_ops.TABLE if name.startswith("cvt.rn.f32.")]
SETP = [name for name in move_ops.TABLE if name.startswith("setp.")]
SELP = [name for name in move_ops.TABLE if name.startswith("selp.")]
ELSEWHERE = {"cvta.param.u64", "cvta.to.global.u64", "cvta.global.u64", "cvta.shared.u64",
             "cvta.to.shared.u64", "copysign.f32", "cvt.f32.f16", "cvt.f32.bf16",
             *(f"cvt.rn{r}.{k}x2.f32" for r in ("", ".relu") for k in ("bf16", "f16")),
             "cvt.rn.bf16.f32", "cvt.rn.f16.f32"}  # fmt: skip
"""Tested by name in test_float_ops.py and below."""


def dtype(kind: str) -> Any:
    if kind in TYPES:
        return np.dtype(TYPES[kind])
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def call(name: str, *sources: Array, second: bool = False) -> Array:
    signature = semantics.TABLE[name]
    out = np.zeros(LANES, dtype(signature.target))
    function = signature.second if second else signature.function
    assert function is not None
    with np.errstate(all="ignore"):
        function(*sources, out)
    return out


def floats(seed: int) -> Array:
    """Of all magnitudes, with zeros, subnormal numbers, ties, infinity and NaN."""
    rng = np.random.default_rng(seed)
    found = (rng.standard_normal(LANES) * 10.0 ** rng.integers(-3, 4, LANES)).astype(np.float32)
    found[:8] = [0.0, -0.0, 1e-40, -1e-40, 2.5, -3.5, 3.4e38, -3.4e38]
    found[8:11] = [np.inf, -np.inf, np.nan]
    return rng.permutation(found)


def integers(kind: str, seed: int) -> Array:
    limits = np.iinfo(dtype(kind))
    rng = np.random.default_rng(seed)
    found = rng.integers(limits.min, limits.max, LANES, dtype(kind), endpoint=True)
    found[:6] = [limits.min, limits.max, 0, 1, limits.max - 1, limits.min + 1]
    found[6:16] = rng.integers(0, 4, 10)
    return rng.permutation(found)


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < TINY else value


def nearest(exact: Fraction, mode: str) -> float:
    """The float32 on the wanted side; ties go to the even one."""
    with np.errstate(over="ignore"):
        guess = np.float32(float(exact))
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32("inf")),
    ]
    there = [float(x) for x in around if math.isfinite(x)]
    if mode == "rn":
        return min(
            there, key=lambda x: (abs(Fraction(x) - exact), int(np.float32(x).view("u4")) & 1)
        )
    up = mode == "rp" or (mode == "rz" and exact < 0)
    side = [x for x in there if (x >= exact if up else x <= exact)]
    return min(side) if up else max(side)


def same(got: float, want: float) -> bool:
    return got == want or (math.isnan(got) and math.isnan(want))


@pytest.mark.parametrize("name", FLOATS)
def test_float(name: str) -> None:
    found = FORM.match(name)
    assert found is not None
    word, modes = found[1], found[2].split(".")[1:]
    sources = [floats(i) for i in range(len(semantics.TABLE[name].sources))]
    got = call(name, *sources)
    compared = 0
    for lane in range(LANES):
        values = [float(s[lane]) for s in sources]
        if "ftz" in modes:
            values = [flushed(v) for v in values]
        if word in ("max", "min"):
            numbers = [v for v in values if not math.isnan(v)]
            strict = "NaN" in modes and len(numbers) < len(values)
            want = math.nan if strict or not numbers else {"max": max, "min": min}[word](numbers)
        elif not all(map(math.isfinite, values)) or (word in ("div", "rcp") and not values[-1]):
            continue
        elif word in NEAR:
            if (word in ("lg2", "rsqrt", "sqrt") and values[0] <= 0) or abs(values[0]) > 100:
                continue
            want = NEAR[word](values[0])
            want = (
                float(got[lane])
                if math.isclose(want, got[lane], rel_tol=3e-7, abs_tol=1e-7)
                else want
            )
        else:
            exact = EXACT[word](*map(Fraction, values))
            if abs(exact) > Fraction(float(np.finfo(np.float32).max)):
                continue
            mode = next((m for m in modes if m in ("rz", "rm", "rp")), "rn")
            want = nearest(exact, mode)
        want = flushed(want) if "ftz" in modes else want
        assert same(float(got[lane]), want), (name, values, float(got[lane]), want)
        compared += 1
    assert compared >= 8


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    """Rounded once from float64, in which the sum of a product is exact here."""
    word, kind = name.split(".")[0], torch.bfloat16 if "bf16" in name else torch.float16
    pairs = [
        torch.randn(2 * LANES, generator=torch.Generator().manual_seed(i)).to(kind)
        for i in range(len(semantics.TABLE[name].sources))
    ]
    got = call(name, *(p.view(torch.int16).numpy().view(np.uint32) for p in pairs))
    wide = [p.double() for p in pairs]
    want = {**EXACT, "max": torch.maximum, "min": torch.minimum, "ex2": torch.exp2}[word](*wide)
    found = torch.from_numpy(got.view(np.int16).copy()).view(kind)
    assert torch.equal(found, want.float().to(kind))


@pytest.mark.parametrize("name", CASTS)
def test_integer_cast(name: str) -> None:
    _, to, origin = name.split(".")
    width, byte = int(to[1:]), origin[1:] == "8"
    sources = integers("u16" if byte else origin, 1).astype(dtype(origin))
    got = call(name, sources)
    for lane in range(LANES):
        value = int(sources[lane])
        if byte:
            value &= 255
            value -= 256 if origin == "s8" and value > 127 else 0
        value &= (1 << width) - 1
        value -= 1 << width if to[0] == "s" and value >> (width - 1) else 0
        assert int(got[lane]) == value, (name, int(sources[lane]))


@pytest.mark.parametrize("name", TO_INTEGER)
def test_float_to_integer(name: str) -> None:
    parts = name.split(".")
    limits = np.iinfo(dtype(parts[-2]))
    source = floats(1)
    got = call(name, source)
    for lane in range(LANES):
        value = float(source[lane])
        value = flushed(value) if "ftz" in parts else value
        if math.isnan(value):
            want = 0
        elif math.isinf(value):
            want = limits.max if value > 0 else limits.min
        else:
            want = min(max(WHOLE[parts[1]](value), limits.min), limits.max)
        assert int(got[lane]) == int(want), (name, value)


@pytest.mark.parametrize("name", FROM_INTEGER)
def test_integer_to_float(name: str) -> None:
    source = integers(name.rsplit(".", 1)[1], 2)
    got = call(name, source)
    assert [float(x) for x in got] == [nearest(Fraction(int(x)), "rn") for x in source]


@pytest.mark.parametrize("name", SETP)
@pytest.mark.parametrize("second", [False, True])
def test_comparison(name: str, second: bool) -> None:
    _, word, *rest, kind = name.split(".")
    a, b = (floats(i) for i in (1, 2)) if kind == "f32" else (integers(kind, i) for i in (1, 2))
    a[20:24] = b[20:24]
    other = np.arange(LANES) % 3 == 0
    combine = next((COMBINE[r] for r in rest if r in COMBINE), None)
    got = call(name, a, b, *([other] if combine else []), second=second)
    for lane in range(LANES):
        x, y = a[lane].item(), b[lane].item()
        if "ftz" in rest:
            x, y = flushed(x), flushed(y)
        nan = x != x or y != y
        if word in ("num", "nan"):
            want = nan == (word == "nan")
        elif word in COMPARE:
            want = COMPARE[word](x, y) and not nan
        else:
            want = COMPARE[word[:-1]](x, y) or nan
        want = want != second
        want = combine(want, bool(other[lane])) if combine else want
        assert bool(got[lane]) == want, (name, x, y)


@pytest.mark.parametrize("name", SELP)
def test_selection(name: str) -> None:
    kind = name.split(".")[1]
    a, b = (np.arange(i, i + LANES).astype(dtype(kind)) for i in (0, 100))
    choose = np.arange(LANES) % 3 == 0
    assert call(name, a, b, choose).tolist() == np.where(choose, a, b).tolist()


def test_bit_field_insert_of_64_bits() -> None:
    a, b = integers("b64", 1), integers("b64", 2)
    start, count = (np.arange(LANES, dtype=np.uint32) * n for n in (2, 3))
    got = call("bfi.b64", a, b, start, count)
    for lane in range(LANES):
        mask = ((1 << int(count[lane])) - 1) << int(start[lane]) & (1 << 64) - 1
        want = (int(b[lane]) & ~mask) | (int(a[lane]) << int(start[lane]) & mask)
        assert int(got[lane]) == want


def test_addresses_of_shared_memory_have_a_window_of_their_own() -> None:
    place = np.arange(LANES, dtype=np.uint64) * np.uint64(16)
    generic = call("cvta.shared.u64", place)
    assert not np.intersect1d(generic, place).size
    assert call("cvta.to.shared.u64", generic).tolist() == place.tolist()
    for name in ("cvta.param.u64", "cvta.to.global.u64", "cvta.global.u64"):
        assert call(name, place).tolist() == place.tolist()


def test_no_entry_is_left_out() -> None:
    """integer_ops has a test of every entry of its own."""
    here = {*FLOATS, *PACKED, *CASTS, *TO_INTEGER, *FROM_INTEGER, *SETP, *SELP, *ELSEWHERE}
    assert here == {*float_ops.TABLE, *move_ops.TABLE}
    assert {*semantics.TABLE} == here | {*integer_ops.TABLE}


NOTHING = (
    "fence.acq_rel.cta", "fence.sc.gpu", "membar.gl", "membar.cta", "griddepcontrol.wait",
    "griddepcontrol.launch_dependents", "prefetch.global.L2 [%q0]", "prefetchu.L1 [%q0]",
    "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync",
    "cp.async.bulk.prefetch.L2.global [%q0], 128", "cp.async.wait_all",
)  # fmt: skip


@pytest.mark.parametrize("text", NOTHING)
def test_orders_and_hints_change_nothing(text: str, kernel: Callable[..., Any]) -> None:
    out = np.arange(LANES, dtype=np.uint32)
    body = f"""
 mov.u32 %r0, %laneid; {text};
 mad.wide.u32 %q5, %r0, 4, %q0; red.global.add.u32 [%q5], 1;"""
    run = kernel(body, {"out": out}).run()
    assert run.clean, run.describe()
    assert out.tolist() == list(range(1, LANES + 1))


@pytest.mark.parametrize("name", ["bar", "bar.cta", "barrier", "barrier.cta"])
def test_every_name_of_a_named_barrier(name: str, kernel: Callable[..., Any]) -> None:
    """Warp 1 arrives and writes nothing afterwards; warp 0 waits for it, then both count."""
    out = np.zeros(1, np.uint32)
    body = f"""
 mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; setp.ge.u32 %p3, %r0, 40; @%p1 bra FIRST;
 mov.u32 %r1, smem; st.shared.u32 [%r1], 5; {name}.arrive 1, 64; bra.uni MEET;
FIRST:
 {name}.sync 1, 64; mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1];
 setp.eq.u32 %p2, %r0, 0; @%p2 red.global.add.u32 [%q0], %r2;
MEET:
 {name}.red.popc.u32 %r3, 2, 64, %p3; setp.eq.u32 %p2, %r0, 0;
 @%p2 red.global.add.u32 [%q0], %r3;"""
    run = kernel(body, {"out": out}, threads=64).run()
    assert run.clean, run.describe()
    assert out[0] == 5 + 24


def test_effects_that_are_refused_are_refused_by_name(kernel: Callable[..., Any]) -> None:
    refused = [name for name, f in effects.EFFECTS.items() if f.__name__ == "refuse_cluster"]
    assert refused == ["barrier.cluster", "mapa", "st.async", "multimem"]
    for name in refused:
        with pytest.raises(Exception, match="clusters are not supported"):
            kernel(f" {name}.u32 %r1, %r2, 0;", {}).run()
