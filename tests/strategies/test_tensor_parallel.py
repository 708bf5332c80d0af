"""Tensor parallelism under the Trainer, alone and with every other axis: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bigmodel import BigModelStrategy
from lightning_bigmodel.strategies import tensor
from lightning_bigmodel.testing import RanksFailedError, assert_parallel_equivalent, run_ranks
from tests.strategies.test_architectures import hf
from tests.strategies.trainer_modules import trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {}),
    "tensor_microbatches": (2, {"num_microbatches": 2}),
    "tensor_replicas": (4, {}),
    "tensor_zero1": (4, {"zero_stage": 1}),
    "tensor_zero2": (4, {"zero_stage": 2, "num_microbatches": 2}),
    "tensor_zero3": (4, {"zero_stage": 3}),
    "tensor_pipe": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tensor_pipe_zero3": (8, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
}


def check(name: str, world_size: int, settings: dict[str, Any]) -> None:
    """Compare with one process."""
    module, batch, weight = hf(name, 8)
    strategy = BigModelStrategy(tensor_parallel_size=2, microbatch_weight=weight, **settings)
    report = assert_parallel_equivalent(
        module, batch, strategy, world_size=world_size, timeout_seconds=80.0, gradient_clip_val=0.05
    )
    assert report.num_parameters > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_axis_with_tensor_ranks(layout: str) -> None:
    """Gradients of replicated layers counted per tensor rank, batches that differ between them, norms of slices."""
    check("llama", *LAYOUTS[layout])


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt2", "tensor_zero3"), ("t5", "tensor_pipe"), ("vit", "tensor_zero2"), ("bert", "tensor_pipe")],
)
def test_architectures_with_tensor_ranks(name: str, layout: str) -> None:
    """Fused and biased layers, position biases, encoders cut by features and by layers."""
    check(name, *LAYOUTS[layout])


class Dropped(LightningModule):
    """Dropout on what tensor ranks share, and on their own shares of features; keeps what the masks were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(torch.initial_seed() % 1000)  # ranks whose streams are not in step
        self.norm, self.shared = nn.LayerNorm(8), nn.Dropout(0.5)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8))
        self.masks: list[Any] = []
        self.inner_masks: list[Any] = []
        self.shared.register_forward_hook(lambda _, args, out: self.masks.append((out == 0).numpy().copy()))
        self.mlp[2].register_forward_hook(
            lambda _, args, out: self.inner_masks.append(((out == 0) & (args[0] != 0)).numpy().copy())
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A sum of squares."""
        return (self.mlp(self.shared(self.norm(batch[0]))) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _dropped(num_microbatches: int) -> dict[str, Any]:
    module = Dropped()
    strategy = BigModelStrategy(
        tensor_parallel_size=2,
        tensor_plan={"mlp.0": "colwise", "mlp.3": "rowwise"},
        num_microbatches=num_microbatches,
    )
    data = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)) + 2.0
    run = trainer(strategy, 4, max_steps=50, max_epochs=None)
    run.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return {
        "masks": module.masks,
        "inner": module.inner_masks,
        "norm": [p.detach().numpy().copy() for p in module.norm.parameters()],
    }


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_masks_are_equal_where_activations_are_shared(num_microbatches: int) -> None:
    """Ranks of one layer that drop different activations; replicas, or shares of features, that drop the same ones."""
    first, second, third, _ = run_ranks(_dropped, 4, num_microbatches)
    assert len(first["masks"]) == 50 * num_microbatches
    for one, other, replica in zip(first["masks"], second["masks"], third["masks"], strict=True):
        assert (one == other).all()
        assert (one != replica).any()
    assert any((one != other).any() for one, other in zip(first["inner"], second["inner"], strict=True))
    for one, other in zip(first["norm"], second["norm"], strict=True):
        assert (one == other).all()  # to the last bit, after 50 steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"tensor_parallel_size": 2, "tensor_plan": {}}, "dict of module name patterns"),
        ({"tensor_plan": {"mlp.0": "colwise"}}, "tensor_parallel_size=1"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": "all"}, "leaves no ranks"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    """A plan that cuts nothing, or a size that is none."""
    with pytest.raises(ValueError, match=said):
        BigModelStrategy(**settings)


def _refused(settings: dict[str, Any]) -> str:
    data = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4)
    try:
        trainer(BigModelStrategy(**settings), 2).fit(Dropped(), data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 2, "tensor_plan": {"nothing": "colwise"}}, "matches no"),
        ({"tensor_parallel_size": 2, "tensor_plan": {"mlp.0": "diagonal"}}, "diagonal"),
        ({"tensor_parallel_size": 3}, "cannot be divided"),
    ],
)
def test_plans_that_do_not_fit_are_refused_on_every_rank(settings: dict[str, Any], said: str) -> None:
    """An error on one rank while the other waits."""
    answers = run_ranks(_refused, 2, settings)
    assert all(said in answer for answer in answers), answers


class Penalised(LightningModule):
    """Adds a norm of gradients to its loss: by the input, or by weights."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))
            self.head = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A critic as of a WGAN-GP; samples are kept apart, so that a batch may be split."""
        given = batch[0].requires_grad_()
        hidden = given
        for block in self.blocks:
            hidden = hidden + block(hidden)
        score = self.head(hidden)
        inputs = [given] if self.by == "input" else list(self.head.parameters())
        inputs += [*self.blocks[0].parameters()] if self.by == "slices" else []  # type: ignore[operator]
        gradients = torch.autograd.grad(score.sum(), inputs, create_graph=True)
        penalty = sum((gradient.norm(dim=-1) - 1).square().mean() for gradient in gradients)
        return score.mean() + penalty

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _penalised(by: str, layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    plan = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
    strategy = BigModelStrategy(tensor_parallel_size=2, tensor_plan=plan, **settings)
    data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(2))]
    assert_parallel_equivalent(Penalised(by), data, strategy, world_size=world_size, timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("by", "layout"),
    [
        ("input", "tensor"),
        ("input", "tensor_replicas"),
        ("input", "tensor_zero2"),
        ("input", "tensor_zero3"),
        ("weights", "tensor"),
    ],
)
def test_gradient_penalties(by: str, layout: str) -> None:
    """The second backward goes through the exchanges of the first."""
    _penalised(by, layout)


@pytest.mark.parametrize("layout", ["tensor", "tensor_zero3"])
def test_a_penalty_on_gradients_of_slices_is_refused(layout: str) -> None:
    """Its norm would be that of one rank's slice."""
    with pytest.raises(RanksFailedError, match=r"`blocks.0.0.weight`"):
        _penalised("slices", layout)


class Mixed(LightningModule):
    """Every feature meets every other between the layers of a pair; the step uses its layers itself, or a module."""

    def __init__(self, mixes: bool, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixes, self.automatic_optimization = mixes, not is_manual
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A sum of squares, twice."""
        self.num_steps += 1
        hidden = self.up(batch[0])
        loss = (self.down(hidden.softmax(-1) if self.mixes else hidden.tanh()) - self.mlp(batch[0])).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _tried(mixes: bool, settings: dict[str, Any], is_manual: bool) -> dict[str, Any]:
    said: list[str] = []
    tensor.rank_zero_info = said.append  # in a process of its own
    module = Mixed(mixes, is_manual)
    plan = {"up": "colwise", "down": "rowwise", "mlp.0": "colwise", "mlp.2": "rowwise"}
    data = DataLoader(TensorDataset(torch.randn(8, 8, generator=torch.Generator().manual_seed(0))), batch_size=4)
    run = trainer(BigModelStrategy(tensor_parallel_size=2, tensor_plan=plan, **settings), dist.get_world_size())
    torch.manual_seed(1)
    error = ""
    try:
        run.fit(module, data)
    except ValueError as refused:
        error = str(refused)
    return {
        "error": error,
        "num_steps": module.num_steps,
        "shape": list(module.up.weight.shape),
        "said": said,
    }


@pytest.mark.parametrize(("world_size", "settings"), [(2, {}), (4, {"zero_stage": 3})])
def test_a_plan_of_ones_own_that_mixes_features_is_refused(world_size: int, settings: dict[str, Any]) -> None:
    """A softmax over the features of one rank trains another model and says nothing."""
    results = run_ranks(_tried, world_size, True, settings, False)
    assert len({result["error"] for result in results}) == 1
    for result in results:
        assert "`tensor_plan` cuts 'up' (`colwise`) and 'down' (`rowwise`)" in result["error"]
        assert "mlp" not in result["error"]
        assert (result["num_steps"], result["shape"]) == (0, [16, 8])


@pytest.mark.parametrize("is_manual", [False, True])
def test_a_plan_that_is_right_or_cannot_be_tried_is_taken(is_manual: bool) -> None:
    """A right plan refused, or one taken at its word without a word."""
    first, second = run_ranks(_tried, 2, False, {}, is_manual)
    for result in (first, second):
        assert result["error"] == ""
        assert result["num_steps"] == 2  # those of the run: the trial counts on copies
    assert len(first["said"]) == int(is_manual)
    if is_manual:
        assert "manual optimization cannot run without an optimizer" in first["said"][0]


class Pooled(LightningModule):
    """A pair of layers whose halves lie in different modules, after pairs of its own in the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(2)
        )
        self.body.pooler = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Classification."""
        (x,) = batch
        for block in self.body.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        loss = self.classifier(torch.tanh(self.body.pooler(x))).logsumexp(-1).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_layer_is_paired_with_the_one_that_reads_it() -> None:
    """A pooling layer that is taken for a second half of the last block, so that its reader has none."""
    given = {
        "body.blocks.*.up": "colwise",
        "body.blocks.*.down": "rowwise",
        "body.pooler": "colwise",
        "classifier": "rowwise",
    }
    strategy = BigModelStrategy(tensor_parallel_size=2, tensor_plan=given)
    batch = [torch.randn(4, 8, generator=torch.Generator().manual_seed(1))]
    report = assert_parallel_equivalent(Pooled(), batch, strategy, world_size=2, timeout_seconds=60.0)
    assert report.num_parameters == 12
