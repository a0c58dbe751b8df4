"""Training in time-boxed legs that resume from a checkpoint, and export as a LlamaForCausalLM."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from blasst.evals.errors import EvalsError
from blasst.evals.packages import Say
from blasst.evals.retrieval_model.config import Shape, Stage, Training
from blasst.evals.retrieval_model.documents import EVALUATED, Documents
from blasst.evals.retrieval_model.model import RetrievalModel, load
from blasst.evals.retrieval_model.optimizer import Optimizer
from blasst.evals.retrieval_model.tokenizer import SPECIALS, build_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HELD_OUT = 10**6
"""Seeds from here on are evaluated with and never trained on."""
_SHARD = "15MB"
_LOG_S, _GATE_S = 10.0, 6.0

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Progress:
    """Where training is; kept in the checkpoint."""

    stage: int = 0
    stage_s: float = 0.0
    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Scores:
    """exact: share of documents whose whole answer is right, teacher-forced. tokens: share of
    answer tokens. nll: nats an answer token."""

    exact: float
    tokens: float
    nll: float


class _Stream(IterableDataset[Batch]):
    def __init__(self, tokenizer: str, essay: np.ndarray, stage: Stage, seed: int) -> None:
        self._parts = tokenizer, essay, stage, seed

    def __iter__(self) -> Iterator[Batch]:
        from tokenizers import Tokenizer

        text, essay, stage, seed = self._parts
        worker = torch.utils.data.get_worker_info()
        number = worker.id if worker is not None else 0
        documents = Documents(Tokenizer.from_str(text), essay, seed * 100 + number)
        rng = np.random.default_rng(seed * 100 + number)
        lengths, shares = list(stage.lengths), np.array(list(stage.lengths.values()))
        while True:
            length = int(rng.choice(lengths, p=shares / shares.sum()))
            ids, weights = documents.batch(max(1, stage.micro // length), length, stage.mix)
            yield torch.from_numpy(ids).long(), torch.from_numpy(weights)


class Trainer:
    """text: running text for the tokenizer and the haystack. out: checkpoint, then the model.
    init: exported folder to go on from, with its tokenizer and shape. tokenizer: folder whose
    tokenizer to use; without either one is built from the text."""

    def __init__(
        self,
        training: Training,
        text: str,
        out: Path,
        say: Say,
        init: Path | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        torch.manual_seed(training.seed)
        self._training, self._out, self._say = training, out, say
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given = init or tokenizer
        self.tokenizer: Tokenizer = (
            build_tokenizer(text, training.shape.vocabulary)
            if given is None
            else read_tokenizer(given)
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        self._essay = np.array(ids, np.int32)
        model = RetrievalModel(training.shape) if init is None else load(init)
        self.model = model.train().to(self.device)
        if self.device.type == "cuda":
            self._say(json.dumps({"attention": fastest_attention(training.shape)}))
            if training.compiled:
                self.model.compile_blocks()
        self._optimizer = Optimizer(self.model, training.weight_decay)
        self.progress = Progress()
        self._resume()

    def run(self) -> bool:
        """One leg; True when training is over. Raises EvalsError when the loss is not finite."""
        stages, start, base = self._training.stages, time.monotonic(), self.progress.elapsed_s
        deadline = start + self._training.leg_s
        while self.progress.stage < len(stages):
            if not self._stage(stages[self.progress.stage], start, base, deadline):
                break
            self.progress.stage, self.progress.stage_s = self.progress.stage + 1, 0.0
            self._save()
        self._save()
        return self.progress.stage == len(stages)

    def evaluate(self, length: int, tasks: tuple[str, ...] = EVALUATED) -> dict[str, Scores]:
        """Of documents that were never trained on."""
        found = {}
        for number, task in enumerate(tasks):
            documents = Documents(self.tokenizer, self._essay, _HELD_OUT + 1000 * number + length)
            ids, weights = documents.evaluation(task, self._training.evaluate, length)
            found[task] = score(self.model, torch.from_numpy(ids).long(), torch.from_numpy(weights))
        return found

    def _stage(self, stage: Stage, start: float, base: float, deadline: float) -> bool:
        """False when the leg's time was up before the stage's."""
        p, begun = self.progress, time.monotonic() - self.progress.stage_s
        seconds = self._training.stage_seconds(p.stage, p.elapsed_s - p.stage_s)
        batches = self._batches(stage)
        said = gated = time.monotonic()
        since: list[tuple[float, float]] = []
        while True:
            now = time.monotonic()
            p.stage_s, p.elapsed_s = now - begun, base + now - start
            if p.stage_s > seconds:
                return True
            if now > deadline:
                return False
            loss, right = self._step(stage, batches)
            if not math.isfinite(loss):
                raise EvalsError(f"the loss is {loss} at step {p.step}; lower the rate")
            since.append((loss, right))
            if now - said > _LOG_S:
                mean_loss, mean_right = (round(float(x), 4) for x in np.mean(since, 0))
                line = {"stage": p.stage, "step": p.step, "loss": mean_loss, "right": mean_right}
                self._say(json.dumps(line | {"tokens": p.tokens, "s": round(p.elapsed_s)}))
                said, since = now, []
            if stage.gate is not None and now - gated > _GATE_S:
                gated = now
                found = self.evaluate(min(stage.lengths), ("copy", "single"))
                if all(scores.tokens >= stage.gate for scores in found.values()):
                    return True

    def _batches(self, stage: Stage) -> Iterator[Batch]:
        workers = self._training.workers
        seed = 1000 + 50 * self.progress.stage + self.progress.step % 37
        stream = _Stream(self.tokenizer.to_str(), self._essay, stage, seed)
        more: dict[str, Any] = {"prefetch_factor": 3} if workers else {}
        return iter(DataLoader(stream, batch_size=None, num_workers=workers, **more))

    def _step(self, stage: Stage, batches: Iterator[Batch]) -> tuple[float, float]:
        losses, rights = 0.0, 0.0
        for _ in range(stage.accumulate):
            ids, weights = (x.to(self.device) for x in next(batches))
            loss, right = self._loss(ids, weights)
            torch.autograd.backward(loss / stage.accumulate)
            losses += float(loss.detach()) / stage.accumulate
            rights += float(right) / stage.accumulate
            self.progress.tokens += ids.numel()
        self._optimizer.step(self._rate())
        self.progress.step += 1
        return losses, rights

    def _loss(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Answer tokens with their weight, and a sample of the others with a tenth."""
        with _mixed(self.device):
            hidden = self.model(ids)[:, :-1].flatten(0, 1)
            weight, wanted = weights[:, 1:].flatten(), ids[:, 1:].flatten()
            sampled = torch.rand_like(weight) < self._training.background
            kept = ((weight > 0) | sampled).nonzero()[:, 0]
            logits = self.model.logits(hidden[kept]).float()
        wanted, weight = wanted[kept], weight[kept]
        answers = weight > 0
        each = functional.cross_entropy(logits, wanted, reduction="none")
        share = torch.where(answers, weight, 0.1) * (wanted != 0)
        right = ((logits.argmax(-1) == wanted) & answers).sum() / answers.sum().clamp(min=1)
        return (each * share).sum() / share.sum().clamp(min=1e-6), right

    def _rate(self) -> float:
        """Up over the first steps, level, and down over the last share of the time."""
        t, p = self._training, self.progress
        up = min(1.0, (p.step + 1) / t.warmup_steps)
        down = min(1.0, max(0.03, (1 - p.elapsed_s / t.total_s) / t.decay))
        return t.rate * up * down

    def _resume(self) -> None:
        path = self._out / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, map_location=self.device, weights_only=False)
            self.model.load_state_dict(state["model"])
            self._optimizer.load(state["optimizer"])
            self.progress = Progress(**state["progress"])
            self._say(f"resumed at step {self.progress.step}")

    def _save(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state(),
            "progress": vars(self.progress),
        }
        partial = self._out / "checkpoint.pt.partial"
        torch.save(state, partial)
        partial.replace(self._out / "checkpoint.pt")


