"""What a user sees when something is wrong on a GPU: each fault is planted in a process of its own.

    python -P -m blasst.plugin.check_faults MODEL --out faults.json
Prints one line a fault: whether the start or the request failed, and the error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from blasst.plugin.bench_engines import ENVIRONMENT, make_engine, no_model_reason, on_cpu
from blasst.plugin.dial import replaced

MAG = 2500
FAR_PAGE = 1 << 28
KV_BYTES = 1 << 30
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 each fault ended as it should, 1 one did not, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="a Hugging Face folder")
    add("--faults", default=",".join(FAULTS), help="which, comma separated (default: all)")
    add("--dtype", default="bfloat16")
    add("--timeout-s", type=float, default=150, help="of each process (default: 150)")
    add("--out", type=Path, required=True)
    add("--one", choices=list(FAULTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    reason = no_model_reason(args.model)
    if reason is not None:
        parser.error(reason)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"the folder of {args.out} does not exist")
    names = args.faults.split(",")
    unknown = set(names) - set(FAULTS)
    if unknown:
        parser.error(f"{sorted(unknown)[0]} is not one of {', '.join(FAULTS)}")
    if args.one is not None:
        args.out.write_text(json.dumps(_plant(args)))
        return 0
    if on_cpu():
        names = [n for n in names if FAULTS[n].on_cpu]
    found = _all(args, names)
    args.out.write_text(json.dumps(found, indent=1))
    for name, row in found.items():
        print(f"{name}: {row['when']}: {row['error']}  [{row['seconds']:.0f} s]", flush=True)
    wrong = [n for n, r in found.items() if not FAULTS[n].ended_well(r)]
    print(f"not as they should be: {', '.join(wrong) or 'none'}", flush=True)
    return 1 if wrong else 0


def _all(args: argparse.Namespace, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Side by side: each spends most of its time on imports."""
    found: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="blasst-faults-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        running = {}
        for name in names:
            answer, log = Path(folder) / f"{name}.json", Path(folder) / f"{name}.log"
            command = [sys.executable, "-P", "-m", "blasst.plugin.check_faults", args.model]
            command += ["--dtype", args.dtype, "--one", name, "--out", str(answer)]
            out = stack.enter_context(open(log, "wb"))
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            running[name] = stack.enter_context(process), answer, log
        began = time.monotonic()
        for name, (process, answer, log) in running.items():
            left = max(1.0, args.timeout_s - (time.monotonic() - began))
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()
            last = log.read_text(errors="replace")
            if answer.exists():
                found[name] = {**json.loads(answer.read_text()), "log": last[-4000:]}
            else:
                row = {"when": "died", "error": f"exit code {process.poll()}", "seconds": 0.0}
                found[name] = {**row, "log": last[-4000:]}
    return found


def _plant(args: argparse.Namespace) -> dict[str, Any]:
    """Where the fault ended, and its error: start, request, or "no error"."""
    os.environ.update(ENVIRONMENT)
    fault = FAULTS[args.one]
    os.environ.update(fault.environment)
    began = time.monotonic()
    when = "start"
    with (
        tempfile.TemporaryDirectory(prefix="blasst-fault-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        try:
            model = fault.model(Path(args.model), Path(folder))
            if fault.before is not None:
                fault.before(stack)
            engine = make_engine(
                model,
                "blasst",
                "eager",
                dummy=model != Path(args.model),
                dtype=args.dtype,
                kv_bytes=KV_BYTES,
                max_model_len=2048,
                max_num_batched_tokens=1024,
                max_num_seqs=8,
                **fault.options,
            )
            when = "request"
            if fault.after is not None:
                fault.after(stack)
            _ask(engine)
        except Exception as e:
            error = f"{type(e).__module__}.{type(e).__name__}: {e}"
            return {"when": when, "error": error[:1500], "seconds": time.monotonic() - began}
    return {"when": "no error", "error": "", "seconds": time.monotonic() - began}


def _ask(engine: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, extra_args={"blasst_mag": MAG}
    )
    engine.generate([{"prompt_token_ids": list(range(5, 200)) * 4}], params, use_tqdm=False)


def _without_memory(stack: ExitStack) -> None:
    """Our call finds no memory: torch may take nothing more while it runs."""
    import torch

    from blasst.kernels.plan import Plan

    real = Plan.run

    def run(self: Plan, *args: Any, **kwargs: Any) -> Any:
        real_empty = torch.empty

        def empty(*shape: Any, **given: Any) -> Any:
            # Larger than any card, through the same allocator: a true error of it.
            return real_empty(1 << 46, dtype=torch.int8, device=given.get("device"))

        with replaced(torch, empty=empty):
            return real(self, *args, **kwargs)

    stack.enter_context(replaced(Plan, run=run))


def _far_pages(stack: ExitStack) -> None:
    from blasst.kernels.plan import Plan
    from blasst.kernels.types import PagedKV

    real = Plan.run

    def run(self: Plan, q: Any, kv: PagedKV, *args: Any, **kwargs: Any) -> Any:
        far = PagedKV(kv.k, kv.v, kv.page_table + FAR_PAGE, kv.seqlens_k)
        return real(self, q, far, *args, **kwargs)

    stack.enter_context(replaced(Plan, run=run))


def _no_compiler(stack: ExitStack) -> None:
    import cutlass.cute
    from cutlass.base_dsl.common import DSLRuntimeError

    # A kernel that an earlier start has kept would need no compiler.
    empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="blasst-no-kernels-"))
    os.environ["XDG_CACHE_HOME"] = empty

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise DSLRuntimeError("planted: ptxas ended with 255")

    stack.enter_context(replaced(cutlass.cute, compile=fails))


def _same_model(model: Path, folder: Path) -> Path:
    del folder
    return model


def _small_heads(model: Path, folder: Path) -> Path:
    """The same model with heads of 32."""
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    return folder


class Fault:
    """before, after: plant it around the start of the engine. when: where it must end; says: what
    its message must hold."""

    def __init__(
        self,
        when: str,
        says: str,
        *,
        on_cpu: bool = False,
        model: Callable[[Path, Path], Path] = _same_model,
        before: Callable[[ExitStack], None] | None = None,
        after: Callable[[ExitStack], None] | None = None,
        environment: dict[str, str] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.when, self.says, self.on_cpu, self.model = when, says, on_cpu, model
        self.before, self.after = before, after
        self.environment, self.options = environment or {}, options or {}

    def ended_well(self, row: dict[str, Any]) -> bool:
        return row["when"] == self.when and self.says in row["error"]


THRESHOLD = {"VLLM_BLASST_MAG": str(MAG)}
FAULTS = {
    "memory": Fault("request", "out of memory", after=_without_memory),
    "page-table": Fault("request", "illegal memory access", after=_far_pages),
    "compile": Fault("start", "set VLLM_BLASST_IMPL=triton", before=_no_compiler),
    "head-size": Fault(
        "start", "head_dim 32", on_cpu=True, model=_small_heads, environment=THRESHOLD
    ),
    "drafts": Fault(
        "start",
        "speculative decoding",
        environment=THRESHOLD,
        options={"speculative_config": NGRAM},
    ),
    "drafts-request": Fault(
        "request", "speculative decoding", options={"speculative_config": NGRAM}
    ),
}


if __name__ == "__main__":
    sys.exit(main())
