"""PTX text to a Module: parameters, registers, labels and instructions, each with its lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from blasst.kernels.verify.errors import VerifyError

Scope = tuple[int, ...]
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr[\s.\w]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)"
)
_LABEL = re.compile(r"([$\w%]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d*)\]")
_SPACE = re.compile(r"\s*")
BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction. source: "file:line" where the PTX has line information.

    scope: the braces it stands in, outermost first. ptx_line: of the text, from 1.
    """

    index: int
    opcode: str
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    scope: Scope
    source: str | None
    ptx_line: int

    @property
    def where(self) -> str:
        """The line of the kernel's source, or of the PTX."""
        return self.source or f"ptx:{self.ptx_line}"

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()


@dataclass(frozen=True)
class Parameter:
    """size in bytes."""

    name: str
    size: int


@dataclass
class Module:
    """One entry function. registers: (name, type) by scope; shared: name -> (alignment, bytes)."""

    name: str
    target: str
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[str, Scope], int] = field(default_factory=dict)
    registers: dict[tuple[str, Scope], str] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)

    def label(self, name: str, scope: Scope) -> int:
        """Index of the instruction that a branch from `scope` to `name` goes to."""
        for depth in range(len(scope), 0, -1):
            at = self.labels.get((name, scope[:depth]))
            if at is not None:
                return at
        raise VerifyError(f"label {name} is not defined in the scope of the branch to it")


def parse(text: str) -> Module:
    """The only entry of a PTX module; raises VerifyError for anything else."""
    text = text.replace("\0", "")
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise VerifyError(f"the PTX has {len(entries)} entries; give one kernel at a time")
    entry = entries[0]
    head_end = _find(text, ")", entry.end())
    target = re.search(r"\.target\s+(\w+)", text)
    body_start = _find(text, "{", head_end) + 1
    head = _blank_comments(text[entry.end() : head_end])
    parameters = [
        Parameter(m[2], BYTES[m[1].lstrip("bfsu")] * int(m[3] or 1))
        for m in _PARAMETER.finditer(" ".join(head.split()).replace(", ", ",\n"))
    ]
    module = Module(entry[1], target[1] if target else "", parameters)
    _declare_shared(module, _blank_comments(text[: entry.start()]))
    files = {int(m[1]): m[2].rsplit("/", 1)[-1] for m in _FILE.finditer(text)}
    _Body(module, _blank_comments(text), body_start, files).read()
    return module


def _find(text: str, mark: str, start: int) -> int:
    at = text.find(mark, start)
    if at < 0:
        line = text.count("\n", 0, start) + 1
        raise VerifyError(f"the PTX ends without {mark!r} after line {line}")
    return at


def _blank_comments(text: str) -> str:
    """The same text, every position kept, comments as spaces."""
    blank = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
    return blank.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def _declare_shared(module: Module, text: str) -> None:
    for m in _SHARED.finditer(text):
        module.shared[m[2]] = (int(m[1] or 1), int(m[3] or 0))


class _Body:
    """Reads statements up to the brace that closes the function."""

    def __init__(self, module: Module, text: str, start: int, files: dict[int, str]) -> None:
        self.module, self.text, self.at, self.files = module, text, start, files
        self.scopes: list[int] = [0]
        self.opened = 0
        self.source: str | None = None
        self.line = text.count("\n", 0, start) + 1
        self.counted = start

    def read(self) -> None:
        while self._statement():
            pass

    def _statement(self) -> bool:
        text = self.text
        space = _SPACE.match(text, self.at)
        self.at = space.end() if space else self.at
        if self.at >= len(text):
            raise VerifyError("the PTX ends inside the function")
        if text[self.at] == "{":
            self.opened += 1
            self.scopes.append(self.opened)
            self.at += 1
            return True
        if text[self.at] == "}":
            self.scopes.pop()
            self.at += 1
            return bool(self.scopes)
        loc = _LOC.match(text, self.at)
        if loc:
            self.source = f"{self.files.get(int(loc[1]), '?')}:{loc[2]}"
            self.at = loc.end()
            return True
        label = _LABEL.match(text, self.at)
        if label:
            scope = tuple(self.scopes)
            self.module.labels[label[1], scope] = len(self.module.instructions)
            self.at = label.end()
            return True
        end = _find(text, ";", self.at)
        statement = " ".join(text[self.at : end].split())
        if statement.startswith("."):
            self._declare(statement)
        elif statement:
            self._instruction(statement)
        self.at = end + 1
        return True

    def _declare(self, statement: str) -> None:
        registers = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", statement)
        scope = tuple(self.scopes)
        if registers:
            for name in registers[2].split(","):
                many = re.match(r"([%\w$]+)<(\d+)>$", name.strip())
                names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
                for each in names:
                    self.module.registers[each, scope] = registers[1]
        elif ".shared" in statement:
            _declare_shared(self.module, statement)
        elif not statement.startswith(".pragma"):
            raise VerifyError(f"declaration {statement[:60]!r} is not supported")

    def _instruction(self, statement: str) -> None:
        m = _INSTRUCTION.match(statement)
        if m is None:
            raise VerifyError(f"cannot read the statement {statement[:80]!r}")
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        self.module.instructions.append(
            Instruction(
                index=len(self.module.instructions),
                opcode=m[3],
                operands=tuple(split_operands(m[4])),
                predicate=m[2],
                negated=m[1] == "!",
                scope=tuple(self.scopes),
                source=self.source,
                ptx_line=self.line,
            )
        )


def split_operands(text: str) -> list[str]:
    """Parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += character in "{[("
        depth -= character in "}])"
        if character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
