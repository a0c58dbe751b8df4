"""Small PTX kernels by hand: text, buffers and launch, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from blasst.kernels.verify.execute import Executor, Run
from blasst.kernels.verify.launch import Launch
from blasst.kernels.verify.memory import Storage
from blasst.kernels.verify.program import Program

HEAD = ".version 9.4\n.target {target}\n.address_size 64\n"
SHARED = ".extern .shared .align 1024 .b8 smem[];\n"
DECLARED = """
 .reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<256>; .reg .b64 %q<32>;
"""


@dataclass
class Kernel:
    """body: PTX; %q0.. hold the addresses of the buffers in order; threads of the one block."""

    body: str
    buffers: dict[str, np.ndarray[Any, Any]]
    threads: int = 32
    shared_bytes: int = 4096
    grid: tuple[int, int, int] = (1, 1, 1)
    maps: list[bytes] = field(default_factory=list)
    read_only: tuple[str, ...] = ()
    target: str = "sm_100a"
    scoreboard: bool = False

    def text(self) -> str:
        names = [f"buffer_{i}" for i in range(len(self.buffers))]
        parameters = [f".param .u64 {name}" for name in names]
        parameters += [f".param .align 64 .b8 map_{i}[128]" for i in range(len(self.maps))]
        loads = "".join(f" ld.param.u64 %q{i}, [{name}];\n" for i, name in enumerate(names))
        return (
            HEAD.format(target=self.target)
            + SHARED
            + f".visible .entry kernel(\n {', '.join(parameters)}\n)\n{{\n"
            + DECLARED
            + loads
            + self.body
            + "\n ret;\n}\n"
        )

    def run(self, seed: int = 0, races: bool = True) -> Run:
        program = Program.from_text(self.text())
        addresses = [b.ctypes.data for b in self.buffers.values()]
        parameters = [a.to_bytes(8, "little") for a in addresses] + self.maps
        launch = Launch(self.grid, self.threads, self.shared_bytes, parameters)
        launch.scoreboard = self.scoreboard
        storages = [
            Storage(name, b.ctypes.data, b.reshape(-1).view(np.uint8), name not in self.read_only)
            for name, b in self.buffers.items()
        ]
        return Executor(program).run(launch, storages, seed=seed, races=races)


@pytest.fixture
def kernel() -> Callable[..., Kernel]:
    return Kernel


SIZES = {"u16": 2, "s16": 2, "b16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8,
         "s64": 8, "b64": 8, "f32x2": 8, "bf16x2": 4, "f16x2": 4, "f16": 2, "bf16": 2}  # fmt: skip
REGISTER = {2: "%h", 4: "%r", 8: "%q"}


@pytest.fixture
def compute() -> Callable[..., np.ndarray[Any, Any]]:
    """One instruction on 32 lanes: opcode, type of the result, (type, values) of the sources.

    Returns the bits of the result. A predicate source has the type "pred" and values 0 or 1.
    """

    def run(
        opcode: str, result: str, *sources: tuple[str, Any], target: str = "{d}"
    ) -> np.ndarray[Any, Any]:
        buffers: dict[str, np.ndarray[Any, Any]] = {}
        lines = [" mov.u32 %r0, %laneid;"]
        operands = []
        for i, (kind, values) in enumerate(sources):
            size = SIZES.get(kind, 4)
            buffers[f"s{i}"] = np.ascontiguousarray(values)
            assert buffers[f"s{i}"].nbytes == 32 * size
            register = f"{REGISTER[size]}{16 + i}"
            lines.append(f" mad.wide.u32 %q10, %r0, {size}, %q{i};")
            lines.append(f" ld.global.b{8 * size} {register}, [%q10];")
            if kind == "pred":
                lines.append(f" setp.ne.b32 %p{i}, {register}, 0;")
                register = f"%p{i}"
            operands.append(register)
        size = 4 if result == "pred" else SIZES[result]
        out = np.zeros(32, f"u{size}")
        buffers["out"] = out
        place = "%p20" if result == "pred" else f"{REGISTER[size]}30"
        if result == "pred":
            lines.append(" setp.eq.b32 %p21, %r0, %r0;")
        lines.append(f" {opcode} {', '.join([target.format(d=place), *operands])};")
        if result == "pred":
            lines.append(" selp.b32 %r30, 1, 0, %p20;")
        lines.append(f" mad.wide.u32 %q10, %r0, {size}, %q{len(sources)};")
        lines.append(f" st.global.b{8 * size} [%q10], {REGISTER[size]}30;")
        done = Kernel("\n".join(lines), buffers).run()
        assert done.clean, done.describe()
        return out

    return run
