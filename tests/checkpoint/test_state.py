import copy

import pytest
import torch
from torch import nn

from lightning_bigmodel.checkpoint import (
    load_model_state,
    load_optimizer_state,
    model_state_by_name,
    optimizer_state_by_name,
)
from tests.checkpoint.pipe_model import keep_only, make_net, make_optimizer, names_of, owned_by, same, train


def test_all_names_of_the_plain_state_dict() -> None:
    """A tied name, a buffer or an extra state left out would make the strict load of a converted file fail."""
    net = make_net()
    assert same(model_state_by_name(net, None), dict(net.state_dict()))
    assert list(model_state_by_name(net)) == list(net.state_dict())


@pytest.mark.parametrize("owned", [{"head.weight"}, {"embedding.weight"}])
def test_one_name_of_a_tied_parameter_stands_for_both(owned: set[str]) -> None:
    """The owner of the head would save `head.weight` alone, and nobody `embedding.weight`."""
    assert set(model_state_by_name(make_net(), owned)) == {"embedding.weight", "head.weight"}
    net, other = make_net(0), make_net(1)
    load_model_state(other, {name: model_state_by_name(net)[name] for name in owned}, owned)
    assert same(other.head.weight, net.head.weight)


def test_parameter_without_memory_is_refused() -> None:
    """A wrong set of owned names would write NaN over trained weights without a word."""
    net = make_net()
    keep_only(net, {"body.weight"})
    assert set(model_state_by_name(net, {"body.weight"})) == {"body.weight"}
    with pytest.raises(ValueError, match="`body.bias`, which hold no memory"):
        model_state_by_name(net, {"body.weight", "body.bias"})


def test_unknown_owned_name_is_named_with_the_nearest() -> None:
    """A typo must not save less in silence."""
    with pytest.raises(ValueError, match=r"`body.wieght` \(nearest: `body.weight`\)"):
        model_state_by_name(make_net(), {"body.wieght"})


def test_load_copies_in_place_and_converts() -> None:
    """Replaced tensors would leave the optimizer with the old ones; the dtype is the module's."""
    source, target = make_net(0), make_net(1)
    source.seen = {"words": 7}
    tensors = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in model_state_by_name(source).items()
    }
    tensors["body.weight"] = tensors["body.weight"].double()
    parameters = dict(target.named_parameters())
    keys = {name: (id(parameter), parameter.data_ptr()) for name, parameter in parameters.items()}
    load_model_state(target, tensors)
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()} == keys
    assert target.seen == {"words": 7}
    assert target.head.weight is target.embedding.weight


def test_load_of_a_part_leaves_the_rest() -> None:
    """A stage that wrote into parameters it does not own would give them memory, or fail on expanded tensors."""
    source, target = make_net(0), make_net(1)
    owned = owned_by(1, 2)
    keep_only(target, owned)
    load_model_state(target, model_state_by_name(source, owned), owned)
    assert same(model_state_by_name(target, owned), model_state_by_name(source, owned))
    others = [p for name, p in target.named_parameters() if name not in owned and p.numel() > 1]
    assert others
    assert all(not any(p.stride()) and p.isnan().all() for p in others)


def test_load_names_every_misfit_and_copies_nothing() -> None:
    """An error after half of the copies would leave a module of two checkpoints."""
    net = make_net()
    before = copy.deepcopy(dict(net.state_dict()))
    tensors = model_state_by_name(make_net(1))
    tensors["body.bias"] = torch.zeros(5)
    tensors["body.weigth"] = tensors.pop("body.weight")
    with pytest.raises(ValueError, match="does not fit Net") as error:
        load_model_state(net, tensors)
    assert "missing `body.weight` (nearest: `body.weigth`)" in str(error.value)
    assert "not in the module `body.weigth` (nearest: `body.weight`)" in str(error.value)
    assert "`body.bias` has shape [5] in the checkpoint and shape [4] in the module" in str(error.value)
    assert same(dict(net.state_dict()), before)
    with pytest.raises(ValueError, match="not owned by this rank `body.weight`"):
        load_model_state(net, model_state_by_name(make_net(1), {"body.weight", "body.bias"}), {"body.bias"})


class Versioned(nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:  # type: ignore[no-untyped-def]
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_versions_of_modules_are_kept() -> None:
    """Without its version a module takes the state for a legacy one and rewrites it."""
    module = Versioned()
    load_model_state(module, dict(model_state_by_name(Versioned())))
    assert module.weight.tolist() == [1.0, 1.0]
    load_model_state(module, model_state_by_name(Versioned()))
    assert module.weight.tolist() == [1.0, 1.0]


def test_reading_before_the_first_step_changes_nothing() -> None:
    """A dummy step to fill the state moves Adam's step count and every later update."""
    plain, read = make_net(), make_net()
    plain_optimizer, read_optimizer = make_optimizer(plain), make_optimizer(read)
    state = optimizer_state_by_name(read_optimizer, names_of(read))
    assert state["state"] == {}
    assert len(read_optimizer.state) == 0
    load_optimizer_state(read_optimizer, state, names_of(read))
    assert len(read_optimizer.state) == 0
    train(plain, plain_optimizer, range(3))
    train(read, read_optimizer, range(3))
    assert same(dict(plain.state_dict()), dict(read.state_dict()))
    assert read_optimizer.state[read.body.weight]["step"].item() == 3


def test_state_and_options_go_by_name_whatever_the_order() -> None:
    """By position, moments and learning rates would land on other parameters."""
    net = make_net()
    optimizer = make_optimizer(net)
    train(net, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.5
    saved = copy.deepcopy(optimizer_state_by_name(optimizer, names_of(net)))
    other = make_net(1)
    fresh = make_optimizer(other)
    # Groups, and parameters within each, in the opposite order.
    fresh.param_groups.reverse()
    for group in fresh.param_groups:
        group["params"].reverse()
    load_optimizer_state(fresh, saved, names_of(other))
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.5]
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.01, 0.0]
    assert same(optimizer_state_by_name(fresh, names_of(other))["state"], saved["state"])
    assert other.unused.weight not in fresh.state
    load_model_state(other, model_state_by_name(net))
    train(net, optimizer, range(3, 5))
    train(other, fresh, range(3, 5))
    assert same(dict(net.state_dict()), dict(other.state_dict()))


