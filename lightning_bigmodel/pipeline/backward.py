"""Backward of one stage on one micro-batch: whole, or split into its input half and its weight half.

Zero-bubble schedules (arXiv 2401.10241) send the gradients of a stage's inputs on before computing those of its
weights. torch's own split counts a weight twice that several layers of a chain use (pytorch/pytorch#180952; a bias
shared by attention layers is such a weight), so the split is made here, with public autograd API only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["SplitBackward", "full_backward"]


def _roots(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def full_backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Accumulate parameter gradients and return the gradient of each input (None where there is none)."""
    tensors, seeds = _roots(outputs, gradients)
    if tensors:
        torch.autograd.backward(tensors, seeds)
    found = [tensor.grad if tensor.requires_grad else None for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return found


@dataclass
class _Group:
    """Weights whose gradients come out of the same nodes."""

    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)  # on the way to an input, with an edge towards the weights
    edges: list[GradientEdge] = field(default_factory=list)  # outputs that do not depend on any input
    seeds: list[Tensor] = field(default_factory=list)


class SplitBackward:
    """The two halves of one backward.

    Nodes between the outputs and the inputs run in the first half, which keeps what arrives at those that also lead to
    weights; the second half goes on from there. Weights that several such nodes lead to are computed together, with
    what arrives at each node held fixed, so that nothing is counted twice.

    Memory: the graph, until `weights` has run.

    Example:
        >>> x = torch.ones(1, 2, requires_grad=True); layer = nn.Linear(2, 1)
        >>> half = SplitBackward([layer(x).sum()], [torch.ones(())], [x], list(layer.parameters()))
        >>> gradients = half.inputs()   # to be sent on at once; layer.weight.grad is still None
        >>> half.weights()
        >>> layer.weight.grad
        tensor([[1., 1.]])
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._tensors, self._seeds = _roots(outputs, gradients)
        self._inputs = inputs
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._arrived: dict[Node, tuple[Tensor | None, ...]] = {}
        self._groups: list[_Group] | None = None

    def inputs(self) -> list[Tensor | None]:
        """Gradients of the inputs. Weights get none yet."""
        wanted = [tensor for tensor in self._inputs if tensor.requires_grad]
        if not self._tensors or not wanted:
            return [None] * len(self._inputs)
        self._groups = self._find_groups([get_gradient_edge(tensor).node for tensor in wanted])
        with ExitStack() as hooks:
            for node in {node for group in self._groups for node in group.nodes}:
                hooks.callback(node.register_prehook(self._keep(node)).remove)
            found = torch.autograd.grad(self._tensors, wanted, self._seeds, retain_graph=True, allow_unused=True)
        gradients = iter(found)
        return [next(gradients) if tensor.requires_grad else None for tensor in self._inputs]

    def _keep(self, node: Node) -> Any:
        def keep(arriving: tuple[Tensor | None, ...]) -> None:
            self._arrived[node] = arriving

        return keep

    def weights(self) -> None:
        """Accumulate the gradients of the weights."""
        if self._groups is None:
            if self._tensors:
                torch.autograd.backward(self._tensors, self._seeds, inputs=self._parameters or None)
        else:
            for group in self._groups:
                self._weights_of(group)
        self._tensors, self._seeds, self._groups, self._arrived = [], [], None, {}

    def _weights_of(self, group: _Group) -> None:
        nodes = [node for node in group.nodes if node in self._arrived]
        edges, seeds = list(group.edges), list(group.seeds)
        for node in nodes:
            for index, gradient in enumerate(self._arrived[node]):
                if gradient is not None:
                    edges.append(GradientEdge(node, index))
                    seeds.append(gradient)
        if not edges:
            return
        parameters = list(group.parameters.values())
        with self._held(nodes):
            # Several groups may share parts of the graph: none may free it.
            found = torch.autograd.grad(edges, parameters, seeds, retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextmanager
    def _held(self, nodes: Sequence[Node]) -> Iterator[None]:
        """What arrives at these nodes is what did in the first half: nothing of one another, no tensor's hook again."""
        with ExitStack() as hooks:
            for node in nodes:
                hooks.callback(node.register_prehook(lambda _, kept=self._arrived[node]: kept).remove)
            yield

    def _find_groups(self, input_nodes: Sequence[Node]) -> list[_Group]:
        order = _postorder([get_gradient_edge(tensor).node for tensor in self._tensors])
        towards_inputs = set(input_nodes)
        keys = {get_gradient_edge(parameter).node: parameter for parameter in self._parameters}
        reached: dict[Node, frozenset[Node]] = {}  # nodes not on the way to an input -> weights they lead to
        frontier: list[tuple[Node, frozenset[Node]]] = []
        for node in order:
            following = [child for child, _ in node.next_functions if child is not None]
            leads = frozenset[Node]().union(*(reached.get(child, frozenset()) for child in following))
            if node in towards_inputs or any(child in towards_inputs for child in following):
                towards_inputs.add(node)
                if leads:
                    frontier.append((node, leads))
            else:
                reached[node] = leads | {node} if node in keys else leads
        groups = _Merger()
        for node, weights in frontier:
            groups.of(weights, keys).nodes.append(node)
        for tensor, seed in zip(self._tensors, self._seeds, strict=True):
            edge = get_gradient_edge(tensor)
            if reached.get(edge.node):
                group = groups.of(reached[edge.node], keys)
                group.edges.append(edge)
                group.seeds.append(seed)
        return groups.all()


class _Merger:
    """Groups of weights, joined as soon as one node leads to weights of both."""

    def __init__(self) -> None:
        self._group_of: dict[Node, _Group] = {}

    def of(self, weights: frozenset[Node], parameters: dict[Node, nn.Parameter]) -> _Group:
        known = list({id(g): g for g in (self._group_of.get(weight) for weight in weights) if g is not None}.values())
        group = known[0] if known else _Group()
        for other in known[1:]:
            group.parameters.update(other.parameters)
            group.nodes += other.nodes
            group.edges += other.edges
            group.seeds += other.seeds
            for weight, owner in self._group_of.items():
                if owner is other:
                    self._group_of[weight] = group
        for weight in weights:
            group.parameters[id(parameters[weight])] = parameters[weight]
            self._group_of[weight] = group
        return group

    def all(self) -> list[_Group]:
        return list({id(group): group for group in self._group_of.values()}.values())


def _postorder(roots: Sequence[Node]) -> list[Node]:
    """Every node reachable from `roots`, each after the nodes it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return order