def fastest_attention(shape: Shape) -> dict[str, float]:
    """Times forward and backward on the GPU, leaves the fastest on; seconds of each that runs."""
    size = (4, shape.heads, 16384, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    found = {}
    for name in ("cudnn", "flash"):
        _only(name)
        try:
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.backward(out.sum())
                torch.cuda.synchronize()
                found[name] = time.perf_counter() - start
        except RuntimeError:
            found.pop(name, None)
    if not found:
        raise EvalsError("neither cuDNN nor flash attention runs on this GPU")
    _only(min(found, key=lambda name: found[name]))
    return found


def _only(name: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def _mixed(device: torch.device) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def score(model: RetrievalModel, ids: torch.Tensor, weights: torch.Tensor) -> Scores:
    """Teacher-forced, document by document: right under greedy decoding if all tokens are."""
    device = model.embed_tokens.weight.device
    exact = right = total = 0
    nll = 0.0
    for row, weight in zip(ids, weights, strict=True):
        # Never compiled: one document is another shape than a batch.
        with torch.compiler.set_stance("force_eager"), _mixed(device):
            hidden = model(row[None].to(device))[0, :-1]
        asked = (weight[1:] > 0).to(device)
        logits, wanted = model.logits(hidden[asked].float()), row[1:].to(device)[asked]
        hits = int((logits.argmax(-1) == wanted).sum())
        exact += hits == len(wanted)
        right += hits
        total += len(wanted)
        nll += float(functional.cross_entropy(logits, wanted, reduction="sum"))
    return Scores(exact / len(ids), right / max(1, total), nll / max(1, total))


def export(model: RetrievalModel, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face folder in bfloat16, in shards of at most 15 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape: Shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    llama = LlamaForCausalLM(config)
    weights = {f"model.{n}": w.detach().float().cpu() for n, w in model.state_dict().items()}
    found = llama.load_state_dict(weights, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise AssertionError(f"names differ from LlamaForCausalLM: {found}")
    llama.tie_weights()
    llama.to(torch.bfloat16).save_pretrained(folder, max_shard_size=_SHARD)
    pad, bos, eos = SPECIALS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    )
    fast.save_pretrained(folder)
