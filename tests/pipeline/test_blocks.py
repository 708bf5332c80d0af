"""Where a model may be cut: chains found in the module tree, names and patterns, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from lightning_bigmodel.pipeline.blocks import check_blocks, find_units


class Block(nn.Module):
    """A composite block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


class Root(nn.Module):
    """Holds whatever it is given by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def blocks(count: int = 4) -> nn.ModuleList:
    """A list of composite blocks."""
    return nn.ModuleList(Block() for _ in range(count))


def found(root: nn.Module, names: str | Sequence[str] = "auto", num_stages: int = 2, order: Any = None) -> list[str]:
    """Names of the blocks of a model whose modules are called in the order of the tree."""
    called = order or [module for module in root.modules() if not isinstance(module, nn.ModuleList)]
    tree = find_units(root, called, names, num_stages)
    return [tree.names[block] for block in tree.blocks]


def test_chains_at_any_depth_are_found() -> None:
    """A model whose blocks sit below a wrapper, as those of transformers do."""
    root = Root(model=Root(embed=nn.Embedding(3, 2), encoder=Root(layers=blocks())), head=nn.Linear(2, 2))
    assert found(root) == [f"model.encoder.layers.{index}" for index in range(4)]


def test_two_chains_are_one_order_of_cuts() -> None:
    """An encoder and its decoder: only one of them found would leave the other on a single stage."""
    root = Root(encoder=blocks(2), decoder=blocks(2))
    assert found(root) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_blocks_follow_the_order_of_calls_not_of_names() -> None:
    """Layers called in reverse would be cut so that values run backwards."""
    root = Root(layers=blocks())
    order = [module for block in reversed(list(root.layers)) for module in block.modules()]
    assert found(root, order=order) == ["layers.3", "layers.2", "layers.1", "layers.0"]


def test_siblings_of_one_class_are_a_chain() -> None:
    """Blocks as attributes `block1` to `block4` instead of a list."""
    root = Root(stem=nn.Linear(2, 2), **{f"block{index}": Block() for index in range(1, 5)})
    assert found(root)[-4:] == ["block1", "block2", "block3", "block4"]


def test_coarse_chains_give_way_to_finer_ones() -> None:
    """Two stages of two blocks each (Swin) cannot fill four pipeline stages unless they are opened."""
    stages = nn.ModuleList(Root(blocks=blocks(2)) for _ in range(2))
    assert len(found(Root(stages=stages), num_stages=4)) == 4


def test_modules_around_the_blocks_are_units_but_no_cuts() -> None:
    """An embedding or a head taken for a place to cut, or left to no stage."""
    root = Root(embed=nn.Embedding(3, 2), layers=blocks(), norm=nn.LayerNorm(2))
    tree = find_units(root, list(root.modules()), "auto", 2)
    assert [tree.names[module] for module in tree.candidates] == ["embed", *[f"layers.{i}" for i in range(4)], "norm"]
    assert len(tree.blocks) == 4


def test_patterns_match_segment_by_segment() -> None:
    """`layers.*` that reaches into a layer would cut inside of it."""
    root = Root(layers=blocks(), extra=nn.Linear(2, 2))
    assert found(root, ["layers.*"]) == [f"layers.{index}" for index in range(4)]
    assert found(root, "layers.[02]") == ["layers.0", "layers.2"]
    assert found(root, ["layers.*.second"], 3) == [f"layers.{index}.second" for index in range(4)]


@pytest.mark.parametrize(
    ("names", "num_stages", "parts"),
    [
        (["layer.*"], 2, ["'layer.*'", "Nearest names: 'layers."]),
        (["layers"], 2, ["'layers'", "is called in a step"]),
        (["layers.*", "layers.0.first"], 2, ["'layers.0'", "'layers.0.first'", "one level only"]),
        (["layers.0", "layers.1"], 4, ["needs 4 pipeline stages", "only 2 blocks", "layers.0, layers.1"]),
        ("auto", 64, ["needs 64 pipeline stages", "Lower `pipeline_parallel_size`"]),
    ],
)
def test_names_that_do_not_fit_are_refused(names: Any, num_stages: int, parts: list[str]) -> None:
    """A typo that silently cuts elsewhere, or an error that does not tell what to write instead."""
    with pytest.raises(ValueError, match="Name|name") as caught:
        found(Root(layers=blocks()), names, num_stages)
    for part in parts:
        assert part in str(caught.value)


def test_a_block_called_twice_is_refused() -> None:
    """Weights shared over depth (ALBERT): the block would be on two stages at once."""
    root = Root(layers=blocks())
    order = [*root.layers, root.layers[1]]
    with pytest.raises(ValueError, match=r"`layers.1` \(Block\) is called 2 times in one step"):
        found(root, ["layers.*"], order=order)


def test_no_chain_names_what_was_looked_for() -> None:
    """A message without the model's own names leaves the reader to guess."""
    with pytest.raises(ValueError, match="found no chain of blocks") as caught:
        found(Root(only=nn.Linear(2, 2)))
    assert "only (Linear)" in str(caught.value)


@pytest.mark.parametrize(("value", "error"), [(3, TypeError), ([1], TypeError), (None, TypeError), ([], ValueError)])
def test_settings_of_another_kind_are_refused(value: Any, error: type[Exception]) -> None:
    """A number or an empty list would fail much later, at the first name."""
    with pytest.raises(error, match="`blocks="):
        check_blocks(value)
