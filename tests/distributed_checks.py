"""The checks that `test_distributed` runs in every process of a group: results have to equal those of one process.

Run it as a script with a folder, a world size, a device type and the names of checks. Rank 0 writes `results.json`,
{check: error or ""}.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

R = Replicate()
CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}
# Checks that compile the same kernels, by the name that they share: they run in one group of processes.
PARTS: dict[str, list[str]] = {}


def check(fn: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS[fn.__name__] = fn
    PARTS[fn.__name__] = [fn.__name__]
    return fn


def ops_of(mesh: DeviceMesh) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Return each operator as a function of tensors that may all be sharded, and example tensors."""
    from sparse_inductor import ops

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape).to(mesh.device_type)
    attend = lambda q, k, v, bias, alpha: ops.entmax_attention(q, k, v, alpha, bias=bias)
    alpha = torch.full((4, 1, 1), 1.5, device=mesh.device_type)
    q, k, v = draw(3, 4, 5, 8), draw(3, 2, 7, 8), draw(3, 2, 7, 8)

    def topk(x, encoder, decoder):
        return ops.sparse_decode(*ops.topk_encode(x, encoder, k=3), decoder)

    def batch_topk(x, encoder, decoder):
        entries = ops.batch_topk_encode(x, encoder, k=9)
        return ops.batch_topk_decode(*entries, decoder, sizes=x.shape[:1])

    return {
        "splade_head": (
            ops.splade_head,
            (draw(5, 6, 8), draw(11, 8), draw(11), draw(5, 6) > -0.5),
        ),
        "entmax": (lambda x: ops.entmax(x, 1.5, -1), (draw(4, 6, 8),)),
        "entmax_attention": (attend, (q, k, v, draw(1, 4, 5, 7), alpha)),
        "sparse_scores": (
            lambda query, ids, values: ops.sparse_scores(query, ids, values),
            (draw(5, 20), torch.randint(0, 20, (9, 4)).to(mesh.device_type), draw(9, 4).detach()),
        ),
        "relu_ffn": (
            lambda x, gate, up, down: ops.relu_ffn(x, gate, down, up),
            (draw(5, 3, 8), draw(12, 8), draw(12, 8), draw(8, 12)),
        ),
        "topk": (topk, (draw(5, 8), draw(12, 8), draw(12, 8))),
        "batch_topk": (batch_topk, (draw(4, 8), draw(12, 8), draw(12, 8))),
    }


# Placements of the tensors and the placement that the result must have. Work is distributed where that is possible.
SHARDED = {
    "splade_head": [
        ([R, R, R, R], R),
        ([Shard(0), R, R, Shard(0)], Shard(0)),  # over the batch, in uneven shards
        ([R, Shard(0), Shard(0), R], Shard(1)),  # over the vocabulary
        ([Shard(1), R, R, Shard(1)], R),  # a sharded sequence is gathered
        ([Shard(2), Shard(1), R, R], R),
    ],
    "entmax": [([Shard(0)], Shard(0)), ([Shard(1)], Shard(1)), ([Shard(2)], R)],
    "entmax_attention": [
        ([Shard(0), Shard(0), Shard(0), R, R], Shard(0)),
        ([Shard(1), Shard(1), Shard(1), Shard(1), Shard(0)], Shard(1)),  # over the heads
        ([Shard(2), Shard(2), Shard(2), R, R], R),
    ],
    "sparse_scores": [
        ([Shard(0), R, R], Shard(0)),  # over the queries
        ([R, Shard(0), Shard(0)], R),  # sharded documents are gathered
    ],
    "relu_ffn": [
        ([Shard(0), R, R, R], Shard(0)),
        ([R, Shard(0), Shard(0), Shard(1)], Partial()),  # over the neurons, by column and by row
        ([Shard(2), R, R, R], R),
    ],
    "topk": [([Shard(0), R, R], Shard(0)), ([R, Shard(0), Shard(1)], R)],
    # DTensor flattens a product that is sharded evenly over its rows, as this operator does.
    "batch_topk": [([Shard(0), R, R], R), ([R, R, Shard(1)], R)],
}


def sharded_operator(op: str, compiled: bool, mesh: DeviceMesh) -> None:
    fn, tensors = ops_of(mesh)[op]
    whole = [leaf(t, op) for t in tensors]
    wanted = fn(*whole)
    cotangent = torch.randn_like(wanted)
    wanted.backward(cotangent)
    for placements, result in SHARDED[op]:
        torch._dynamo.reset()
        parts = [leaf(distribute_tensor(t, mesh, [p]), op) for t, p in zip(tensors, placements)]
        program = torch.compile(fn, backend="aot_eager") if compiled else fn
        got = program(*parts)
        assert got.placements == (result,), (placements, got.placements)
        got.backward(distribute_tensor(cotangent, mesh, [R]))
        close(got.full_tensor(), wanted)
        for mine, theirs in zip(parts, whole):
            if theirs.grad is not None:
                close(mine.grad.full_tensor(), theirs.grad)
        with torch.inference_mode():
            parts = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements)]
            close(fn(*parts).full_tensor(), wanted)


