"""`LoRA`: thin trained matrices beside frozen layers, in a module that knows nothing of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.callbacks._after_configure import AfterConfigure
from lightning_bigmodel.callbacks._optimizers import check_all_stepped
from lightning_bigmodel.callbacks._settings import check_flag, is_count, is_number
from lightning_bigmodel.checkpoint.index import TensorEntry
from lightning_bigmodel.checkpoint.safetensors_files import Reserved, map_file
from lightning_bigmodel.nn._targets import check_patterns
from lightning_bigmodel.nn.lora import LoRASettings, adapters_of, add_adapters, merge_adapters, remove_adapters
from lightning_bigmodel.nn.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_peft_tensors,
    peft_config,
    peft_tensors,
    settings_of_config,
)

__all__ = ["LoRA"]


class LoRA(AfterConfigure):
    """Freeze the model and train a product of two thin matrices beside each of some linear layers.

    Before the optimizer is made, each linear layer that `targets` names gets the parameters `lora_A` of shape (rank,
    inputs) and `lora_B` of shape (outputs, rank), and gives `W x + alpha / rank * B A x` (Hu et al.,
    https://arxiv.org/abs/2106.09685, section 4.1; rsLoRA: https://arxiv.org/abs/2312.03732). All other parameters stop
    taking gradients. The module, its classes and its names stay; in the state dict a layer's `weight` has `lora_A` and
    `lora_B` beside it (peft's files: see `save_peft`). `A` is drawn at random and `B` is zero, so that training begins
    with the model as it was.

    Works under every layout of `BigModelStrategy` to the numbers of one process, and under Lightning's own strategies.
    Under a tensor-parallel plan one matrix is cut as its layer is, and no activation is sent for it. With
    `BigModelStrategy(checkpoint_parameters="trainable")` checkpoints hold adapters only, and `fit(ckpt_path=...)`
    takes them without further settings. A base in 16 bits has adapters in fp32, unless the Trainer's precision is
    `"bf16-true"` or `"16-true"`.

    Do not use it to teach a model much that is new to it: a low rank forgets less and learns less. Bias-only training,
    prompts and other forms that peft has, use through peft: modules that it wrapped train under every layout too.

    Memory a layer: `rank * (inputs + outputs)` trained elements with gradients and moments. Frozen parameters have
    neither, and no gradient is sent for them.

    Args:
        targets: Names or patterns of linear layers (`nn.Linear`, transformers' `Conv1D`): `*` stands for any text
            within one component of a name, and a pattern that fits no whole name may fit its last components, such as
            `"q_proj"`.
        rank: Rows of `A`.
        alpha: The product is multiplied by `alpha / rank`.
        dropout: Probability of dropping an element of what `A` gets, in training.
        use_rslora: Multiply by `alpha / sqrt(rank)`, which lets large ranks learn.
        also_train: Names or patterns of modules or parameters that are trained as a whole, such as a new head.
        seed: Of the first values. Default: that of torch (`seed_everything`). No random numbers of the run are drawn.

    Raises:
        ValueError: For settings out of range; at the start of a run, by name, for a pattern that fits nothing, a rank
            above a layer's width, a weight shared with another module, and an optimizer that does not step adapters.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy, LoRA
        >>> from lightning_bigmodel.testing import TinyChain
        >>> module, adapters = TinyChain(), LoRA(["blocks.*.linear"], rank=2, alpha=4)
        >>> strategy = BigModelStrategy(checkpoint_parameters="trainable")
        >>> trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=adapters, logger=False)
        >>> list(adapters.inject(module))  # what `trainer.fit(module, ...)` does first
        ['blocks.0.linear', 'blocks.1.linear', 'blocks.2.linear', 'blocks.3.linear']
        >>> [name for name, parameter in module.named_parameters() if parameter.requires_grad][:2]
        ['blocks.0.linear.lora_A', 'blocks.0.linear.lora_B']
        >>> _ = adapters.merge(module)  # an ordinary module again
    """

    def __init__(
        self,
        targets: Sequence[str],
        rank: int = 8,
        alpha: float = 16,
        dropout: float = 0.0,
        use_rslora: bool = False,
        also_train: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        names = check_patterns("targets", targets)
        if not is_count(rank, 1):
            raise ValueError(f"`rank={rank!r}` must be a whole number of at least 1.")
        if not (is_number(alpha) and alpha > 0):
            raise ValueError(f"`alpha={alpha!r}` must be a number above 0.")
        if not (is_number(dropout) and 0 <= dropout < 1):
            raise ValueError(f"`dropout={dropout!r}` must be a number of at least 0 and below 1.")
        check_flag("use_rslora", use_rslora)
        if seed is not None and not is_count(seed, 0):
            raise ValueError(f"`seed={seed!r}` must be a whole number of at least 0, or None for torch's own.")
        self.settings = LoRASettings(
            targets=names,
            rank=rank,
            alpha=alpha,
            dropout=dropout,
            use_rslora=use_rslora,
            also_train=check_patterns("also_train", also_train, may_be_empty=True),
        )
        self.seed = seed

    # -- a run ---------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Layers may be made in `configure_model`, which comes later.
        _host.after_configure_model(pl_module, lambda: self._inject(pl_module))
        if stage == "fit":
            _host.after_configure_optimizers(
                pl_module, lambda result: check_all_stepped(pl_module, result, type(self).__name__)
            )

    def _inject(self, module: pl.LightningModule) -> None:
        layers = self.inject(module)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        total = sum(p.numel() for p in module.parameters())
        rank_zero_info(f"`LoRA`: {len(layers)} layers have adapters; {trained:,} of {total:,} parameters are trained.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.settings.rank, "scaling": self.settings.scaling}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict != self.state_dict():
            raise ValueError(
                f"The checkpoint has adapters of rank {state_dict['rank']} and scaling {state_dict['scaling']:g}, and "
                f"`LoRA` says rank {self.settings.rank} and scaling {self.settings.scaling:g}. Give `rank`, `alpha` "
                "and `use_rslora` as they were."
            )

    # -- the module ----------------------------------------------------------------------------------------------------

    def inject(self, module: nn.Module) -> dict[str, nn.Module]:
        """Give the layers adapters and freeze the rest; a Trainer does so by itself. Does nothing twice.

        Use it before weights with adapters are loaded outside of a Trainer.

        Returns:
            Name -> layer with an adapter.

        Raises:
            ValueError: As the class says; nothing has changed then.
        """
        seed = torch.initial_seed() % (1 << 62) if self.seed is None else self.seed
        return add_adapters(module, self.settings, seed)

    def merge(self, module: nn.Module) -> list[str]:
        """Add the adapters to the weights and take them off, after a run: the module is an ordinary one again.

        The sum is computed in fp32 and rounded once to the type of the weight; layers of `Quantize` become ordinary
        ones. What was frozen takes gradients again.

        Returns:
            Names of the layers that had adapters.

        Raises:
            ValueError: If there are none.
        """
        return merge_adapters(module)

    # -- peft ----------------------------------------------------------------------------------------------------------

    def save_peft(self, module: nn.Module, directory: str | Path) -> Path:
        """Write the adapters as peft does, for `peft.PeftModel.from_pretrained(model, directory)`.

        Args:
            module: What peft would wrap, such as the transformers model in a LightningModule: layers are named from it.
            directory: A folder; made where it is missing.

        Raises:
            ValueError: If the module has no adapters, or `also_train` names a parameter, which peft has no place for.
        """
        folder = Path(directory)
        config = peft_config(module, self.settings)
        tensors = peft_tensors(module, config["modules_to_save"] or ())
        folder.mkdir(parents=True, exist_ok=True)
        entries = {
            name: TensorEntry(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
        # Every rank of a script may come here: each writes files of its own, and the last one's stay.
        part = uuid.uuid4().hex
        weights, settings = folder / f".{WEIGHTS_FILE}.{part}", folder / f".{CONFIG_FILE}.{part}"
        try:
            file = Reserved(weights, entries, {})
            for name, place in file.tensors().items():
                place.copy_(tensors[name])
            file.flush()
            settings.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            weights.replace(folder / WEIGHTS_FILE)
            settings.replace(folder / CONFIG_FILE)
        finally:
            weights.unlink(missing_ok=True)
            settings.unlink(missing_ok=True)
        return folder

    @classmethod
    def load_peft(cls, module: nn.Module, directory: str | Path) -> LoRA:
        """Give a module the adapters of a folder that peft or `save_peft` has written.

        Args:
            module: What peft had wrapped: layers are named from there. For further training give the Trainer a callback
                with the same settings, and the module.
            directory: The folder.

        Returns:
            The callback with the settings of the adapters.

        Raises:
            ValueError: If the folder has no such adapters, or they do not fit. Nothing has changed then.
        """
        folder = Path(directory)
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"`{folder}` has no {missing[0]!r}. Give a folder that `save_peft` or peft has written.")
        tensors = map_file(folder / WEIGHTS_FILE)
        settings = settings_of_config(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")), tensors)
        callback = cls(
            list(settings.targets),
            settings.rank,
            settings.alpha,
            settings.dropout,
            settings.use_rslora,
            settings.also_train,
        )
        had_adapters = bool(adapters_of(module))
        callback.inject(module)
        try:
            load_peft_tensors(module, tensors, settings.also_train)
        except ValueError:
            if not had_adapters:
                remove_adapters(module)
            raise
        return callback
