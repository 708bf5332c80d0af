"""`Quantize`: frozen layers in 4 or 8 bits, in a module that knows nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._settings import check_flag
from lightning_bigmodel.nn._targets import check_patterns
from lightning_bigmodel.nn.quantized import quantize_layers
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["Quantize"]


class Quantize(Callback):
    """Keep the weights of some linear layers in 4 or 8 bits, frozen, before the optimizer is made.

    4 bits are NF4 with double quantisation (QLoRA, Dettmers et al., https://arxiv.org/abs/2305.14314, section 3), 8
    bits have one scale for each row (LLM.int8(), https://arxiv.org/abs/2208.07339, section 2), both by bitsandbytes'
    kernels, on the CPU and on GPUs. Products are computed in the type of the activations, with the matrix made of the
    codes in forward and again in backward. What is trained flows through: adapters of `LoRA` beside the same layers
    (QLoRA; the order of the two callbacks does not matter), biases, and all other layers.

    Works under every layout of `BigModelStrategy`: with ZeRO codes and scales are spread over the ranks as other
    parameters are, and put together bit by bit where a layer computes. A `tensor_plan` cuts a layer of 4 bits by
    `colwise` where its inputs, and by `rowwise` where each rank's inputs, are a multiple of 64, and is refused
    elsewhere; then scales stay fp32 (0.047 bytes more an element), and a checkpoint with codes loads elsewhere only
    with `double_quantization=False`. `tensor_plan="auto"` leaves these layers whole.

    Do not use it for layers that are trained; nor for a model that was never trained, whose weights have nothing to
    keep. Weights must be there: load them in the module's constructor or `configure_model`, or before `fit`. A
    checkpoint of the run has the codes (or, with `checkpoint_parameters="trainable"`, nothing of them).

    Memory an element: 0.516 bytes (4 bits) or 1 byte, and the matrix of the layer at work. Communication under ZeRO 3:
    codes in place of weights.

    Args:
        targets: Names or patterns of linear layers (`nn.Linear`, transformers' `Conv1D`), as for `LoRA`.
        bits: 4 or 8.
        double_quantization: With 4 bits, keep scales in 8 bits, too.

    Raises:
        ValueError: For settings out of range; at the start of a run, by name, for a pattern that fits nothing, a weight
            shared with another module or without values.
        ModuleNotFoundError: Without bitsandbytes (`pip install 'lightning-bigmodel[optim]'`).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, LoRA, Quantize
        >>> targets = ["q_proj", "v_proj"]
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=BigModelStrategy(zero_stage=3), logger=False,
        ...     callbacks=[Quantize(targets), LoRA(targets)],
        ... )
    """

    def __init__(
        self, targets: Sequence[str], bits: Literal[4, 8] = 4, double_quantization: bool | None = None
    ) -> None:
        self.targets = check_patterns("targets", targets)
        if isinstance(bits, bool) or bits not in (4, 8):
            raise ValueError(f"`bits={bits!r}` must be 4 or 8.")
        if double_quantization is not None:
            check_flag("double_quantization", double_quantization)
        if double_quantization is not None and bits == 8:
            raise ValueError(
                f"`double_quantization={double_quantization!r}` is about the scales of 4 bits, and `bits=8`. Leave it "
                "out."
            )
        self.bits = bits
        self.double_quantization = double_quantization is not False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Layers may be made in `configure_model`, which comes later.
        strategy = trainer.strategy
        is_cut = isinstance(strategy, BigModelStrategy) and strategy.tensor_parallel_size > 1
        _host.after_configure_model(pl_module, lambda: self._convert(pl_module, is_cut))

    def _convert(self, module: nn.Module, is_cut: bool) -> None:
        quantize_layers(
            module, self.targets, self.bits, double_quantization=self.double_quantization, whole_scales=is_cut
        )

    def convert(self, module: nn.Module) -> dict[str, Any]:
        """Quantise the layers of a module, outside of a Trainer or in `configure_model`. Does nothing twice.

        Returns:
            Name -> layer.

        Raises:
            ValueError: As the class says; nothing has changed then.
        """
        return quantize_layers(module, self.targets, self.bits, double_quantization=self.double_quantization)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _host.forget_after_configure(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        _host.forget_after_configure(pl_module)