def test_only_owned_state_is_read_and_loaded() -> None:
    """A stage that kept state of other stages' parameters would save stale moments under their names."""
    net = make_net()
    optimizer = make_optimizer(net)
    train(net, optimizer, range(2))
    owned = {"body.weight", "scale", "unused.weight"}
    saved = optimizer_state_by_name(optimizer, names_of(net), owned)
    assert set(saved["state"]) == {"body.weight", "scale"}
    groups = [set(group["params"]) for group in saved["param_groups"]]
    assert "embedding.weight" in groups[1]
    assert "body.bias" in groups[0]
    fresh = make_optimizer(net)
    load_optimizer_state(fresh, optimizer_state_by_name(optimizer, names_of(net)), names_of(net), owned)
    assert set(fresh.state) == {net.body.weight, net.scale}


def test_first_gradient_after_a_resume_starts_at_step_one() -> None:
    """A parameter that never had a gradient must resume as in a fresh optimizer."""
    net = make_net()
    optimizer = make_optimizer(net)
    train(net, optimizer, range(3))
    fresh = make_optimizer(net)
    load_optimizer_state(fresh, optimizer_state_by_name(optimizer, names_of(net)), names_of(net))
    net.unused.weight.grad = torch.ones(4, 4)
    fresh.step()
    assert fresh.state[net.unused.weight]["step"].item() == 1


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}])
def test_steps_keep_the_conventions_of_torch(options: dict[str, bool]) -> None:
    """A `step` cast to bfloat16 stops counting at 256, and a fused step wants float32 beside its parameter."""
    net = make_net()
    optimizer = make_optimizer(net, **options)
    train(net, optimizer, range(2))
    plain = make_optimizer(net, **options)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours = make_optimizer(net, **options)
    load_optimizer_state(ours, optimizer_state_by_name(optimizer, names_of(net)), names_of(net))
    assert ours.state[net.low.weight]["step"].dtype == torch.float32
    assert ours.state[net.low.weight]["exp_avg"].dtype == torch.bfloat16
    assert same(
        {names_of(net)[id(p)]: s for p, s in ours.state.items()},
        {names_of(net)[id(p)]: s for p, s in plain.state.items()},
    )


def test_named_parameters_and_other_kinds_of_state() -> None:
    """The names torch copies into groups must not come back in a stale order; a plain number must stay one."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.named_parameters(), lr=0.1, momentum=0.9)
    layer.weight.grad = torch.ones(2, 2)
    optimizer.step()
    optimizer.state[layer.weight]["count"] = 3
    saved = optimizer_state_by_name(optimizer, names_of(layer))
    assert "param_names" not in saved["param_groups"][0]
    fresh = torch.optim.SGD(reversed(list(layer.named_parameters())), lr=0.1, momentum=0.9)
    load_optimizer_state(fresh, saved, names_of(layer))
    assert fresh.param_groups[0]["param_names"] == ["bias", "weight"]
    assert type(fresh.state[layer.weight]["count"]) is int
    assert same(optimizer_state_by_name(fresh, names_of(layer))["state"], saved["state"])


def test_other_groups_are_refused_by_name() -> None:
    """Options of a group cannot be restored to parameters that are grouped otherwise."""
    net = make_net()
    saved = optimizer_state_by_name(make_optimizer(net), names_of(net))
    one_group = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="Group 0 of AdamW .* only the present group has: `body.weight`"):
        load_optimizer_state(one_group, saved, names_of(net))
    with pytest.raises(ValueError, match=r"1 more group\(s\) than AdamW, with `body.weight`"):
        load_optimizer_state(torch.optim.AdamW(make_optimizer(net).param_groups[:1]), saved, names_of(net))


def test_foreign_parameter_and_shared_state_are_refused() -> None:
    """State that belongs to no parameter of the module has no rank to be saved by."""
    net = make_net()
    stranger = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"shape \[7\] that the module does not have"):
        optimizer_state_by_name(torch.optim.SGD([stranger]), names_of(net))
    optimizer = make_optimizer(net)
    optimizer.state["shared"] = {"count": 1}  # type: ignore[index]
    with pytest.raises(ValueError, match="keeps state under 'shared'"):
        optimizer_state_by_name(optimizer, names_of(net))
