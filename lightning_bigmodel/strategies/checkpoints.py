"""The strategy's checkpoint hooks: a sharded directory written by all ranks, and plain Lightning files read by all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_bigmodel.checkpoint import (
    RegionLayout,
    TensorRegions,
    is_sharded_checkpoint,
    load_model_state,
    load_optimizer_state,
    load_sharded,
    model_state_by_name,
    optimizer_state_by_name,
    save_sharded,
)
from lightning_bigmodel.mesh import AXES

if TYPE_CHECKING:
    from lightning_bigmodel.pipeline.ownership import ParameterShare
    from lightning_bigmodel.strategies.bigmodel import BigModelStrategy

__all__ = ["CheckpointMixin"]


class CheckpointMixin:
    """Checkpoint hooks of `BigModelStrategy`; every hook is collective."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank loads what it owns, so the model is cut first."""
        return True

    def _held(self: Any) -> ParameterShare:
        """What this rank holds, during a run and after it.

        Raises:
            RuntimeError: Before the first run.
        """
        share: ParameterShare | None = self._share
        if share is None:
            raise RuntimeError(
                "There is nothing to save or load yet: the model is set up by `fit`, `validate`, `test` or `predict`."
            )
        return share

    def _owned_names(self: Any) -> set[str]:
        share = self._held()
        persistent = set(share.module.state_dict(keep_vars=True))
        names = {share.names[id(parameter)] for parameter in share.owned}
        names |= {name for name in share.owned_buffers() if name in persistent}
        names |= {
            name
            for name in persistent
            if name.endswith(_EXTRA_STATE) and share.owns_state_of(name[: -len(_EXTRA_STATE)])
        }
        return names

    def _parameter_names(self: Any) -> dict[int, str]:
        """Id of a parameter, or of the row shard an optimizer holds in its place -> name."""
        names: dict[int, str] = dict(self._held().names)
        if self._sharded is not None:
            names.update({key: record.name for key, record in self._sharded.records.items()})
        return names

    def _regions(self: Any) -> dict[str, RegionLayout]:
        """Name -> which rows of a parameter this rank has."""
        records = self._sharded.records.values() if self._sharded is not None else ()
        return {record.name: RegionLayout.of_rows(record.shape, record.start, record.length) for record in records}

    def _layout_sizes(self: Any) -> dict[str, int]:
        return dict(zip(AXES, self.mesh.layout.shape, strict=True))

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """This rank's part of the module's state."""
        rows = self._rows_by_state_name()
        state = model_state_by_name(self.lightning_module, self._owned_names() - set(rows))
        state.update(rows)
        for name in self.lightning_module.state_dict(keep_vars=True):
            if name in state:
                state.move_to_end(name)  # type: ignore[attr-defined]  # an OrderedDict
        return state

    def _rows_by_state_name(self: Any) -> dict[str, TensorRegions]:
        """State-dict name (all of them, of a tied parameter) -> this rank's rows."""
        if self._sharded is None:
            return {}
        regions, shards, names = self._regions(), self._sharded.shards.by_name(), self._held().names
        found = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            own = names.get(id(value))
            if own in shards:
                found[name] = TensorRegions(shards[own].detach(), regions[own])
        return found

    def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state, by parameter name."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names = self._parameter_names()
        owned = {names[id(parameter)] for parameter in self._held().owned}
        state: Any = optimizer_state_by_name(optimizer, names, owned)
        regions = self._regions()
        for name, entries in state["state"].items():
            layout = regions.get(name)
            for key, value in entries.items():
                if layout is not None and isinstance(value, Tensor) and tuple(value.shape) == layout.local_shape:
                    entries[key] = TensorRegions(value, layout)
        return dict(state)

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded directory.

        Raises:
            TypeError: For `storage_options`, which a sharded directory cannot take.
        """
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}` writes checkpoints itself, so `storage_options` cannot take effect; leave it "
                "out."
            )
        strategy: BigModelStrategy = self
        path = Path(strategy.broadcast(str(filepath)))
        rest = dict(checkpoint)
        model_state = rest.pop("state_dict")
        optimizer_states = rest.pop("optimizer_states", None)
        with strategy._phase("saving a checkpoint"):
            save_sharded(
                path,
                model_state=model_state,
                optimizer_states=optimizer_states,
                metadata=rest,
                rank_state={
                    "num_steps": strategy._num_steps if strategy._engine is None else strategy._engine.num_steps
                },
                layout=strategy._layout_sizes(),
            )

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a sharded directory (this rank's part) or a plain Lightning file (whole)."""
        strategy: BigModelStrategy = self
        path = Path(strategy.broadcast(str(checkpoint_path)))
        with strategy._phase("loading a checkpoint"):
            if not is_sharded_checkpoint(path):
                return strategy.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            names = strategy._parameter_names()
            loaded = load_sharded(
                path,
                model_names=strategy._owned_names(),
                optimizer_names=[names[id(parameter)] for parameter in strategy._held().owned],
                layout=strategy._layout_sizes(),
                regions=self._regions(),
                weights_only=bool(weights_only),
            )
        if loaded.rank_state is not None:
            strategy.engine.num_steps = loaded.rank_state.get("num_steps", 0)
        checkpoint = dict(loaded.metadata)
        checkpoint["state_dict"] = loaded.model_state
        if loaded.optimizer_states:
            checkpoint["optimizer_states"] = loaded.optimizer_states
        checkpoint[_IS_SHARDED] = True
        return checkpoint

    def load_model_state_dict(self: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy the owned values into the module."""
        tensors: Mapping[str, Any] = checkpoint["state_dict"]
        owned = self._owned_names()
        if not checkpoint.get(_IS_SHARDED):
            known = set(self.lightning_module.state_dict(keep_vars=True))
            missing, unexpected = known - set(tensors), set(tensors) - known
            if strict and (missing or unexpected):
                raise RuntimeError(
                    f"The checkpoint does not fit {type(self.lightning_module).__name__}: missing {sorted(missing)}, "
                    f"unexpected {sorted(unexpected)}. Set `strict_loading=False` on the module to load what fits."
                )
            owned = {name for name in owned if name in tensors} if not strict else owned
            state = self.lightning_module.state_dict(keep_vars=True)
            held = {id(state[name]) for name in owned if isinstance(state[name], Tensor)}
            kept = [name for name, value in state.items() if name in owned or id(value) in held]
            versions = getattr(tensors, "_metadata", None)
            tensors = OrderedDict((name, tensors[name]) for name in kept if name in tensors)
            if versions is not None:
                tensors._metadata = versions  # type: ignore[attr-defined]  # as torch's state dicts carry it
        self._load_model_tensors(tensors, owned, is_whole=not checkpoint.get(_IS_SHARDED))

    def _load_model_tensors(self: Any, tensors: Mapping[str, Any], owned: set[str], *, is_whole: bool) -> None:
        if self._sharded is None:
            load_model_state(self.lightning_module, tensors, owned)
            return
        shards, records = self._sharded.shards, {r.name: r for r in self._sharded.records.values()}
        state = self._held().module.state_dict(keep_vars=True)
        first_name = self._held().names
        rows: dict[str, Any] = {}
        rest = OrderedDict()
        for name, value in tensors.items():
            own = first_name.get(id(state.get(name)), name)
            if own not in records:
                rest[name] = value
                continue
            record = records[own]
            rows[own] = record.rows(value.contiguous()) if is_whole else value
            if rows[own].shape != record.local_shape or (is_whole and value.shape != record.shape):
                raise ValueError(
                    f"`{name}` has shape {list(value.shape)} in the checkpoint and {list(record.shape)} in the module."
                )
        versions = getattr(tensors, "_metadata", None)
        if versions is not None:
            rest._metadata = versions  # type: ignore[attr-defined]  # as torch's state dicts carry it
        left = {name for name in owned if first_name.get(id(state.get(name)), name) not in records}
        load_model_state(self.lightning_module, rest, left)
        shards.load_rows(rows)
        shards.publish([p for p in shards.parameters if shards.records[id(p)].name in rows])

    def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of owned parameters, and all group options."""
        names = self._parameter_names()
        owned_ids = {id(parameter) for parameter in self._held().owned}
        owned = {names[key] for key in owned_ids}
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if checkpoint.get(_IS_SHARDED):
                load_optimizer_state(optimizer, saved, names, owned)
                continue
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            records = self._sharded.records if self._sharded is not None else {}
            state = {}
            for key, parameter in zip(keys, parameters, strict=True):
                record = records.get(id(parameter))
                if record is not None and key in saved["state"]:
                    state[key] = {
                        entry: record.rows(value.contiguous())
                        if getattr(value, "shape", None) == record.shape
                        else value
                        for entry, value in saved["state"][key].items()
                    }
                elif id(parameter) in owned_ids and key in saved["state"]:
                    state[key] = saved["state"][key]
            optimizer.load_state_dict({**saved, "state": state})


_EXTRA_STATE = "_extra_state"
_IS_SHARDED = "lightning_bigmodel_sharded"
