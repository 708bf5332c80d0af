"""A small module with everything that is awkward to save, cut over ranks the way a pipeline cuts it."""

import warnings
import zlib
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Tied, frozen, never trained and bfloat16 parameters; buffers of several kinds; an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.body = nn.Linear(4, 4)
        self.low = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.seen: Any = {"words": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def names_of(net: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in net.named_parameters()}


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def make_optimizer(net: Net, **options: Any) -> torch.optim.AdamW:
    no_decay = [parameter for name, parameter in net.named_parameters() if name.endswith("bias") or name == "scale"]
    others = [p for p in net.parameters() if p.requires_grad and all(p is not other for other in no_decay)]
    return torch.optim.AdamW(
        [{"params": no_decay, "weight_decay": 0.0, "lr": 0.02}, {"params": others}], lr=0.01, **options
    )


def owned_by(stage: int, num_stages: int) -> set[str]:
    """State-dict names of a stage: neighbouring names go together, the tied weight is on the first and last stage."""
    names = list(make_net().state_dict())
    share = -(-len(names) // num_stages)
    owned = set(names[stage * share : (stage + 1) * share])
    if stage in (0, num_stages - 1):
        owned |= {"embedding.weight", "head.weight"}
    else:
        owned -= {"embedding.weight", "head.weight"}
    return owned


def keep_only(net: Net, owned: set[str]) -> None:
    """Take the memory of parameters of other stages."""
    for name, parameter in net.named_parameters():
        if name not in owned:
            parameter.data = torch.tensor(float("nan"), dtype=parameter.dtype).expand(parameter.shape)


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range, owned: set[str] | None = None) -> None:
    """Steps on gradients that depend on the name and the step alone, so that every layout sees the same."""
    for step in steps:
        for name, parameter in net.named_parameters():
            mine = owned is None or name in owned
            parameter.grad = None
            if mine and parameter.requires_grad and not name.startswith("unused"):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
        if owned is None or "norm.running_mean" in owned:
            net.norm.running_mean.add_(step)
    net.seen = {"words": steps.stop}


def same(left: Any, right: Any) -> bool:
    """Equal bit for bit, NaN and all: type, dtype, shape and values, through containers."""
    if type(left) is not type(right) and not (isinstance(left, dict) and isinstance(right, dict)):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return left.contiguous().view(-1).view(torch.uint8).equal(right.contiguous().view(-1).view(torch.uint8))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def warnings_are_errors() -> None:
    """In a rank, as pytest does outside."""
    warnings.simplefilter("error")
