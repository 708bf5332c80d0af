"""What a checkpoint of any kind holds, its tensors left in files that are mapped into memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_bigmodel.checkpoint._pickle import read_pickled
from lightning_bigmodel.checkpoint._versions import module_versions, set_module_versions
from lightning_bigmodel.checkpoint.convert import allocate_mapped, extra_keys, in_module_order, read_mapped
from lightning_bigmodel.checkpoint.eight_bit import portable_entries
from lightning_bigmodel.checkpoint.foreign import read_parts
from lightning_bigmodel.checkpoint.index import SAME_TENSOR, TensorEntry, model_key, read_index
from lightning_bigmodel.checkpoint.numbered import numbered_state
from lightning_bigmodel.checkpoint.safetensors_files import files_of, map_file, read_header, shared_names
from lightning_bigmodel.checkpoint.state import OptimizerState

__all__ = ["Content", "Progress", "entry_of", "lightning_metadata", "weights_file"]

Progress = Callable[[int, int, str], None]
_SET_ENDING = "_state_dict"


@dataclass(kw_only=True)
class Content:
    """The parts of a checkpoint, as :func:`~lightning_bigmodel.checkpoint.store.save_sharded` takes them.

    Attributes:
        model_state: State-dict name to tensor or extra state.
        optimizer_states: One per optimizer, by name or by place; None for weights alone.
        metadata: The rest of a Lightning checkpoint.
        extra_states: Further sets of tensors by name.
        same_tensor: Sets of names of one tensor.
    """

    model_state: OrderedDict[str, Any]
    optimizer_states: list[OptimizerState] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    extra_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    same_tensor: list[list[str]] = field(default_factory=list)

    @classmethod
    def of_file(cls, path: Path, scratch: Path, *, weights_only: bool) -> Content:
        """Of a Lightning file, or of one that holds a state dict alone.

        Raises:
            ValueError: If it is damaged, holds no weights, or has what ``weights_only`` refuses.
        """
        rest = read_pickled(path, weights_only=weights_only, mapped=True)
        if isinstance(rest, Mapping) and "state_dict" not in rest and _is_set(rest, rest):
            rest = {"state_dict": rest}
        if not (isinstance(rest, dict) and isinstance(rest.get("state_dict"), Mapping)):
            raise ValueError(f"`{path}` holds neither a Lightning checkpoint (`state_dict`) nor tensors by name.")
        rest = dict(rest)
        given = rest.pop("state_dict")
        state = OrderedDict(given)
        set_module_versions(state, module_versions(given))
        saved = rest.pop("optimizer_states", None)
        sets = [key for key, value in rest.items() if key.endswith(_SET_ENDING) and _is_set(value, state)]
        return cls(
            model_state=state,
            optimizer_states=None if saved is None else [_numbered(entry, scratch, i) for i, entry in enumerate(saved)],
            extra_states={key.removesuffix(_SET_ENDING): dict(rest.pop(key)) for key in sets},
            metadata=rest,
            same_tensor=_same_tensor(state),
        )

    @classmethod
    def of_safetensors(cls, path: Path) -> Content:
        """Of a file of safetensors, or a folder of them with an index."""
        state: OrderedDict[str, Any] = OrderedDict()
        notes: dict[str, str] = {}
        for file in files_of(path):
            tensors = map_file(file)
            if twice := sorted(tensors.keys() & state.keys()):
                raise ValueError(f"`{path}` has `{twice[0]}` in two files.")
            state.update(tensors)
            notes.update(read_header(file)[1])
        shared = shared_names(notes, state)
        state.update((name, state[kept]) for name, kept in shared.items())
        return cls(model_state=state, same_tensor=_same_tensor(state))

    @classmethod
    def of_directory(cls, path: Path, scratch: Path, *, weights_only: bool, progress: Progress | None) -> Content:
        """Of a sharded directory, its tensors put together in ``scratch``."""
        index = read_index(path)
        parts = read_parts(path, index, weights_only=weights_only)
        values = read_mapped(path, index, index.keys, scratch, weights_only, progress)
        versions = parts["module_versions"]
        state = OrderedDict(
            (name, values[model_key(name)]) for name in in_module_order(index.model_names, versions or ())
        )
        set_module_versions(state, versions)
        metadata = dict(parts["metadata"])
        optimizers: list[OptimizerState] = [
            {
                "state": {
                    name: {key: values[at] for key, at in keys.items()}
                    for name, keys in index.optimizer_keys(number).items()
                },
                "param_groups": groups,
            }
            for number, groups in enumerate(parts["param_groups"])
        ]
        return cls(
            model_state=state,
            optimizer_states=None if index.num_optimizers is None else optimizers,
            extra_states={
                set_name: {name: values[key] for name, key in extra_keys(index, set_name).items()}
                for set_name in index.extra_names
            },
            same_tensor=metadata.pop(SAME_TENSOR, []),
            metadata=metadata,
        )

    def with_names(self, change: Callable[[str], str]) -> Content:
        """Weights alone, under other names.

        Raises:
            ValueError: If two names become one.
        """
        found = OrderedDict((change(name), value) for name, value in self.model_state.items())
        if len(found) != len(self.model_state):
            names = [change(name) for name in self.model_state]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"Two names become `{twice}`. Choose another prefix.")
        same = [[change(name) for name in names] for names in self.same_tensor]
        return Content(model_state=found, same_tensor=same)


def entry_of(tensor: Tensor) -> TensorEntry:
    """Shape and dtype of a tensor."""
    return TensorEntry(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _is_set(value: Any, names: Mapping[str, Any]) -> bool:
    """Whether a value is tensors by names of the weights."""
    return isinstance(value, Mapping) and bool(value) and value.keys() <= names.keys() and _all_tensors(value)


def _all_tensors(value: Mapping[str, Any]) -> bool:
    return all(isinstance(key, str) and isinstance(entry, Tensor) for key, entry in value.items())


def _same_tensor(state: Mapping[str, Any]) -> list[list[str]]:
    """Names of tensors that are the same memory."""
    found: dict[Any, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            found.setdefault(place, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _numbered(saved: Mapping[str, Any], scratch: Path, number: int) -> OptimizerState:
    """By place; 8-bit states in the form that any layout can load."""
    state = numbered_state(saved)
    for name, entries in state["state"].items():
        portable = portable_entries(entries)
        for key in portable.keys() - entries.keys():
            if isinstance(value := portable[key], Tensor) and key.startswith("state"):
                portable[key] = allocate_mapped(entry_of(value), scratch / f"optimizer_{number}{name}.{key}")
                portable[key].copy_(value)
        state["state"][name] = portable
    return state


def weights_file(content: Content) -> dict[str, Any]:
    """A Lightning checkpoint of weights alone, as `load_from_checkpoint` and the evaluation loops take it."""
    return {**lightning_metadata(content.metadata), "state_dict": content.model_state}


def lightning_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """With what Lightning asks for in every checkpoint."""
    return {"epoch": 0, "global_step": 0, "pytorch-lightning_version": _LIGHTNING_FORMAT, **metadata}


# Lightning brings files of older versions up to date by this; 2.6 has nothing to change in one of 2.0 or newer.
_LIGHTNING_FORMAT = "2.6.0"
