"""LlamaForCausalLM in plain torch, with the attention open to replacement."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from blasst.evals.errors import InputError
from blasst.evals.retrieval_model.config import Shape, shape_of

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [B, H, T, D], k and v [B, KV, T, D] -> [B, H, T, D], causal."""


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self._eps = shape.norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self._eps)


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)
        self._head_dim = shape.head_dim
        self.attend: Attention = dense

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(*y.shape[:2], -1, self._head_dim).transpose(1, 2)

        q, k = (_rotate(heads(p(x)), cos, sin) for p in (self.q_proj, self.k_proj))
        out = self.attend(q, k, heads(self.v_proj(x)))
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape), Mlp(shape)
        self.input_layernorm, self.post_attention_layernorm = Norm(shape), Norm(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class RetrievalModel(nn.Module):
    """Names as in Hugging Face's LlamaModel; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self._blocks = [Block(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(self._blocks)
        self.norm = Norm(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * shape.layers) if last else 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [B, T] -> hidden states [B, T, hidden]."""
        x = self.embed_tokens(ids)
        cos, sin = _angles(self.shape, ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        y: torch.Tensor = self.norm(x)
        return y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embed_tokens.weight.T.to(hidden.dtype)

    def compile_blocks(self) -> None:
        """Blocks share what is compiled, once for each shape that comes."""
        torch._dynamo.config.recompile_limit = 64
        for block in self._blocks:
            block.compile(dynamic=False)

    def replace_attention(self, attend: Attention) -> None:
        for block in self._blocks:
            block.self_attn.attend = attend


def load(folder: Path) -> RetrievalModel:
    """The float32 model of an exported folder. Raises InputError when it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    model = RetrievalModel(shape_of(folder))
    weights: dict[str, torch.Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            weights |= load_file(path)
        names = {n.removeprefix("model."): w.float() for n, w in weights.items()}
        names.pop("lm_head.weight", None)
        model.load_state_dict(names)
    except (OSError, SafetensorError, RuntimeError) as e:
        raise InputError(f"{folder} does not hold the weights of its config.json: {e}") from e
    return model.eval()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _angles(shape: Shape, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.arange(0, shape.head_dim, 2, device=like.device).float() / shape.head_dim
    positions = torch.arange(length, device=like.device).float()
    angles = torch.outer(positions, shape.theta**-steps).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
