"""Weigh a micro-batch by its live labels, as a mean over tokens does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_bigmodel.pipeline.trace import call_order
from lightning_bigmodel.pipeline.tree import children

__all__ = ["TokenWeight"]

_REMEDY = (
    'Say it: `microbatch_weight=TokenWeight(labels="labels", shifted=True)` for a model that predicts the next token '
    "and shifts labels inside, `shifted=False` for one that does not; or give a callable `micro-batch -> number of "
    'live labels`; or return it from `training_step` as `{"loss": loss, "microbatch_weight": number}`.'
)


class TokenWeight:
    """Number of labels of a micro-batch that count in a mean over tokens: those that are not `ignore_index`.

    A loss that is a mean over live tokens weighs short sequences too much when means of micro-batches, accumulated
    batches or ranks are averaged; weighted by their tokens the mean is that of all tokens together, for any split.

    What is not given is found by one fake run of the step on the first batch: the targets of its cross entropy are
    looked for in the batch, as they are or shifted by one position. Weights of classes that the cross entropy is given
    count too.

    Args:
        labels: Where the labels are in a batch: `"labels"`, `"1"` for the second item of a tuple, `"target.ids"`.
        shifted: Whether the model drops the first label of each sequence, as causal language models that shift labels
            inside do.
        ignore_index: The label that does not count. Default: that of the cross entropy, else -100.

    Raises:
        ValueError: When called on a batch without such labels, or before what is not given was found.

    Example:
        >>> weight = TokenWeight(labels="labels", shifted=True)
        >>> weight({"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])})
        1.0
    """

    def __init__(self, labels: str | None = None, shifted: bool | None = None, ignore_index: int | None = None) -> None:
        kinds: dict[str, tuple[Any, type]] = {
            "labels": (labels, str),
            "shifted": (shifted, bool),
            "ignore_index": (ignore_index, int),
        }
        for name, (value, kind) in kinds.items():
            if value is not None and type(value) is not kind:
                raise ValueError(f"`TokenWeight({name}={value!r})`: `{name}` must be of type {kind.__name__} or None.")
        self.labels, self.shifted, self.ignore_index = labels, shifted, ignore_index
        self._class_weight: Tensor | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether it is known which labels count."""
        return self.labels is not None and self.shifted is not None

    def __repr__(self) -> str:
        """As in the constructor."""
        return f"TokenWeight(labels={self.labels!r}, shifted={self.shifted}, ignore_index={self.ignore_index})"

    def __call__(self, microbatch: Any) -> float:
        """The weight of one micro-batch. No communication; waits for the device the labels are on."""
        if self.labels is None or self.shifted is None:
            raise ValueError(f"It is not known which labels `{self!r}` counts. {_REMEDY}")
        labels = self._find(microbatch)
        if self.shifted:
            labels = labels[..., 1:]
        live = labels[labels != (-100 if self.ignore_index is None else self.ignore_index)]
        if self._class_weight is None:
            return float(live.numel())
        return float(self._class_weight.to(live.device)[live].sum())

    def _find(self, microbatch: Any) -> Tensor:
        assert self.labels is not None
        value = dict(_label_leaves(microbatch)).get(self.labels)
        if value is None:
            known = [name for name, _ in _label_leaves(microbatch)]
            raise ValueError(
                f"The batch has no tensor of whole numbers {self.labels!r} to count labels in, but {known}. {_REMEDY}"
            )
        return value

    def resolve(self, root: nn.Module, batch: Any, step: Callable[[Any], Any], device: torch.device) -> None:
        """Find what was not given, by one fake run of `step` on `batch`. No communication.

        Raises:
            ValueError: Where the targets of the step's cross entropy are not found in the batch, or in several ways.
        """
        is_given = self.is_resolved  # then only weights of classes are looked for
        seen = _Targets()
        try:
            with seen:
                call_order(root, lambda: step(batch), device)
        except Exception as error:
            if not seen.calls and not is_given:  # else the loss was reached
                raise ValueError(
                    '`microbatch_weight="tokens"` looks for the step\'s labels by a run on fake values, which failed '
                    f"({type(error).__name__}: {error}). {_REMEDY}"
                ) from error
        dead = [target for target, ignore_index, _ in seen.calls if bool((target == ignore_index).all())]
        if seen.calls and len(dead) == len(seen.calls) and not is_given:
            raise ValueError(
                'No label of the first batch counts, so that `microbatch_weight="tokens"` cannot tell by it where they '
                f"are and whether they are shifted. {_REMEDY}"
            )
        calls = {rule: call for call in seen.calls for rule in self._rules(batch, call[0], call[1])}
        rules = set(calls)
        if len(rules) > 1:  # inputs that are their own labels come under both names; labels know what does not count
            named = {rule for rule in rules if any(word in rule[0].lower() for word in ("label", "target"))}
            rules = named or rules
        if is_given and len(rules) != 1:
            return
        if len(rules) != 1:
            found = "none" if not rules else f"several: {sorted(rules)}"
            raise ValueError(
                f"`microbatch_weight=\"tokens\"` found {found} of the batch's tensors as the targets of the step's "
                f"{len(seen.calls)} cross entropies (labels computed in the step, or another loss?). {_REMEDY}"
            )
        ((self.labels, self.shifted),) = rules
        _, ignore_index, class_weight = calls[self.labels, self.shifted]
        if self.ignore_index is None:
            self.ignore_index = ignore_index
        self._class_weight = class_weight

    def _rules(self, batch: Any, target: Tensor, ignore_index: int) -> list[tuple[str, bool]]:
        """All (labels, shifted) of which `target` is a view, with or without what does not count."""
        flat, found = target.reshape(-1), []
        for name, labels in _label_leaves(batch):
            if self.labels is not None and name != self.labels:
                continue
            for shifted in (False, True) if self.shifted is None else (self.shifted,):
                if shifted and labels.ndim < 2:
                    continue
                kept = labels[..., 1:] if shifted else labels
                padded = functional.pad(kept, (0, 1), value=ignore_index) if shifted else kept
                options = (kept.reshape(-1), padded.reshape(-1), kept[kept != ignore_index])
                if any(option.shape == flat.shape and bool((option == flat).all()) for option in options):
                    found.append((name, shifted))
        return found


class _Targets(TorchFunctionMode):
    """Keeps the targets of every cross entropy: (class numbers, ignored one, weights of classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, int, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss):
            target = args[1] if len(args) > 1 else kwargs["target"]
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            ignore_index = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            if type(target) is Tensor and not target.is_floating_point():
                real = weight is None or type(weight) in (Tensor, nn.Parameter)
                self.calls.append((target.detach().clone(), ignore_index, weight if real else None))
        return func(*args, **kwargs)


def _label_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of whole numbers in a batch, by where they are."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() and value.dtype != torch.bool and value.ndim:
            yield name, value
        return
    for key, child in children(value) or ():
        yield from _label_leaves(child, f"{name}.{key}" if name else str(key))