for _op in SHARDED:
    PARTS[_op] = [f"{_op}_eager", f"{_op}_compiled"]
    for _name in PARTS[_op]:
        CHECKS[_name] = functools.partial(sharded_operator, _op, _name.endswith("compiled"))


def leaf(t: Tensor, op: str = "") -> Tensor:
    # Document weights of sparse_scores have no gradient.
    learns = t.is_floating_point() and not (op == "sparse_scores" and t.shape[0] == 9)
    return t.detach().clone().requires_grad_(learns)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@check
def a_mesh_of_two_dimensions(mesh: DeviceMesh) -> None:
    """Data and tensor parallelism on a mesh [1, world size]."""
    fn, (hidden, weight, bias, mask) = ops_of(mesh)["splade_head"]
    wide = DeviceMesh(mesh.device_type, mesh.mesh.reshape(1, -1), mesh_dim_names=("dp", "tp"))
    got = fn(
        distribute_tensor(hidden, wide, [Shard(0), R]),
        distribute_tensor(weight, wide, [R, Shard(0)]),
        distribute_tensor(bias, wide, [R, Shard(0)]),
        distribute_tensor(mask, wide, [Shard(0), R]),
    )
    assert got.placements == (Shard(0), Shard(1)), got.placements
    close(got.full_tensor(), fn(hidden, weight, bias, mask))


@check
def posting_lists_over_the_queries(mesh: DeviceMesh) -> None:
    """Positions and weights of the queries' terms are sharded, posting lists are replicated."""
    torch.manual_seed(0)
    like = {"device": mesh.device_type}
    positions, docs = torch.randint(0, 8, (5, 3), **like), torch.randint(0, 9, (8, 4), **like)
    weights, values = torch.rand(5, 3, 1, **like), torch.rand(8, 4, **like)
    mask = torch.rand(5, 3, 4, **like) < 0.8
    import sparse_inductor.ops  # noqa: F401, which defines the operators

    postings = torch.ops.sparse_inductor.sparse_scores_postings
    best = torch.ops.sparse_inductor.sparse_scores_postings_topk
    tensors = positions, weights, mask, docs, values
    for spread, result in (
        ([Shard(0), Shard(0), Shard(0), R, R], Shard(0)),
        ([R, R, R, R, R], R),
        ([R, R, R, Shard(0), Shard(0)], R),  # sharded lists are gathered
    ):
        parts = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, spread)]
        for program in (postings, torch.compile(postings, backend="aot_eager")):
            torch._dynamo.reset()
            got = program(*parts, 9)
            assert got.placements == (result,), (spread, got.placements)
            close(got.full_tensor(), postings(*tensors, 9))
        for mine, whole in zip(best(*parts, 9, 3), best(*tensors, 9, 3)):
            assert mine.placements == (result,), (spread, mine.placements)
            assert torch.equal(mine.full_tensor(), whole)


@check
def a_plain_tensor_among_dtensors_is_an_error(mesh: DeviceMesh) -> None:
    fn, (hidden, weight, bias, mask) = ops_of(mesh)["splade_head"]
    try:
        fn(distribute_tensor(hidden, mesh, [R]), weight, bias, mask)
    except TypeError as error:
        assert "got both" in str(error), error
    else:
        raise AssertionError("it was accepted")


# Whole models


def models(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """Return the reference model, an equal one to distribute, and a batch for all processes."""
    from programs import batch, encoder

    whole, spread = encoder().to(mesh.device_type), encoder().to(mesh.device_type)
    return whole, spread, tuple(t.to(mesh.device_type) for t in batch(4, 9))


def rewritten() -> set[str]:
    import sparse_inductor

    return {r.pattern for r in sparse_inductor.report().rewrites}


def assert_gradients(spread: nn.Module, whole: nn.Module) -> None:
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in spread.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(
            grad, theirs[name.removeprefix("module.")], atol=2e-5, rtol=1e-4, msg=name
        )


def mine(mesh: DeviceMesh, t: Tensor) -> Tensor:
    return t.chunk(mesh.size())[mesh.get_local_rank()]


@check
def ddp(mesh: DeviceMesh) -> None:
    whole, spread, args = models(mesh)
    model = torch.compile(DistributedDataParallel(spread))
    model(*(mine(mesh, t) for t in args)).square().mean().backward()
    whole(*args).square().mean().backward()
    assert rewritten() == {"splade_head", "entmax_attention"}, rewritten()
    assert_gradients(spread, whole)


@check
def fsdp2(mesh: DeviceMesh) -> None:
    whole, spread, args = models(mesh)
    fully_shard(spread.attention, mesh=mesh)
    fully_shard(spread, mesh=mesh)
    model = torch.compile(spread)
    model(*(mine(mesh, t) for t in args)).square().mean().backward()
    whole(*args).square().mean().backward()
    assert rewritten() == {"splade_head", "entmax_attention"}, rewritten()
    assert all(isinstance(p.grad, DTensor) for p in spread.parameters())
    assert_gradients(spread, whole)


@check
def tensor_parallel(mesh: DeviceMesh) -> None:
    """Heads and vocabulary are sharded by torch's own plans, with local tensors between the modules."""
    whole, spread, args = models(mesh)
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "decoder": ColwiseParallel()}
    parallelize_module(spread, mesh, plan)
    values = torch.compile(spread)(*args)
    wanted = whole(*args)
    close(values, part(mesh, wanted))
    values.square().sum().backward()
    wanted.square().sum().backward()
    assert rewritten() == {"splade_head", "entmax_attention"}, rewritten()
    assert_gradients(spread, whole)


