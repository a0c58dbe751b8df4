"""Differentiable collectives: what goes one way in the forward comes back in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, join: int, group: Group) -> torch.Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _exchange(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchange(grads[0], ctx.join, ctx.split, ctx.group), None, None, None


def all_to_all(x: torch.Tensor, split: int, join: int, group: Group) -> torch.Tensor:
    """Split dimension `split` between ranks, and join theirs along `join`."""
    out: torch.Tensor = _AllToAll.apply(x, split, join, group)  # type: ignore[no-untyped-call]
    return out


def _exchange(x: torch.Tensor, split: int, join: int, group: Group) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    sent = torch.stack(x.chunk(ranks, split)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received.unbind(0)), join)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, x.contiguous(), group=group)
        return torch.cat(shards, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # A sum and a slice: gloo has no reduce-scatter of tensors.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return total.chunk(ranks, 1)[rank].contiguous(), None


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[batch, seqlen, ...] of all ranks, joined along the sequence; gradients are summed."""
    out: torch.Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _pass_on(x, 1, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _pass_on(grads[0], -1, ctx.group), None


def rotate(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The previous rank's tensor; ours goes to the next one."""
    out: torch.Tensor = _Rotate.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _pass_on(x: torch.Tensor, step: int, group: Group) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if ranks == 1:
        return x.clone()
    there, here = ((rank + s) % ranks for s in (step, -step))
    if group is not None:
        there, here = (dist.get_global_rank(group, r) for r in (there, here))
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, x, there, group=group),
        dist.P2POp(dist.irecv, received, here, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *(torch.zeros_like(t) for t in ctx.saved_tensors)


def touch(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """x; the others get a zero gradient, so that their part of the backward runs."""
    out: torch.Tensor = _Touch.apply(x, *others)  # type: ignore[no-untyped-call]
    return out
