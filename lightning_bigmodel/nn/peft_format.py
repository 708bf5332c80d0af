"""Adapters in the files of the peft library: `adapter_config.json` and `adapter_model.safetensors`.

Format: what `peft.PeftModel.save_pretrained` writes (peft 0.10 and newer, https://huggingface.co/docs/peft). A matrix
has the name `base_model.model.<layer>.lora_A.weight`, a module trained as a whole `base_model.model.<module>.weight`.
Layers are named from the module that peft would wrap, such as the transformers model inside a LightningModule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel.nn._targets import is_conv1d, match_names
from lightning_bigmodel.nn.lora import LoRASettings, adapters_of, named_adapters

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "load_peft_tensors", "peft_config", "peft_tensors", "settings_of_config"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# First values that leave the base as it is.
_FIRST_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")
# Entries that are read here, that say which layers (the file's names do) or what nothing is computed by.
_KNOWN = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    ]
)


def peft_config(root: nn.Module, settings: LoRASettings) -> dict[str, Any]:
    """What peft's `LoraConfig` of these adapters says.

    Raises:
        ValueError: If the module has no adapters, or a parameter is trained that peft has no place for.
    """
    layers = adapters_of(root)
    if not layers:
        raise ValueError(
            f"`{type(root).__name__}` has no adapters to save. Give the module that was trained, or the part of it "
            "that has them."
        )
    modules = dict(root.named_modules())
    for pattern in settings.also_train:
        if not match_names(pattern, modules):
            raise ValueError(
                f"`also_train` names the parameter {pattern!r}, and peft's files have whole modules only. Name its "
                "module in `also_train`, or save a checkpoint with `checkpoint_parameters='trainable'`."
            )
    saved = [name for pattern in settings.also_train for name in match_names(pattern, modules)]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(root, "config", None), "_name_or_path", None) or None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.use_rslora,
        "fan_in_fan_out": any(is_conv1d(layer) for layer in layers.values()),
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": sorted(layers),
        "modules_to_save": sorted(set(saved)) or None,
    }


def settings_of_config(config: Mapping[str, Any], names: Iterable[str]) -> LoRASettings:
    """The settings that a peft config says, for the layers whose matrices its file has.

    Args:
        config: What `adapter_config.json` holds.
        names: Names in the file of weights; `target_modules` may be an expression that only peft reads.

    Raises:
        ValueError: For what is no LoRA of this kind.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"The adapter is of peft's kind {kind!r}, and `LoRA` reads 'LORA'. Load it through peft itself: a module "
            "that peft has wrapped trains under every layout too."
        )
    first_values = config.get("init_lora_weights", True)
    if first_values not in _FIRST_VALUES:
        raise ValueError(
            f"The adapter was made with `init_lora_weights={first_values!r}`, which changes the weights of the base, "
            "too, so that it is right beside those only. Save it by peft's `save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)`, which makes an ordinary one of it."
        )
    unknown = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if config.get("bias", "none") != "none":
        unknown.append("bias")
    if unknown:
        raise ValueError(
            f"The adapter was made with {unknown}, which `LoRA` does not have. Load it through peft itself: a module "
            "that peft has wrapped trains under every layout too."
        )
    end = ".lora_A.weight"
    return LoRASettings(
        targets=sorted(name[len(_PREFIX) : -len(end)] for name in names if name.endswith(end)),
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        use_rslora=bool(config.get("use_rslora")),
        also_train=tuple(config.get("modules_to_save") or ()),
    )


def peft_tensors(root: nn.Module, also_train: Sequence[str] = ()) -> dict[str, Tensor]:
    """Name in peft's file -> tensor, of the adapters and of modules that are trained as a whole."""
    found = {f"{_PREFIX}{name}.weight": matrix.detach() for name, matrix in named_adapters(root)}
    modules = dict(root.named_modules())
    for pattern in also_train:
        for name in match_names(pattern, modules):
            for own, parameter in modules[name].named_parameters():
                found[f"{_PREFIX}{name}.{own}"] = parameter.detach()
    return found


@torch.no_grad()
def load_peft_tensors(root: nn.Module, tensors: Mapping[str, Tensor], also_train: Sequence[str] = ()) -> None:
    """Copy what `peft_tensors` gave into adapters that are there.

    Raises:
        ValueError: If names or shapes differ; nothing has changed then.
    """
    wanted = peft_tensors(root, also_train)
    if wanted.keys() != tensors.keys():
        missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise ValueError(
            f"The adapter does not fit `{type(root).__name__}`: missing {missing[:5]}, unexpected {unexpected[:5]}. "
            "Give the module whose layers it was made for: with peft, the one that was wrapped."
        )
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            raise ValueError(
                f"{name!r} has shape {list(value.shape)} in the file and {list(wanted[name].shape)} in the module."
            )
    for name, value in tensors.items():
        wanted[name].copy_(value)
