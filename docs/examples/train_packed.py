"""Trains a tiny Llama on packed shared-prefix and strip-thinking batches, on a CPU or a GPU.

train_packed.py same       packing against separate sequences: loss, gradients, cost
train_packed.py train      steps on packed batches, with the masks' cache hit rate
train_packed.py history    one copy of each token against exact history
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from blasst.kernels.masks import (
    MASKS,
    AttentionMask,
    PackedBatch,
    Sample,
    bind,
    causal,
    conversation,
    document,
    masked_attention,
    pack,
    padding,
    shared_prefix,
    shared_prefix_sample,
    strip_history_thinking,
)
from blasst.kernels.masks.chat import Template, passes
from blasst.kernels.masks.expr import Mask
from blasst.kernels.masks.mods import Role
from blasst.kernels.masks.segments import Piece

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMask], torch.Tensor]

BLOCK = 128


@dataclass(frozen=True)
class Config:
    """Sizes of the model; a byte is a token."""

    vocabulary: int = 128
    layers: int = 2
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the mask comes with the batch."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        kv_dim = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.dim, config.dim, bias=False)
        self.kv = nn.Linear(config.dim, 2 * kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        head_dim = self.config.head_dim
        q = rotate(self.q(x).unflatten(-1, (-1, head_dim)), angles)
        k, v = self.kv(x).unflatten(-1, (-1, head_dim)).chunk(2, 2)
        return self.out(self.attend(q, rotate(k, angles), v, mask).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm."""

    def __init__(self, config: Config, attend: Attend) -> None:
        super().__init__()
        self.attention = Attention(config, attend)
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(config.dim) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), angles, mask)
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class TinyLlama(nn.Module):
    """input_ids, position_ids [batch, seqlen] -> hidden states, before the head."""

    def __init__(self, config: Config, attend: Attend = masked_attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.head_dim = config.head_dim

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        # Of the whole model's dtype, positions of a long prefix would be rounded.
        halves = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device)
        angles = position_ids[..., None, None] * 10000.0 ** -(halves / self.head_dim)
        for block in self.blocks:
            x = block(x, angles, mask)
        return self.norm(x)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x [batch, seqlen, heads, head_dim], angles [batch, seqlen, 1, half]."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def loss_sum(model: TinyLlama, batch: PackedBatch, mask: Mask) -> torch.Tensor:
    """Cross entropy of all targets of a batch, summed. A source may have several targets."""
    device = model.head.weight.device
    bound = bind(mask & document() & padding(), batch.segments, device)
    positions = batch.segments.position_ids.to(device)
    hidden = model(batch.input_ids.to(device), positions, bound)
    logits = model.head(hidden[batch.loss_rows.to(device), batch.loss_sources.to(device)])
    return F.cross_entropy(logits.double(), batch.loss_targets.to(device), reduction="sum")


@dataclass(frozen=True)
class Cost:
    """One way to compute a loss and its gradients. seconds: forward + backward, the median; of
    processor time on a CPU."""

    way: str
    tokens: int
    targets: int
    loss: float
    seconds: float
    gradient_difference: float


