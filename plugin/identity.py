"""What an engine computes with: which weights, in which types, in chunks of how many tokens.

Two servers that differ in any of it give different answers to the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blasst.plugin.log import logger

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""As vLLM chooses: the first of them that finds a file."""
_SAMPLE_BYTES = 256
_MOST_SAMPLES = 4096
"""In all files together: a second on a slow disk. More tensors than that are sampled evenly."""
_HEADER_MAX = 100 << 20
_DIGITS = 16


def identity(vllm_config: Any) -> dict[str, str]:
    """By the names of `layout.SERVED`; what cannot be found out is left out. Never raises for a
    model folder that cannot be read."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    found = {
        "weights": weights(vllm_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization or "none"),
        "max_num_batched_tokens": str(vllm_config.scheduler_config.max_num_batched_tokens),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
    }
    return {name: text for name, text in found.items() if text}


def weights(vllm_config: Any) -> str:
    """A digest of the model's files, `dummy-SEED`, or "" where there are none to read."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(getattr(load.load_format, "value", load.load_format)) == "dummy":
        return f"dummy-{model.seed}"
    overrides = model.hf_overrides
    try:
        path = _local(str(model.model), model.revision, load.download_dir)
        return digest(path, repr(overrides) if isinstance(overrides, dict) else "")
    except (OSError, ValueError) as e:  # ValueError: no name on the Hub, such as REPO:QUANT
        logger.warning("blasst: the weights of %s are not identified: %s", model.model, e)
        return ""


def digest(path: Path, more: str = "") -> str:
    """Of a folder or one file: config.json, and of each weights file its name, size, list of
    tensors and some bytes out of the middle of every tensor. Any training changes those; a few
    values of a tensor that were edited by hand may go unseen. "" without weights. Raises OSError.
    """
    files = _weight_files(path)
    if not files:
        return ""
    found = hashlib.sha256(more.encode())
    config = (path if path.is_dir() else path.parent) / "config.json"
    found.update(config.read_bytes() if config.exists() else b"")
    for file in files:
        with open(file, "rb", buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            found.update(f"|{file.name}|{size}|".encode())
            for at, length in _places(f.fileno(), size, _MOST_SAMPLES // len(files) or 1):
                found.update(os.pread(f.fileno(), length, at))
    return found.hexdigest()[:_DIGITS]


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for pattern in _PATTERNS:
        if files := sorted(path.glob(pattern)):
            return files
    return []


def _places(fd: int, size: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is read: a safetensors header and a place in each tensor, or
    places all over a file of another kind."""
    header = _header_bytes(fd, size)
    tensors = _tensors(os.pread(fd, header, 8), size - 8 - header) if header else []
    if not tensors:
        step = max(_SAMPLE_BYTES, size // most)
        yield from ((at, _SAMPLE_BYTES) for at in range(0, size, step))
        return
    yield 0, 8 + header
    for begin, end in tensors[:: -(-len(tensors) // most)]:
        middle = 8 + header + max(begin, (begin + end - _SAMPLE_BYTES) // 2)
        yield middle, min(_SAMPLE_BYTES, end - begin)


def _header_bytes(fd: int, size: int) -> int:
    """0: no safetensors file."""
    head = os.pread(fd, 8, 0)
    length = int(struct.unpack("<Q", head)[0]) if len(head) == 8 else 0
    return length if 0 < length <= min(size - 8, _HEADER_MAX) else 0


def _tensors(header: bytes, data_bytes: int) -> list[tuple[int, int]]:
    """[begin, end) of each tensor in the data; empty for what is no header."""
    try:
        entries = [v for k, v in json.loads(header).items() if k != "__metadata__"]
        found = sorted((int(b), int(e)) for b, e in (entry["data_offsets"] for entry in entries))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []
    inside = all(0 <= begin <= end <= data_bytes for begin, end in found)
    return found if inside else []


def _local(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Of a path itself, of a name on the Hub the folder that vLLM has loaded it into."""
    if os.path.exists(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    # Under --download-dir vLLM keeps the weights alone.
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors"):
        found = try_to_load_from_cache(
            model, name, cache_dir=download_dir or None, revision=revision
        )
        if isinstance(found, str):
            return Path(found).parent
    raise FileNotFoundError("its files are not on this machine")
