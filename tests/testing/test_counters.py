"""The counters: what they count is what happened, on real gloo ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bigmodel.testing import CollectiveCounter, ForwardCounter, run_ranks


def issue_everything() -> dict[str, tuple[int, int]]:
    rank = dist.get_rank()
    values = torch.ones(4)  # 16 bytes
    halves = torch.ones(6, dtype=torch.bfloat16)  # 12 bytes
    with CollectiveCounter() as counter:
        if rank == 0:
            dist.send(values, 1)
            dist.isend(halves, 1).wait()
        else:
            dist.recv(values, 0)
            dist.irecv(halves, 0).wait()
        both = [dist.P2POp(dist.isend, values, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        dist.all_reduce(values)
        dist.all_reduce(halves, async_op=True).wait()
        dist.all_gather([torch.empty(4), torch.empty(4)], values)
        dist.reduce_scatter(torch.empty(4), [values, values])
        dist.broadcast(values, 0)
        dist.reduce(values, 0)
        dist.gather(values, [torch.empty(4), torch.empty(4)] if rank == 0 else None, 0)
        dist.scatter(torch.empty(4), [values, values] if rank == 0 else None, 0)
        dist.all_to_all_single(torch.empty(4), values)
        dist.barrier()
    dist.all_reduce(values)  # after the end
    return counter.as_dict()


def test_each_kind_is_counted_with_its_bytes():
    """An operation that is not seen would let a test of "no more than N messages" pass whatever is sent."""
    first, second = run_ranks(issue_everything, 2)
    shared = {
        "all_gather": (1, 16),
        "all_reduce": (2, 28),
        "all_to_all": (1, 16),
        "barrier": (1, 0),
        "broadcast": (1, 16),
        "gather": (1, 16),
        "reduce": (1, 16),
        "reduce_scatter": (1, 32),
        "scatter": (1, 16),
    }
    assert first == {**shared, "send": (3, 44), "recv": (1, 16)}
    assert second == {**shared, "send": (1, 16), "recv": (3, 44)}


def send_objects() -> tuple[dict[str, tuple[int, int]], list[object]]:
    from torch.distributed import all_gather_object  # as a caller that has it by name

    rank = dist.get_rank()
    gathered: list[object] = [None, None]
    with CollectiveCounter() as counter:
        for _ in range(3):
            all_gather_object(gathered, {"rank": rank})
        dist.broadcast_object_list([rank], 0)
        if rank == 0:
            dist.send_object_list(["text"], 1)
        else:
            dist.recv_object_list([None], 0)
        dist.all_reduce(torch.ones(1))
    return counter.as_dict(), gathered


def test_objects_are_a_kind_of_their_own():
    """Pickled objects in the training step are slow; counted as broadcasts they would hide among the useful ones."""
    for counts, gathered in run_ranks(send_objects, 2):
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert set(counts) == {"object", "all_reduce"}
        assert counts["object"][0] == 5
        assert counts["object"][1] > 0
        assert counts["all_reduce"] == (1, 4)


def run_pipeline_schedule(name: str) -> dict[str, tuple[int, int]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank = dist.get_rank()
    torch.manual_seed(0)
    stage = PipelineStage(
        nn.Linear(8, 8),
        rank,
        2,
        torch.device("cpu"),
        input_args=(torch.empty(2, 8, requires_grad=rank == 1),),
        output_args=(torch.empty(2, 8, requires_grad=True),),
    )
    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name]
    schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss, scale_grads=False)
    batch = torch.ones(8, 8)
    schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))
    with CollectiveCounter() as counter:
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))
    return counter.as_dict()


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_messages_of_a_pipeline_schedule_are_seen(name):
    """Schedules hold `dist.isend` itself, so a counter that replaces it in its module would see no message."""
    micro_batch_bytes = 2 * 8 * 4
    for counts in run_ranks(run_pipeline_schedule, 2, name):
        assert counts == {"send": (4, 4 * micro_batch_bytes), "recv": (4, 4 * micro_batch_bytes)}


def train_in_parallel(how: str) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    module: nn.Module = nn.Linear(8, 8, bias=False)  # 256 bytes
    if how == "ddp":
        module = nn.parallel.DistributedDataParallel(module)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(module)
    with CollectiveCounter() as counter:
        module(torch.ones(2, 8)).sum().backward()
    return counter.as_dict()


@pytest.mark.parametrize(
    ("how", "counts"),
    [("ddp", {"all_reduce": (1, 256)}), ("fsdp", {"all_gather": (1, 128), "reduce_scatter": (1, 256)})],
)
def test_collectives_of_a_backward_are_seen(how, counts):
    """DDP and FSDP communicate from inside autograd, where no caller's line is left to watch."""
    assert run_ranks(train_in_parallel, 2, how) == [counts, counts]


def multiply_sharded() -> dict[str, tuple[int, int]]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with CollectiveCounter() as counter:
        product = rows @ rows  # gathers the second factor
    with counter:
        product.sum().redistribute(mesh, [Replicate()]).to_local()
    return counter.as_dict()


def test_collectives_inside_dtensor_are_seen():
    """A mode that handles a DTensor's operator itself never sees the collectives this issues."""
    expected = {"all_gather": (1, 32), "all_reduce": (1, 4)}
    assert run_ranks(multiply_sharded, 2) == [expected, expected]


def test_a_counter_refuses_to_count_twice():
    """Entered twice, it would count each operation double."""
    counter = CollectiveCounter()
    with counter, pytest.raises(RuntimeError, match="counting already"):
        counter.__enter__()
    with counter:
        assert counter.as_dict() == {}


def test_forwards_are_counted_by_name():
    """Recomputation doubles forwards; a counter that misses a submodule or a second call would not show it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with ForwardCounter(model) as counter:
        model(torch.ones(1, 2))
        model[1](torch.ones(1, 2))
        with pytest.raises(RuntimeError, match="counting already"):
            counter.__enter__()
    model(torch.ones(1, 2))
    assert counter.num_forwards == {"": 1, "0": 1, "1": 2, "1.0": 2, "1.1": 2}
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_count_again(use_reentrant):
    """Counting is how tests know that activations were recomputed at all."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with ForwardCounter(model) as counter:
        inputs = torch.ones(1, 2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=use_reentrant).sum().backward()
    assert counter.num_forwards[""] == 2
    assert counter.num_forwards["0"] == 2
