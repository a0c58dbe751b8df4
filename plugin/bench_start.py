"""How long an engine takes to start: kernels compiled, kernels loaded, two processes at once.

    python -P -m blasst.plugin.bench_start MODEL --out start.json
Each start is a process of its own; prints until when it was ready, and the kernel's part of that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blasst.plugin.bench_engines import (
    ENVIRONMENT,
    make_engine,
    no_model_reason,
    stock_backend,
    unusable_reason,
    write_llama,
)

KV_BYTES = 1 << 30
DUMMY = "llama-8b"
_KERNEL = re.compile(r"blasst: the (\w+) kernel is ready after ([0-9.]+) s")
_READY = "blasst-start "


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 a start failed, 2 bad usage (argparse)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help=f"a Hugging Face folder, or {DUMMY}: that shape with dummy weights")
    add("--dtype", default="bfloat16")
    add("--together", type=int, default=2, help="engines that start at once (default: 2)")
    add("--only", default="", help="starts whose names have this in them (default: all)")
    add("--timeout-s", type=float, default=150, help="of each start (default: 150)")
    add("--out", type=Path, required=True)
    add("--one", choices=("stock", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one is not None:
        return _one(args)
    # Whether a GPU is there is for the first start to find out: it is to be the first to import.
    reason = None if args.model == DUMMY else no_model_reason(args.model)
    if reason is not None:
        parser.error(reason)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"the folder of {args.out} does not exist")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="blasst-start-", ignore_cleanup_errors=True) as name:
        first, second = Path(name) / "first", Path(name) / "second"
        for what, backend, cache, count in (
            ("stock", "stock", first, 1),
            ("nothing kept", "ours", first, 1),
            ("kernel kept", "ours", first, 1),
            (f"nothing kept, {args.together} at once", "ours", second, args.together),
            (f"kernel kept, {args.together} at once", "ours", second, args.together),
            ("stock again", "stock", first, 1),
        ):
            if args.only not in what:
                continue
            found[what] = _starts(args, backend, cache, count)
            args.out.write_text(json.dumps(found, indent=1))
            print(f"{what}: {found[what]}", flush=True)
            if what == "stock" and not found[what]:
                break  # no engine starts here at all
    return 0 if found and all(found.values()) else 1


def _starts(args: argparse.Namespace, backend: str, cache: Path, count: int) -> list[Any]:
    """Of each process what it said; empty when one failed."""
    cache.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "blasst.plugin.bench_start", args.model]
    command += ["--dtype", args.dtype, "--one", backend, "--out", str(args.out)]
    # Only our own cache is new: vLLM keeps its where it would be otherwise.
    env = {"VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"), **os.environ}
    env["XDG_CACHE_HOME"] = str(cache)
    began = time.monotonic()
    running = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(count)
    ]
    rows = []
    for process in running:
        left = max(1.0, args.timeout_s - (time.monotonic() - began))
        try:
            log, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            log, _ = process.communicate()
        rows.append(read_log(log))
        if rows[-1] is None:
            print(log[-1500:], file=sys.stderr)
    return [] if None in rows else rows


def read_log(log: str) -> dict[str, float] | None:
    """imports_s, engine_s (the kernel's part among them) and kernel_s of one start; None: it
    failed."""
    for line in log.splitlines():
        if line.startswith(_READY):
            row: dict[str, float] = json.loads(line.removeprefix(_READY))
            kernels = [float(seconds) for _, seconds in _KERNEL.findall(log)]
            return row | ({"kernel_s": max(kernels)} if kernels else {})
    return None


def _one(args: argparse.Namespace) -> int:
    os.environ.update(ENVIRONMENT)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blasst-start-", ignore_cleanup_errors=True) as folder:
        os.environ["VLLM_BLASST_STATE_DIR"] = folder
        importlib.import_module("vllm.entrypoints.llm")
        backend = "blasst" if args.one == "ours" else stock_backend()
        imported = time.monotonic()
        reason = unusable_reason(args.model)
        if reason is not None:
            print(reason)
            return 2
        dummy = args.model == DUMMY
        engine = make_engine(
            write_llama(Path(folder) / "model", args.dtype) if dummy else args.model,
            backend,
            "eager",
            dummy=dummy,
            dtype=args.dtype,
            kv_bytes=KV_BYTES,
            max_model_len=2048,
            max_num_batched_tokens=1024,
            max_num_seqs=8,
        )
        row = {"imports_s": imported - began, "engine_s": time.monotonic() - imported}
        print(_READY + json.dumps({k: round(v, 2) for k, v in row.items()}), flush=True)
        del engine
    return 0


if __name__ == "__main__":
    sys.exit(main())
