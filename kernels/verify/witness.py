"""What is in a compiled kernel: registers, spills, instructions; and whether two are equal."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blasst.kernels.verify.build import Artifact, Recipe, compile_in_process
from blasst.kernels.verify.errors import ToolError

_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.M)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
SPILLS = ("LDL", "STL")
PRODUCTS = ("UTCHMMA", "HGMMA")
NOT_CODE = (".loc", ".file", "//")
NAMES_ONLY = (".strtab", ".shstrtab", ".symtab", ".note")


@dataclass(frozen=True)
class Witness:
    """registers: a thread's at launch; set_registers: what setmaxnreg asks for, by direction.

    stack, local, spills: bytes, bytes and instructions; shared: static bytes; tensor_columns:
    allocated in tensor memory. products, exp2: of the machine code. sass, ptx: instructions by
    name. fingerprint: of the PTX.
    """

    registers: int
    stack: int
    shared: int
    local: int
    spills: int
    tensor_columns: int
    products: int
    exp2: int
    fingerprint: str
    set_registers: tuple[str, ...]
    sass: Counter[str] = field(repr=False)
    ptx: Counter[str] = field(repr=False)

    def problems(self) -> list[str]:
        """What no kernel of ours may have."""
        found = []
        if self.spills or self.local:
            found.append(f"{self.spills} spill instructions, {self.local} bytes of local memory")
        if self.stack:
            found.append(f"{self.stack} bytes of stack")
        return found

    def describe(self) -> list[str]:
        products = sum(
            n for op, n in self.ptx.items() if op.startswith(("tcgen05.mma", "wgmma.mma"))
        )
        exp2 = sum(n for op, n in self.ptx.items() if op.startswith("ex2"))
        return [
            f"registers a thread: {self.registers} at launch, then {', '.join(self.set_registers)}",
            f"spills: {self.spills}, stack {self.stack} bytes, local {self.local} bytes",
            f"static shared memory: {self.shared} bytes; TMEM: {self.tensor_columns} columns",
            f"PTX: {sum(self.ptx.values())} instructions, {products} products, {exp2} exp2",
            f"SASS: {sum(self.sass.values())} instructions, {self.products} products, "
            f"{self.exp2} exp2",
            f"PTX without names and lines: SHA-256 {self.fingerprint[:16]}...",
        ]


def find_tool(name: str) -> str:
    """A program of the CUDA toolkit: on PATH, or from the packages nvidia-cuda-*."""
    found = shutil.which(name)
    if found:
        return found
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob(f"*/bin/{name}")):
            return str(path)
    raise ToolError(f"{name} was not found; pip install nvidia-cuda-{name}")


def _output(name: str, *arguments: str) -> str:
    done = subprocess.run([find_tool(name), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"{name} {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def witness(artifact: Artifact) -> Witness:
    """Reads the cubin and the PTX; needs cuobjdump and nvdisasm."""
    usage = _USAGE.search(_output("cuobjdump", "-res-usage", str(artifact.cubin)))
    if usage is None:
        raise ToolError("cuobjdump -res-usage printed no register count")
    code = _SASS.findall(_output("nvdisasm", "-c", str(artifact.cubin)))
    sass = Counter(name.split(".")[0] for name in code)
    instructions = artifact.module.instructions
    limits = {
        f"{'+' if '.inc.' in ins.opcode else '-'}{ins.operands[0]}"
        for ins in instructions
        if ins.opcode.startswith("setmaxnreg")
    }
    return Witness(
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=int(usage[3]),
        local=int(usage[4]),
        spills=sum(sass[name] for name in SPILLS),
        tensor_columns=_tensor_columns(artifact),
        products=sum(sass[name] for name in PRODUCTS),
        exp2=sum(name.startswith("MUFU.EX2") for name in code),
        fingerprint=fingerprint(artifact),
        set_registers=tuple(sorted(limits)),
        sass=sass,
        ptx=Counter(ins.opcode for ins in instructions),
    )


def _tensor_columns(artifact: Artifact) -> int:
    """The count that tcgen05.alloc asks for: a literal, or a register that one mov fills."""
    constants = {
        ins.operands[0]: ins.operands[1]
        for ins in artifact.module.instructions
        if ins.opcode in ("mov.b32", "mov.u32")
    }
    total = 0
    for ins in artifact.module.instructions:
        if ins.opcode.startswith("tcgen05.alloc"):
            token = constants.get(ins.operands[1], ins.operands[1])
            total += int(token, 0) if token.lstrip("-").isalnum() else 0
    return total


def differences(a: Artifact, b: Artifact) -> list[str]:
    """Where two kernels differ once their symbol names are made equal; empty: byte for byte equal.

    Compares the PTX text and every section of the cubin that is more than a list of names.
    """
    found = []
    texts = [_without_name(x.ptx, x.module.name) for x in (a, b)]
    if texts[0] != texts[1]:
        lines = [t.splitlines() for t in texts]
        at = next(
            (i for i, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]),
            min(map(len, lines)),
        )
        found.append(
            f"PTX differs from line {at + 1} on ({len(lines[0])} and {len(lines[1])} lines)"
        )
    sections = [
        {_without_name(name, x.module.name): data for name, data in _sections(x.cubin.read_bytes())}
        for x in (a, b)
    ]
    for name in sorted(sections[0].keys() | sections[1].keys()):
        if sections[0].get(name) != sections[1].get(name):
            found.append(f"cubin section {name} differs")
    return found


def fingerprint(artifact: Artifact) -> str:
    """SHA-256 of the PTX without its symbol, source lines and comments, which change no machine
    code: equal for a build that is executed here and one that ships."""
    lines = (line.strip() for line in _without_name(artifact.ptx, artifact.module.name).split("\n"))
    kept = [line for line in lines if line and not line.startswith(NOT_CODE)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def _without_name(text: str, symbol: str) -> str:
    return text.replace(symbol, "KERNEL")


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of the sections of a 64-bit ELF file."""
    if elf[:5] != b"\x7fELF\x02":
        raise ToolError("the cubin is no 64-bit ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    text_start = headers[names][4]
    for name, kind, _, _, start, length in headers:
        end = elf.index(b"\0", text_start + name)
        title = elf[text_start + name : end].decode()
        if kind not in (0, 8) and not title.startswith(NAMES_ONLY):
            yield title, elf[start : start + length]


def rebuilt(recipe: Recipe, hash_seed: str) -> tuple[bytes, bytes]:
    """(PTX, cubin) of a fresh build in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        made = compile_in_process(recipe, Path(scratch), hash_seed)
        return made.ptx.encode(), made.cubin.read_bytes()
