"""`Quantize`: layers in 4 or 8 bits, in a module that knows nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._after_configure import AfterConfigure
from lightning_bigmodel.callbacks._settings import check_flag
from lightning_bigmodel.nn._targets import check_patterns
from lightning_bigmodel.nn.int8_product import multiply_in_int8
from lightning_bigmodel.nn.quantized import quantize_layers
from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["Quantize"]

_CAPABILITY = (7, 5)  # of GPUs that multiply 8-bit integers


class Quantize(AfterConfigure):
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
    with `double_quantization=False`. `tensor_plan="auto"` leaves blocks with such layers whole.

    With `trained=True` the layers stay trained instead, and their products run on 8-bit integers (bitsandbytes' kernel;
    LLM.int8(), without the part for outliers): forward, and the gradient of the weight. Weights remain ordinary
    parameters in their type and under their names, so that layouts, optimizers and checkpoints are as without the
    callback, and checkpoints load without it. This is for speed on GPUs with int8 units, not for memory. The gradient
    of a weight is rounded for each micro-batch by the largest values in it (about a hundredth of its norm): the same
    micro-batches give the same numbers, and other numbers of micro-batches or replicas, and `rowwise` layers, gradients
    that agree to that rounding.

    Do not use `trained=False` for layers that are trained; nor for a model that was never trained, whose weights have
    nothing to keep. Weights must be there: load them in the module's constructor or `configure_model`, or before `fit`.
    A checkpoint of the run has the codes (or, with `checkpoint_parameters="trainable"`, nothing of them).

    Memory an element: 0.516 bytes (4 bits) or 1 byte, and the matrix of the layer at work; trained, that of the weight,
    and an input kept for backward takes 1 byte an element. Communication under ZeRO 3: codes in place of weights.

    Args:
        targets: Names or patterns of linear layers (`nn.Linear`, transformers' `Conv1D`), as for `LoRA`.
        bits: 4 or 8.
        double_quantization: With 4 bits, keep scales in 8 bits, too.
        trained: With 8 bits, train the layers and multiply in 8 bits, instead of keeping frozen weights so.

    Raises:
        ValueError: For settings out of range; at the start of a run, by name, for a pattern that fits nothing, a weight
            shared with another module or without values, and for `trained=True` on a GPU without int8 units.
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
        self,
        targets: Sequence[str],
        bits: Literal[4, 8] = 4,
        double_quantization: bool | None = None,
        trained: bool = False,
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
        check_flag("trained", trained)
        if trained and bits == 4:
            raise ValueError(
                "`trained=True` is for products on 8-bit integers, and `bits=4`. Give `bits=8`, or train layers of 4 "
                "bits by `LoRA` beside them."
            )
        self.bits, self.trained = bits, trained
        self.double_quantization = double_quantization is not False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if self.trained:
            _check_units(strategy.root_device)
        # Layers may be made in `configure_model`, which comes later.
        is_cut = isinstance(strategy, BigModelStrategy) and strategy.tensor_parallel_size > 1
        _host.after_configure_model(pl_module, lambda: self._convert(pl_module, is_cut=is_cut))

    def _convert(self, module: nn.Module, *, is_cut: bool) -> dict[str, Any]:
        if self.trained:
            return multiply_in_int8(module, self.targets)
        return quantize_layers(
            module, self.targets, self.bits, double_quantization=self.double_quantization, whole_scales=is_cut
        )

    def convert(self, module: nn.Module) -> dict[str, Any]:
        """Convert the layers of a module, outside of a Trainer or in `configure_model`. Does nothing twice.

        Returns:
            Name -> layer.

        Raises:
            ValueError: As the class says; nothing has changed then.
        """
        return self._convert(module, is_cut=False)


def _check_units(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ValueError(
            f"`trained=True` needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher (Turing), "
            f"which multiplies 8-bit integers, and {torch.cuda.get_device_name(device)} is older. Leave `Quantize` out."
        )
