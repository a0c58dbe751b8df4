"""What `on_hardware` does on a B200: each step yields lines to print."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from blasst.kernels.blackwell.config import Config
from blasst.kernels.blackwell.launch import prefill
from blasst.kernels.blackwell.problems import DENSE, SKIP_RATES, VOTING, parts
from blasst.kernels.blackwell.proof import compiled, differing
from blasst.kernels.cute.host import Inputs
from blasst.kernels.instruments.record import Recording, reads_of
from blasst.kernels.instruments.steps import STEPS
from blasst.kernels.instruments.timeline import svg
from blasst.kernels.testing import DialOptions, cumulative, dialled_inputs
from blasst.kernels.types import RaggedKV
from blasst.kernels.verify.subject import Case
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.subjects.attention import Shape

Compile = Callable[[Config], Callable[..., Any]]
SOAKED = (VOTING, DENSE, replace(VOTING, cross_p=False))
LAUNCHES = 1000
ROUNDS = 20
VISITS = 64  # of a recorded thread block
PROVED = (10, 0)  # compute capability


@dataclass
class Moved:
    """A case's launch on a device; outputs go back to the case, where its oracle looks at them."""

    case: Case
    device: str

    def __post_init__(self) -> None:
        named = {**self.case.inputs, **self.case.outputs}
        self.tensors = {id(t): t.to(self.device) for t in named.values()}

    def launch(self, kernel: Callable[..., Any]) -> None:
        for name, tensor in self.case.outputs.items():
            self.tensors[id(tensor)].copy_(self.case.before[name])
        kernel(*(self._moved(a) for a in self.case.arguments))

    def _moved(self, argument: Any) -> Any:
        if isinstance(argument, tuple):  # lists of a block mask
            return tuple(self._moved(part) for part in argument)
        return self.tensors.get(id(argument), argument)

    def collect(self) -> str:
        """Digest of the outputs, which are in the case now."""
        for tensor in self.case.outputs.values():
            tensor.copy_(self.tensors[id(tensor)])
        return self.case.digest()


def proved(capability: tuple[int, int] | None = None) -> Iterator[str]:
    """The main builds, compiled once more: a line for each whose PTX is not the proved one."""
    if (capability or torch.cuda.get_device_capability()) != PROVED:
        yield "the proof is of PTX for sm_100a; this GPU gets another build"
    for config in SOAKED:
        yield from differing(dict([compiled(config)]))


def correctness(compiled: Compile, device: str = "cuda") -> Iterator[str]:
    """Every problem of the proof, once: a line for each that is wrong."""
    for part in parts():
        for shape in part.shapes:
            moved = Moved(blackwell.case(part.config, shape), device)
            moved.launch(compiled(part.config))
            moved.collect()
            for line in moved.case.check():
                yield f"{part.name}: {moved.case.name}: {line}"


def soak(
    compiled: Compile,
    configs: Sequence[Config] = SOAKED,
    launches: int = LAUNCHES,
    device: str = "cuda",
) -> Iterator[str]:
    """Launches without a pause between them; each problem must repeat its bits of a lone launch."""
    for config in configs:
        kernel = compiled(config)
        shapes = [Shape(((200 + 8 * i, 700),), seed=i) for i in range(8)]
        moved = [Moved(blackwell.case(config, shape), device) for shape in shapes]
        alone = []
        for one in moved:
            one.launch(kernel)
            alone.append(one.collect())
        for i in range(launches):
            moved[i % len(moved)].launch(kernel)
        for one, digest in zip(moved, alone, strict=True):
            if one.collect() != digest:
                yield f"{config}: {one.case.name} changed in {launches} launches"


def dialled(rate: float, seqlen: int, batch: int, causal: bool) -> Inputs:
    """32 heads on 8 kv heads of 128, bf16, a chosen share of skipped blocks."""
    x = dialled_inputs(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        seqlen=seqlen,
        skip_rate=rate,
        causal=causal,
        options=DialOptions(dtype=torch.bfloat16),
    )
    ends = cumulative([seqlen] * batch).cuda()
    q, k, v = (t.cuda().repeat(batch, 1, 1) for t in (x.q, x.kv.k, x.kv.v))
    counters = torch.zeros(8, 2, dtype=torch.int64, device="cuda")
    return Inputs(
        q, RaggedKV(k, v, ends), ends, torch.empty_like(q), seqlen, 128**-0.5, causal,
        x.skip_lambda.cuda().repeat(batch), counters,
    )  # fmt: skip


def bench(seqlen: int, batch: int, causal: bool) -> Iterator[str]:
    """Medians in ms, contenders in turn; the change is against dense with P in its own scores."""
    yield "| wanted | skipped | kernel | ms | change |"
    for rate in SKIP_RATES:
        voting = dialled(rate, seqlen, batch, causal)
        dense = replace(voting, skip_lambda=None, counters=None)
        calls = {
            f"{name}, {place}": (x, cross)
            for name, x in (("dense", dense), ("vote", voting))
            for place, cross in (("own P", False), ("cross-stage P", True))
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS + 3):
            for name, (x, cross) in calls.items():
                times[name].append(_milliseconds(x, cross))
        assert voting.counters is not None
        visited, skipped = voting.counters.sum(0).tolist()
        base = statistics.median(times["dense, own P"][3:])
        for name, taken in times.items():
            ms = statistics.median(taken[3:])
            yield (
                f"| {rate:.0%} | {skipped / visited:.1%} | {name} | {ms:.4f} | "
                f"{ms / base - 1:+.1%} |"
            )


def _milliseconds(inputs: Inputs, cross_p: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    prefill(inputs, cross_p=cross_p)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def timeline(folder: Path, seqlen: int) -> Iterator[str]:
    """Clocks of one thread block, with and without cross-stage P: a picture and the numbers."""
    config = VOTING
    warps = {w: blackwell.role(config, w) + f" warp {w}" for w in range(config.roles.warps)}
    for cross_p in (True, False):
        buffer = torch.zeros(1 + len(warps), VISITS, STEPS, dtype=torch.int64, device="cuda")
        inputs = replace(dialled(0.76, seqlen, 1, False), trace=buffer)
        for _ in range(2):  # the first one warms up
            buffer.zero_()
            prefill(inputs, cross_p=cross_p)
        title = "cross-stage P" if cross_p else "own P"
        about = {"seqlen": seqlen, "gpu": torch.cuda.get_device_name()}
        recording = Recording(title, warps, reads_of(buffer.cpu().tolist()), about)
        path = folder / f"timeline-{title.replace(' ', '-')}"
        recording.save(path.with_suffix(".json"))
        path.with_suffix(".svg").write_text(svg(recording.timeline()))
        yield f"{path}.svg and .json"


def compile_for(config: Config) -> Callable[..., Any]:
    from blasst.kernels.blackwell.compile import compile_prefill

    return compile_prefill(config)  # type: ignore[no-any-return]
