"""mbarrier instructions, named barriers and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from blasst.kernels.verify.mbarrier import Mbarrier
from blasst.kernels.verify.operands import DONE, SPIN, Effect, Mask, Operands, lanes, uniform
from blasst.kernels.verify.registers import Array

if TYPE_CHECKING:
    from blasst.kernels.verify.block import Block
    from blasst.kernels.verify.warp import Warp

HERE = ("shared", "shared::cta", "b64", "release", "acquire", "relaxed", "cta", "cluster")


def mbarrier_init(ops: Operands) -> Effect:
    ops.allow(*HERE)
    place, count = ops.address(0), ops.read(1, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        counts, at = count(warp), place(warp)
        for lane in lanes(mask):
            address = int(at[lane])
            made = None if block.races is None else block.races.stamp(warp)
            name = block.region(address)
            block.mbarriers[address] = Mbarrier(name, int(counts[lane]), made=made)
        return DONE

    return run


def mbarrier_inval(ops: Operands) -> Effect:
    ops.allow(*HERE)
    place = ops.address(0)

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        for lane in lanes(mask):
            block.mbarriers.pop(int(place(warp)[lane]), None)
        return DONE

    return run


def mbarrier_arrive(ops: Operands) -> Effect:
    """arrive, arrive.expect_tx and arrive.noComplete are not the same: the last is refused."""
    ops.allow(*HERE, "expect_tx")
    transfers = "expect_tx" in ops.modifiers
    remote = ops.ins.opcode.count("shared::cluster")
    if remote:
        raise ops.unknown("barriers of other blocks of a cluster are not supported")
    has_state = not ops.ins.operands[0].startswith("[")
    place = ops.address(int(has_state))
    extra = 1 + int(has_state)
    count = ops.read(extra, "b32") if ops.count() > extra else None
    state = ops.write(0, "b64") if has_state else None

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        at = place(warp)
        clock = None if block.races is None else block.races.release(warp)
        counts = count(warp) if count else None
        if mask is not None and not transfers and (warp.touched & ~mask).any():
            block.find(
                "arrives for lanes that used shared memory since the last bar.warp.sync",
                warp,
                ops.ins,
            )
        for lane in lanes(mask):
            barrier = block.mbarrier(ops, warp, int(at[lane]))
            if state is not None:
                state(warp, mask, np.full(32, barrier.phase, np.uint64))
            if block.races is not None and clock is not None:
                block.races.use_barrier(warp, barrier, ops.ins)
                block.races.gather(barrier, clock, ops.ins)
            with block.guard(ops, warp):
                if transfers:
                    assert counts is not None
                    barrier.expect(int(counts[lane]))
                    barrier.arrive()
                else:
                    barrier.arrive(1 if counts is None else int(counts[lane]))
        return DONE

    return run


def mbarrier_expect(ops: Operands) -> Effect:
    ops.allow(*HERE)
    place, size = ops.address(0), ops.read(1, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        for lane in lanes(mask):
            block.mbarrier(ops, warp, int(place(warp)[lane])).expect(int(size(warp)[lane]))
        return DONE

    return run


def mbarrier_test(ops: Operands) -> Effect:
    """try_wait.parity and test_wait.parity; the suspend-time hint has no effect."""
    ops.allow(*HERE, "parity")
    if "parity" not in ops.modifiers:
        raise ops.unknown("only the form with .parity is supported")
    result, place, parity = ops.write(0, "pred"), ops.address(1), ops.read(2, "b32")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        at, want = place(warp), parity(warp)
        address, bit = uniform(at, mask), uniform(want, mask)
        chosen = list(lanes(mask))
        if (at[chosen] != address).any() or (want[chosen] != bit).any():
            raise ops.error(warp, "lanes of one warp wait for different phases")
        barrier = block.mbarrier(ops, warp, address)
        passed = barrier.passed(bit)
        result(warp, mask, np.full(32, passed, np.bool_))
        if block.races is not None:
            block.races.use_barrier(warp, barrier, ops.ins)
        if not passed:
            if warp.failed == ops.ins.index:
                warp.parked = barrier
                barrier.sleepers.append(warp)
                barrier.watchers[warp] = barrier.phase
            warp.failed = ops.ins.index
            return SPIN
        barrier.watchers.pop(warp, None)
        if block.races is not None:
            block.races.acquire(warp, barrier.clock, ops.ins, initial=barrier.phase == 0)
            if block.races.evidence is not None:
                block.races.evidence.observed(barrier)
        return DONE

    return run


def _named(ops: Operands, arrives_only: bool, aligned: bool) -> Effect:
    number = ops.read(0, "b32")
    threads = ops.read(1, "b32") if ops.count() > 1 else None

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if aligned and not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        active = 32 if mask is None else int(mask.sum())
        count = uniform(threads(warp), mask) if threads else block.launch.threads
        return block.meet(ops, warp, uniform(number(warp), mask), active, count, arrives_only)

    return run


def bar_sync(ops: Operands) -> Effect:
    ops.allow("cta", "aligned")
    aligned = ops.ins.opcode.startswith("bar.") or "aligned" in ops.modifiers
    return _named(ops, False, aligned)


def bar_arrive(ops: Operands) -> Effect:
    ops.allow("cta", "aligned")
    aligned = ops.ins.opcode.startswith("bar.") or "aligned" in ops.modifiers
    return _named(ops, True, aligned)


REDUCTIONS = ("and", "or", "popc")


def bar_red(ops: Operands) -> Effect:
    """bar.red.{and,or}.pred p, a{, b}, [!]c; and popc.u32 r, a{, b}, [!]c."""
    ops.allow("cta", "aligned", "pred", "u32", *REDUCTIONS)
    kind = ops.one_of(*REDUCTIONS)
    token = ops.ins.operands[-1]
    vote = ops.read(token.lstrip("!"), "pred")
    negated = token.startswith("!")
    number = ops.read(1, "b32")
    threads = ops.read(2, "b32") if ops.count() > 3 else None
    result = ops.write(0, "u32" if kind == "popc" else "pred")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if not warp.converged(mask):
            raise ops.error(warp, "lanes of the warp are not all here")
        value = ~vote(warp) if negated else vote(warp)
        chosen = value if mask is None else value[mask]
        count = uniform(threads(warp), mask) if threads else block.launch.threads

        def deliver(true_lanes: int, all_lanes: int) -> None:
            found: Array
            if kind == "popc":
                found = np.full(32, true_lanes, np.uint32)
            else:
                needed = all_lanes if kind == "and" else 1
                found = np.full(32, true_lanes >= needed, np.bool_)
            result(warp, mask, found)

        return block.meet(
            ops,
            warp,
            uniform(number(warp), mask),
            len(chosen),
            count,
            False,
            int(chosen.sum()),
            deliver,
        )

    return run


def fence_proxy(ops: Operands) -> Effect:
    """fence.proxy.async orders generic accesses before asynchronous ones of the same thread."""
    ops.allow("async", "async.shared::cta", "shared::cta", "shared::cluster", "global",
              "async::generic", "alias", "tensormap::generic", "release", "acquire", "cta", "gpu",
              "sync_restrict::shared::cta", "cluster")  # fmt: skip
    orders = "async" in ops.modifiers

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if orders and block.races is not None:
            block.races.fence(warp, ops.ins)
        return DONE

    return run


def fence_init(ops: Operands) -> Effect:
    """fence.mbarrier_init: barriers made before it can be used by the asynchronous proxy."""
    ops.allow("release", "cluster", "cta")

    def run(block: Block, warp: Warp, mask: Mask) -> int:
        if block.races is not None:
            block.races.fence(warp, ops.ins)
        return DONE

    return run


def nothing(*allowed: str) -> Callable[[Operands], Effect]:
    """An instruction without a meaning here: hints, and orders that the clocks do not need."""

    def decode(ops: Operands) -> Effect:
        ops.allow(*allowed)
        return lambda block, warp, mask: DONE

    return decode


def refuse_cluster(ops: Operands) -> Effect:
    raise ops.unknown("thread block clusters are not supported; compile for one block")


ORDERS = ("acq_rel", "sc", "cta", "cluster", "gpu", "sys", "acquire", "release", "gl", "sync")

TABLE = {
    "mbarrier.init": mbarrier_init,
    "mbarrier.inval": mbarrier_inval,
    "mbarrier.arrive": mbarrier_arrive,
    "mbarrier.expect_tx": mbarrier_expect,
    "mbarrier.try_wait": mbarrier_test,
    "mbarrier.test_wait": mbarrier_test,
    "bar.sync": bar_sync,
    "bar.cta.sync": bar_sync,
    "barrier.sync": bar_sync,
    "barrier.cta.sync": bar_sync,
    "bar.arrive": bar_arrive,
    "bar.cta.arrive": bar_arrive,
    "barrier.arrive": bar_arrive,
    "barrier.cta.arrive": bar_arrive,
    "bar.red": bar_red,
    "bar.cta.red": bar_red,
    "barrier.red": bar_red,
    "barrier.cta.red": bar_red,
    "fence.proxy": fence_proxy,
    "fence.mbarrier_init": fence_init,
    "fence": nothing(*ORDERS),
    "membar": nothing(*ORDERS),
    "griddepcontrol": nothing("wait", "launch_dependents"),  # no other kernel runs
    "barrier.cluster": refuse_cluster,
    "mapa": refuse_cluster,
    "st.async": refuse_cluster,
    "multimem": refuse_cluster,
}
