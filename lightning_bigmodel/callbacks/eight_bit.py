"""`EightBitOptimizer`: moments in a quarter of the memory, with the module's own optimizer settings."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._after_configure import AfterConfigure
from lightning_bigmodel.callbacks._optimizers import optimizers_in
from lightning_bigmodel.callbacks._settings import check_flag, is_count
from lightning_bigmodel.sharding.eight_bit import embedding_parameters, to_eight_bit

__all__ = ["EightBitOptimizer"]


class EightBitOptimizer(AfterConfigure):
    """Train with the 8-bit twin of the optimizer that `configure_optimizers` returns.

    The optimizer stays the same object, with its groups, options, hooks and schedulers; its class becomes that of
    bitsandbytes (Dettmers et al., https://arxiv.org/abs/2110.02861): moments are 8-bit codes with a scale for each
    block of 256 elements. Taken are AdamW and Adam of torch, and AdamW, Adam, Lion and AdEMAMix of bitsandbytes (any
    class `Lion` whose groups have `lr`, `betas` and `weight_decay`).

    Works under every layout of `BigModelStrategy` and under Lightning's own strategies that keep whole parameters. What
    kind of moments a parameter has depends on its whole size. Blocks follow what a rank holds: with replicas and
    pipelines they are those of one process, with ZeRO and tensor parallelism where a rank's part begins at a multiple
    of 256 elements. Where they are, numbers are those of one process but for moments at the edge between two codes,
    which the last bit of a gradient decides (1e-4 in weights of small models); elsewhere they are so within the error
    of the quantisation. Checkpoints load into any layout: bit for bit where blocks are the same, else the moments are
    quantised again, and the first rank says with what error.

    Do not use it where moments are small beside the rest: a small model with long sequences, or adapters alone.

    Memory a parameter: 1 + 4/256 bytes for each moment instead of 4. Communication: none.

    Args:
        embeddings_in_32_bits: Keep fp32 moments for `nn.Embedding`, and what is tied to it, as the paper advises.
        min_8bit_size: Parameters of fewer elements keep fp32 moments.
        paged: Moments in memory that the GPU may move to the host when it runs out; CUDA only.

    Raises:
        ValueError: For settings out of range; at the start of a run for an optimizer without such a twin, or with
            options that it does not have, and for `paged` without CUDA.
        ModuleNotFoundError: Without bitsandbytes (`pip install 'lightning-bigmodel[optim]'`).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, EightBitOptimizer
        >>> strategy = BigModelStrategy(zero_stage=3)
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=strategy, callbacks=EightBitOptimizer(), logger=False
        ... )
    """

    def __init__(self, embeddings_in_32_bits: bool = True, min_8bit_size: int = 4096, paged: bool = False) -> None:
        check_flag("embeddings_in_32_bits", embeddings_in_32_bits)
        check_flag("paged", paged)
        if not is_count(min_8bit_size, 1):
            raise ValueError(f"`min_8bit_size={min_8bit_size!r}` must be a whole number of at least 1.")
        self.embeddings_in_32_bits, self.min_8bit_size, self.paged = embeddings_in_32_bits, min_8bit_size, paged

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        device = trainer.strategy.root_device
        if self.paged and device.type != "cuda":
            raise ValueError(
                f"`paged=True` needs a GPU that pages memory to the host, and the run is on {device}. Leave it out; on "
                "CUDA without room `BigModelStrategy(offload='cpu')` is another way."
            )
        _host.after_configure_optimizers(pl_module, lambda returned: self._convert(pl_module, returned))

    def _convert(self, module: pl.LightningModule, returned: Any) -> None:
        full = embedding_parameters(module) if self.embeddings_in_32_bits else set()
        optimizers = optimizers_in(returned)
        if not optimizers:
            raise ValueError(
                f"`EightBitOptimizer` has nothing to change: `{type(module).__name__}.configure_optimizers` must "
                "return an optimizer."
            )
        for optimizer in optimizers:
            to_eight_bit(optimizer, full_precision=full, min_size=self.min_8bit_size, paged=self.paged)