def part(mesh: DeviceMesh, t: Tensor) -> Tensor:
    """Return this process's columns."""
    return distribute_tensor(t.detach(), mesh, [Shard(1)]).to_local()


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(8, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


@check
def a_feed_forward_block_by_column_and_by_row(mesh: DeviceMesh) -> None:
    """Neurons are sharded by torch's plans, with local tensors between the projections: results are partial sums."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for bias in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        whole = Block(bias).to(mesh.device_type)
        spread = copy.deepcopy(whole)
        parallelize_module(spread, mesh, plan)
        x = torch.randn(2, 5, 8).to(mesh.device_type)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        values, wanted = torch.compile(spread)(mine), whole(theirs)
        close(values, wanted)
        values.square().sum().backward()
        wanted.square().sum().backward()
        assert rewritten() == {"relu_ffn"}, rewritten()
        assert_gradients(spread, whole)
        close(mine.grad, theirs.grad)


@check
def residual_of_a_block(mesh: DeviceMesh) -> None:
    """Work is sharded over the tokens only: if neurons were sharded, each process would add the residual."""
    block, (x, gate, up, down) = ops_of(mesh)["relu_ffn"]
    with_residual = lambda x, gate, up, down, r: torch.ops.sparse_inductor.relu_ffn(
        x, gate, None, up, None, down, None, None, None, "relu", "", False, False, r
    )[0]
    r = torch.randn_like(x)
    with torch.no_grad():
        wanted = r + block(x, gate, up, down)
        for of_x, of_gate, of_down in (
            (Shard(0), R, R),
            (R, Shard(0), Shard(1)),
            (R, R, R),
        ):
            spread = [
                distribute_tensor(t.detach(), mesh, [p])
                for t, p in ((x, of_x), (gate, of_gate), (up, of_gate), (down, of_down), (r, of_x))
            ]
            got = with_residual(*spread)
            assert not got.placements[0].is_partial()
            close(got.full_tensor(), wanted)


@check
def tensor_parallel_on_dtensors(mesh: DeviceMesh) -> None:
    """The head alone has DTensors as its inputs and its result."""
    whole, spread, (ids, mask) = models(mesh)
    parallelize_module(spread.decoder, mesh, ColwiseParallel(use_local_output=False))

    def program(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = spread.body(ids, mask)
        return spread.head(hidden, DTensor.from_local(mask, mesh, [R]))

    values = torch.compile(program)(ids, mask)
    wanted = whole(ids, mask)
    assert values.placements == (Shard(1),), values.placements
    close(values.full_tensor(), wanted)
    values.full_tensor().square().sum().backward()
    wanted.square().sum().backward()
    assert rewritten() == {"splade_head", "entmax_attention"}, rewritten()
    assert_gradients(spread, whole)


@check
def a_sharded_sequence(mesh: DeviceMesh) -> None:
    """Sequence parallel before the head: torch's plan gathers the sequence, and the head is rewritten after that."""
    whole, spread, (ids, mask) = models(mesh)
    ids, mask = ids[:, :8], mask[:, :8]
    parallelize_module(spread.decoder, mesh, ColwiseParallel(input_layouts=Shard(1)))
    hidden = whole.body(ids, mask).detach()
    values = torch.compile(spread.head)(hidden.chunk(mesh.size(), 1)[mesh.get_local_rank()], mask)
    close(values, part(mesh, whole.head(hidden, mask)))
    assert rewritten() == {"splade_head"}, rewritten()


# The group


def run(rank: int, world: int, folder: str, device: str, checks: list[str]) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, meeting = "nccl" if device == "cuda" else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    import sparse_inductor

    sparse_inductor.enable()
    results = {}
    for name in checks:
        torch._dynamo.reset()
        sparse_inductor.report().clear()
        said = ""
        try:
            CHECKS[name](mesh)
        except Exception:
            said = traceback.format_exc()
            said += f"\n{sparse_inductor.report()}"
        everybodys = [""] * world
        dist.all_gather_object(everybodys, said)
        results[name] = "\n".join(s for s in everybodys if s)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, world, device, *checks = sys.argv[1:]
    mp.spawn(run, (int(world), folder, device, checks), int(world))