def now(model: TinyLlama) -> float:
    """Seconds: of the processor on a CPU, where neighbours do not count; else of the wall."""
    if model.head.weight.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def compare(
    model: TinyLlama, ways: dict[str, list[tuple[PackedBatch, Mask]]], rounds: int
) -> list[Cost]:
    """Every way in turn, each round; gradients against the first way's, relative to its norm."""
    gradients: dict[str, torch.Tensor] = {}
    losses: dict[str, float] = {}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, batches in ways.items():
            model.zero_grad()
            start = now(model)
            losses[way] = 0.0
            for batch, mask in batches:
                loss = loss_sum(model, batch, mask)
                loss.backward()
                losses[way] += float(loss.detach())
            times[way].append(now(model) - start)
            gradients[way] = torch.cat([p.grad.flatten() for p in model.parameters()])
    reference = next(iter(gradients.values()))
    return [
        Cost(
            way,
            sum(b.input_ids.numel() for b, _ in batches),
            sum(b.loss_targets.numel() for b, _ in batches),
            losses[way],
            sorted(times[way][1:])[rounds // 2],
            float((gradients[way] - reference).norm() / reference.norm()),
        )
        for way, batches in ways.items()
    ]


def one_path(*parts: Sequence[int]) -> Sample:
    """A plain causal sample; loss on the last part."""
    pieces, position = [], 0
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        pieces.append(Piece(tuple(part), position=position, loss=last, after=i - 1 if i else None))
        position += len(part)
    return Sample(tuple(pieces))


def prefix_ways(
    prefix: Sequence[int], suffixes: Sequence[Sequence[int]]
) -> dict[str, list[tuple[PackedBatch, Mask]]]:
    """n separate sequences, in one padded batch, against one packed row."""
    separate = [one_path(prefix, suffix) for suffix in suffixes]
    longest = max(len(s) for s in separate)
    rows = pack(separate, seqlen=longest)
    shared = pack([shared_prefix_sample(prefix, suffixes)])
    return {
        "separate": [(rows, causal())],
        "shared prefix": [(shared, shared_prefix())],
    }


def chat_ways(
    chats: Sequence[list[dict[str, str]]],
) -> dict[str, list[tuple[PackedBatch, Mask]]]:
    """One pass a turn, against exact history and against one copy of each token."""
    template = Template(header="{role[0]}:", footer="\n")
    turns = [s for chat in chats for s in passes(chat, ascii_tokens, template=template)]
    ways: dict[str, list[tuple[PackedBatch, Mask]]] = {
        "one pass a turn": [(pack(turns, seqlen=max(len(s) for s in turns)), causal())]
    }
    for strip, mask in (("exact", shared_prefix()), ("mask", strip_history_thinking())):
        samples = [
            conversation(chat, ascii_tokens, strip=strip, template=template) for chat in chats
        ]
        length = max(len(s) for s in samples)
        ways[f"strip={strip}"] = [(pack(samples, seqlen=length), mask)]
    return ways


def ascii_tokens(text: str) -> list[int]:
    """A byte is a token."""
    return list(text.encode("ascii"))


def sums_chat(rng: random.Random, turns: int) -> list[dict[str, str]]:
    """Turns that add two digits with thinking; each answer also adds the answer before it, so that
    history matters. The thinking holds what no later turn may use."""
    messages, before = [], 0
    for _ in range(turns):
        a, b = rng.randrange(10), rng.randrange(10)
        total = (a + b + before) % 10
        secret = rng.randrange(10)
        messages += [
            {"role": "user", "content": f"{a}+{b}"},
            {
                "role": "assistant",
                "content": f"<think>{secret}:{a}+{b}={(a + b) % 10},+{before}</think>{total}",
            },
        ]
        before = total
    return messages


def train(
    model: TinyLlama, batches: Callable[[int], tuple[PackedBatch, Mask]], steps: int
) -> list[float]:
    """Mean loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        batch, mask = batches(step)
        loss = loss_sum(model, batch, mask) / batch.loss_targets.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run_same(args: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(0)
    config = Config(128, args.layers, args.dim, args.heads, max(1, args.heads // 2))
    model = TinyLlama(config).to(args.device, getattr(torch, args.dtype))
    rng = random.Random(0)
    prefix = [rng.randrange(1, 128) for _ in range(args.prefix)]
    suffixes = [
        [rng.randrange(1, 128) for _ in range(args.suffix + i)] for i in range(args.suffixes)
    ]
    chats = [sums_chat(rng, args.turns) for _ in range(2)]
    return {
        "prefix": [asdict(c) for c in compare(model, prefix_ways(prefix, suffixes), args.rounds)],
        "chat": [asdict(c) for c in compare(model, chat_ways(chats), args.rounds)],
    }


def run_train(args: argparse.Namespace) -> dict[str, object]:
    """Batches repeat every eight steps, as epochs do: the second time, their masks are held."""
    torch.manual_seed(0)
    model = TinyLlama(Config()).to(args.device)
    rng = random.Random(1)
    template = Template(header="{role[0]}:", footer="\n")
    epoch = []
    for i in range(8):
        if i % 2:
            prompt = ascii_tokens("sort:" + "".join(rng.choices("abcdef", k=40 + i)))
            answers = [ascii_tokens("".join(sorted(rng.choices("abcdef", k=12)))) for _ in "1234"]
            sample, mask = (
                shared_prefix_sample(prompt, answers, align=16),
                shared_prefix(),
            )
        else:
            chat = sums_chat(rng, 4 + i // 2)
            sample = conversation(chat, ascii_tokens, strip="exact", template=template)
            mask = shared_prefix()
        epoch.append((pack([sample], pad_to_multiple_of=BLOCK), mask))
    before = MASKS.stats
    losses = train(model, lambda step: epoch[step % len(epoch)], args.steps)
    after = MASKS.stats
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return {
        "first_loss": losses[0],
        "last_loss": sum(losses[-8:]) / 8,
        "mask_hits": hits,
        "mask_misses": misses,
        "hit_rate": hits / (hits + misses),
    }


def at_inference(batch: PackedBatch) -> PackedBatch:
    """One copy of each token, with the positions that a turn has at inference: those of a history
    without thinking, then its own. One conversation a row."""
    segments = batch.segments
    kept = (segments.role_ids != Role.THINK).int()
    position = torch.arange(segments.seqlen).expand_as(kept)
    first = (segments.turn_ids[:, :, None] > segments.turn_ids[:, None]).sum(-1)
    before = torch.cat([torch.zeros_like(kept[:, :1]), kept.cumsum(1)], 1).gather(1, first)
    ids = (before + position - first).int()
    return replace(batch, segments=replace(segments, position_ids=ids))


def run_history(args: argparse.Namespace) -> dict[str, object]:
    """All layouts on the same conversations; judged by one pass a turn, as inference runs."""
    template = Template(header="{role[0]}:", footer="\n")
    held_out = [sums_chat(random.Random(10_000 + i), args.turns) for i in range(32)]
    turns = [s for chat in held_out for s in passes(chat, ascii_tokens, template=template)]
    judged = pack(turns, seqlen=max(len(s) for s in turns)), causal()
    rows: list[dict[str, object]] = []
    for seed in range(args.seeds):
        for way, mask in (
            ("exact", shared_prefix()),
            ("mask", strip_history_thinking()),
            ("mask, positions of inference", strip_history_thinking()),
        ):
            torch.manual_seed(seed)
            model = TinyLlama(Config()).to(args.device)
            tokens = 0

            def batches(
                step: int, way: str = way, mask: Mask = mask, seed: int = seed
            ) -> tuple[PackedBatch, Mask]:
                nonlocal tokens
                rng = random.Random(1_000_003 * seed + step)
                samples = [
                    conversation(
                        sums_chat(rng, args.turns),
                        ascii_tokens,
                        strip="exact" if way == "exact" else "mask",
                        template=template,
                    )
                    for _ in range(args.chats)
                ]
                batch = pack(samples, seqlen=max(len(s) for s in samples))
                tokens += batch.input_ids.numel()
                return (at_inference(batch) if "positions" in way else batch), mask

            start = now(model)
            losses = train(model, batches, args.steps)
            seconds = now(model) - start
            with torch.no_grad():
                loss = float(loss_sum(model, *judged)) / judged[0].loss_targets.numel()
            rows.append(
                {
                    "way": way,
                    "seed": seed,
                    "training_loss": sum(losses[-10:]) / 10,
                    "loss_at_inference": loss,
                    "tokens": tokens,
                    "seconds": seconds,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return {"history": rows}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description="Packed training with block masks.")
    parser.add_argument("what", choices=["same", "train", "history"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"],
                        help="of `same` (default: float64)")  # fmt: skip
    parser.add_argument("--layers", type=positive, default=2, help="of `same` (default: 2)")
    parser.add_argument("--dim", type=positive, default=64, help="of `same` (default: 64)")
    parser.add_argument("--heads", type=positive, default=4, help="of `same`; half for k, v (4)")
    parser.add_argument("--prefix", type=positive, default=512, help="tokens (default: 512)")
    parser.add_argument("--suffix", type=positive, default=64, help="tokens (default: 64)")
    parser.add_argument("--suffixes", type=positive, default=8, help="how many (default: 8)")
    parser.add_argument("--turns", type=positive, default=6, help="of a conversation (default: 6)")
    parser.add_argument("--rounds", type=positive, default=5, help="timed rounds (default: 5)")
    parser.add_argument("--steps", type=positive, default=200, help="of training (default: 200)")
    parser.add_argument(
        "--chats", type=positive, default=8, help="a step of `history` (default: 8)"
    )
    parser.add_argument("--seeds", type=positive, default=3, help="of `history` (default: 3)")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here")
    run = {"same": run_same, "train": run_train, "history": run_history}[args.what]
    return run(args)


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
