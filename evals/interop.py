"""Results and samples for other programs: NVIDIA's client and evaluation, `vllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blasst.evals.cells import Results
from blasst.evals.errors import InputError
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample
from blasst.evals.thresholds import Point, key_of, name_of


def nvidia_predictions(results: Results, point: Point, length: int, folder: Path) -> list[Path]:
    """TASK.jsonl as `long_context_eval/eval/evaluate.py --data_dir FOLDER` reads them; its scores
    must be those of our report. Raises InputError without answers at this threshold and length."""
    lines_of = {task: _predictions(results, point, length, task) for task in results.tasks}
    written = [_write(folder / f"{task}.jsonl", lines) for task, lines in lines_of.items() if lines]
    if not written:
        raise InputError(f"the results hold no answer under {name_of(point)} at {length} tokens")
    return written


def _predictions(results: Results, point: Point, length: int, task: str) -> list[dict[str, Any]]:
    lines = [
        {
            "index": int(record["index"]),
            "input": "",
            "pred": record["prediction"],
            "outputs": record["answers"],
            "others": {"id": record["sample"]},
        }
        for record in results.accuracy
        if (record["threshold"], record["task"], record["length"]) == (key_of(point), task, length)
    ]
    return sorted(lines, key=lambda line: int(line["index"]))


def nvidia_samples(samples: Sequence[Sample], encoder: PromptEncoder, folder: Path) -> list[Path]:
    """TASK/validation.jsonl as `long_context_eval/pred/call_api.py --data_dir FOLDER` reads them.

    That client sends text and leaves special tokens to the server's tokenizer. Raises InputError
    for samples of several lengths, and when no text is read as the sample's ids.
    """
    lengths = sorted({sample.length for sample in samples})
    if len(lengths) != 1:
        raise InputError(f"NVIDIA's client reads one length at a time, not {lengths}")
    return [
        _write(
            folder / task / "validation.jsonl",
            [
                {
                    "index": sample.index,
                    "input": _text_with_specials(sample, encoder),
                    "outputs": list(sample.answers),
                    "length": len(sample.prompt),
                }
                for sample in samples
                if sample.task == task
            ],
        )
        for task in dict.fromkeys(sample.task for sample in samples)
    ]


def _text_with_specials(sample: Sample, encoder: PromptEncoder) -> str:
    """With the start token in the text only where the tokenizer does not add one itself."""
    for ids in (sample.prompt, sample.prompt[1:]):
        text = encoder.decode(ids)
        if tuple(encoder.tokenizer.encode(text).ids) == sample.prompt:
            return text
    raise InputError(f"sample {sample.id}: no text is read as its tokens; send ids")


def prompt_text(sample: Sample, encoder: PromptEncoder) -> str:
    """What the tokenizer turns back into the sample's ids. Raises InputError if nothing is."""
    text = encoder.decode(sample.prompt)
    again = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    if tuple(again) != sample.prompt:
        raise InputError(f"sample {sample.id} cannot be written as text without changing it")
    return text


def bench_prompts(texts: Sequence[str], path: Path) -> Path:
    """For `vllm bench serve --dataset-name custom --skip-chat-template`."""
    return _write(path, [{"prompt": text, "output_tokens": 1} for text in texts])


def _write(path: Path, lines: Sequence[dict[str, object]]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise InputError(f"{path} cannot be written: {e.strerror}") from e
    return path
