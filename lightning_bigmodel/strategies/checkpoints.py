"""The strategy's checkpoint hooks: a sharded directory written by all ranks, and plain Lightning files read by all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_bigmodel import _host, _host_resume
from lightning_bigmodel.checkpoint import (
    LEFT_OUT,
    SAME_TENSOR,
    LiveTensors,
    RegionLayout,
    TensorRegions,
    find_checkpoint,
    is_remote,
    is_sharded_checkpoint,
    load_model_state,
    load_optimizer_state,
    load_sharded,
    local_copy,
    marked_state,
    model_state_by_name,
    optimizer_state_by_name,
    portable_entries,
    quantized_entries,
    read_guarded,
    read_index,
    requantization_error,
    why_left_out,
)
from lightning_bigmodel.mesh import AXES
from lightning_bigmodel.sharding.optimizers import factored_shape, factored_state, state_layout
from lightning_bigmodel.strategies.other_optimizers import raise_lost_options, raise_other_states

if TYPE_CHECKING:
    from lightning_bigmodel.pipeline.ownership import ParameterShare
    from lightning_bigmodel.sharding.rows import RowShard
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

    def _buffer_names(self: Any) -> set[str]:
        """State-dict names of buffers, whoever has their true value: hooks may read all of them on every rank."""
        module = self._held().module
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        return buffers & set(module.state_dict(keep_vars=True))

    def _parameter_names(self: Any) -> dict[int, str]:
        """Id of a parameter, or of the row shard an optimizer holds in its place -> name."""
        names: dict[int, str] = dict(self._held().names)
        if self._sharded is not None:
            names.update({key: record.name for key, record in self._sharded.records.items()})
        return names

    def _rows(self: Any) -> dict[str, RowShard]:
        """Name -> which rows of a parameter (of a slice of it, under tensor parallelism) this rank has."""
        records = self._sharded.records.values() if self._sharded is not None else ()
        return {record.name: record for record in records}

    def _regions(self: Any) -> dict[str, RegionLayout]:
        """Name -> what an optimizer here holds of a parameter, where it is not all of it."""
        found = {} if self._tensor is None else self._tensor.layouts()
        for name, rows in self._rows().items():
            layout = found.get(name) or RegionLayout.of_whole(rows.shape)
            found[name] = layout.rows(rows.start, rows.length)
        return found

    def _held_now(self: Any) -> dict[str, Tensor]:
        """Name -> tensor that has a part of a parameter at the time; parameters that are whole are left out."""
        found: dict[str, Tensor] = {}
        if self._tensor is not None and not self._tensor.is_restored:
            parts, names = self._tensor.layouts(), self._held().names
            found = {names[id(p)]: p for p in self._held().owned if names[id(p)] in parts}
        if self._sharded is not None:
            found.update(self._sharded.shards.by_name())
        return found

    def _layout_sizes(self: Any) -> dict[str, int]:
        return dict(zip(AXES, self.mesh.layout.shape, strict=True))

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """This rank's part of the module's state."""
        rows = self._rows_by_state_name()
        state = model_state_by_name(self.lightning_module, self._owned_names() - set(rows))
        state.update(rows)
        state.update(self._agreed_by_state_name())
        for name in self.lightning_module.state_dict(keep_vars=True):
            if name in state:
                state.move_to_end(name)  # type: ignore[attr-defined]  # an OrderedDict
        return state

    def _agreed_by_state_name(self: Any) -> dict[str, Any]:
        """What replicas that are apart would agree on, as a checkpoint takes it."""
        agreed = self._agreed_weights()
        found = self.checkpoint_state(agreed) if agreed else {}
        return dict(found)

    def _rows_by_state_name(self: Any) -> dict[str, TensorRegions]:
        """State-dict name (all of them, of a tied parameter) -> this rank's rows."""
        regions, held, names = self._regions(), self._held_now(), self._held().names
        found = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            own = names.get(id(value))
            if own in held:
                found[name] = TensorRegions(held[own].detach(), regions[own])
        return found

    def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state, by parameter name."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names = self._parameter_names()
        owned = {names[id(parameter)] for parameter in self._held().owned}
        state: Any = optimizer_state_by_name(optimizer, names, owned)
        if self._agrees_on_weights and self.mesh.coordinates["data_replicate"]:
            state["state"] = {}  # each replica has its own: the checkpoint takes those of the first, not some of each
        regions, rows = self._regions(), self._rows()
        stepped = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        for name, raw in state["state"].items():
            entries = state["state"][name] = portable_entries(raw)
            if name in rows:
                kinds: dict[str, Any] = dict(state_layout(optimizer, stepped[name], rows[name]))
                kinds.update(dict.fromkeys(entries.keys() - kinds.keys(), "rows"))
            else:  # a slice under tensor parallelism, or whole
                local_shape = regions[name].local_shape if name in regions else None
                kinds = {k: "rows" for k, v in entries.items() if tuple(getattr(v, "shape", ())) == local_shape}
            if name in regions:
                own = rows.get(name) if self._tensor is None else None
                factored = {} if self._tensor is None else self._factored(optimizer, name, regions[name], entries)
                kinds.update({key: factored_state(optimizer, len(regions[name].shape))[key] for key in factored})
                state["state"][name] = marked_state(entries, kinds, regions[name], own, factored)
        return dict(state)

    def _factored(
        self: Any, optimizer: Optimizer, name: str, layout: RegionLayout, keys: Iterable[str]
    ) -> dict[str, RegionLayout]:
        """Of a parameter's factored state entries, how this rank's part lies in the whole one."""
        # A rank without rows still has the columns of its slice.
        columns = (None if self._tensor is None else self._tensor.layouts().get(name)) or RegionLayout.of_whole(
            layout.shape
        )
        found = {}
        for key, kind in factored_state(optimizer, len(layout.shape)).items():
            if key in keys and len(layout.shape) > 1:
                shape = factored_shape(key, layout.shape)
                found[key] = layout.along(0, shape, 0) if kind == "leading" else columns.along(1, shape, len(shape) - 1)
        return found

    # -- what callbacks keep of parameters -----------------------------------------------------------------------------

    def _extra_sets(self: Any) -> list[str]:
        """Sets of tensors by parameter name that callbacks keep; each callback names its own in `extra_states`.

        A callback puts `checkpoint_state` of its tensors into the checkpoint under `<set>_state_dict`, and finds there
        what this rank holds of them when a checkpoint is loaded, of an ordinary file too.
        """
        return [name for callback in _host.callbacks(self._trainer()) for name in getattr(callback, "extra_states", ())]

    def held_regions(self: Any) -> dict[str, RegionLayout]:
        """Parameter name -> how what this rank holds of it lies in the whole."""
        share, regions = self._held(), self._regions()
        shapes = {share.names[id(parameter)]: parameter.shape for parameter in share.owned}
        return {name: regions.get(name) or RegionLayout.of_whole(shape) for name, shape in shapes.items()}

    def held_parts(self: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of whole tensors by name what this rank holds: copies of its parts of parameters, and its own others."""
        owned, regions = self._owned_names(), self._regions()
        parts = {name: value for name, value in tensors.items() if name in owned}
        for name in parts.keys() & regions.keys():
            if tuple(parts[name].shape) == regions[name].shape:
                parts[name] = regions[name].take(parts[name])
        return parts

    def checkpoint_state(self: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | TensorRegions]:
        """As a checkpoint takes them: this rank's tensors by parameter or buffer name, under all state-dict names."""
        owned, regions, names = self._owned_names(), self._regions(), self._held().names
        found: dict[str, Tensor | TensorRegions] = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            own = names.get(id(value), name)
            if own in tensors and own in owned:
                found[name] = TensorRegions(tensors[own], regions[own]) if own in regions else tensors[own]
        return found

    def _frozen_names(self: Any) -> set[str]:
        """State-dict names of parameters that take no gradients; alike on all ranks."""
        state = self._held().module.state_dict(keep_vars=True)
        return {name for name, value in state.items() if isinstance(value, Parameter) and not value.requires_grad}

    def _same_tensor(self: Any) -> list[list[str]]:
        """Names of each tied parameter or shared buffer, in the order of the state dict."""
        found: dict[int, list[str]] = {}
        for name, value in self._held().module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                found.setdefault(id(value), []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded directory; with `async_checkpoint` begin to, with the values of this moment.

        A URL of fsspec's, such as `s3://bucket/last.ckpt`, is written to by every rank from a local folder of its own.

        Raises:
            TypeError: For `storage_options`, which a sharded directory cannot take.
            RuntimeError: On all ranks: the writing failed on one.
        """
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}` writes checkpoints itself, so `storage_options` cannot take effect; leave it "
                "out."
            )
        strategy: BigModelStrategy = self
        path = strategy.broadcast(str(filepath))
        rest = dict(checkpoint)
        sizer = None if strategy._engine is None else strategy._engine.sizer
        found = strategy._microbatch_state if sizer is None else sizer.state_dict()
        if found is not None:
            rest[_MICROBATCH_SIZE] = found
        if same := strategy._same_tensor():
            rest[SAME_TENSOR] = same
        if self._checkpoint_format == "single":
            rest[_LATEST_METRICS] = _host_resume.metrics_of_file(strategy._trainer())
        model_state = rest.pop("state_dict")
        if self._checkpoint_parameters == "trainable":
            frozen = self._frozen_names()
            rest[LEFT_OUT] = sorted(frozen)
            for name in frozen & model_state.keys():
                del model_state[name]
        optimizer_states = rest.pop("optimizer_states", None)
        extra_states = {
            name: rest.pop(f"{name}_state_dict") for name in self._extra_sets() if f"{name}_state_dict" in rest
        }
        with strategy._phase("saving a checkpoint"):
            strategy._save(
                path,
                model_state=model_state,
                optimizer_states=optimizer_states,
                metadata=rest,
                rank_state=self._rank_state(),
                extra_states=extra_states,
                layout=strategy._layout_sizes(),
            )

    def load_checkpoint(self: Any, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a sharded directory, Lightning's own too (this rank's part), or a plain Lightning file (whole).

        Runs no code from the checkpoint unless `weights_only=False` is given.
        """
        strategy: BigModelStrategy = self
        strategy.finish_saving()
        if weights_only is None:
            weights_only = _host.asked_weights_only()
        # Lightning leaves `None` to torch, which takes fewer classes, and for remote files allows everything.
        weights_only = True if weights_only is None else weights_only
        if is_remote(checkpoint_path):
            url = strategy.broadcast(str(checkpoint_path))
            with strategy._phase("loading a checkpoint"), local_copy(url) as copy:
                return self._load_local(copy.path, weights_only, copy.fetch)  # type: ignore[no-any-return]
        return self._load_local(  # type: ignore[no-any-return]
            Path(strategy.broadcast(str(find_checkpoint(checkpoint_path)))), weights_only, None
        )

    def _load_local(
        self: Any, path: Path, weights_only: bool, fetch: Callable[[Collection[str]], None] | None
    ) -> dict[str, Any]:
        strategy: BigModelStrategy = self
        with strategy._phase("loading a checkpoint"):
            if not is_sharded_checkpoint(path):
                if path.is_dir():
                    raise ValueError(
                        f"`ckpt_path={str(path)!r}` is a directory that is no checkpoint. Give a checkpoint in it: "
                        f"{sorted(entry.name for entry in path.iterdir())[:10]}."
                    )
                plain: dict[str, Any] = read_guarded(
                    path, strategy.checkpoint_io.load_checkpoint, weights_only=weights_only
                )
                strategy._note_no_replica_state(path)
                strategy._saved_metrics = plain.pop(_LATEST_METRICS, {})
                for key in (f"{name}_state_dict" for name in strategy._extra_sets()):
                    if key in plain:
                        plain[key] = strategy.held_parts(plain[key])
                return plain
            names, owned = strategy._parameter_names(), strategy._owned_names()
            left_out = self._frozen_names() & owned
            if left_out:
                left_out -= set(read_index(path, check_files=False).model_names)
            loaded = load_sharded(
                path,
                model_names=(owned | self._buffer_names()) - left_out,
                optimizer_names=[names[id(parameter)] for parameter in strategy._held().owned],
                extra_names=dict.fromkeys(strategy._extra_sets(), owned),
                layout=strategy._layout_sizes(),
                regions=self._regions(),
                rows=self._rows() if self._tensor is None else None,
                optimizer_order=[
                    [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
                    for optimizer in strategy.optimizers
                ],
                same_tensor=strategy._same_tensor(),
                into=self._live_tensors(),
                weights_only=weights_only,
                fetch=fetch,
            )
        if lost := left_out - set(loaded.metadata.get(LEFT_OUT, ())):
            raise ValueError(f"`{path}` lacks {sorted(lost)}, which it was not told to leave out.")
        strategy._take_rank_state(path, loaded.rank_state)
        checkpoint = dict(loaded.metadata)
        checkpoint.pop(SAME_TENSOR, None)
        checkpoint["state_dict"] = loaded.model_state
        if loaded.optimizer_states:
            checkpoint["optimizer_states"] = loaded.optimizer_states
        checkpoint.update({f"{name}_state_dict": tensors for name, tensors in loaded.extra_states.items()})
        checkpoint[_IS_SHARDED] = True
        if _MICROBATCH_SIZE in checkpoint and strategy.engine.sizer is not None:
            strategy.engine.sizer.load_state_dict(checkpoint[_MICROBATCH_SIZE])
        return checkpoint

    def _live_tensors(self: Any) -> LiveTensors:
        """What this rank holds of parameters and of optimizer state: a checkpoint is read into it."""
        names, owned, held = self._held().names, self._owned_names(), self._held_now()
        model = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            if isinstance(value, Parameter) and name in owned:
                model[name] = held.get(names.get(id(value), name), value).detach()
        stepped = self._parameter_names()
        optimizers = [
            {
                stepped[id(parameter)]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
                for parameter, state in optimizer.state.items()
                if id(parameter) in stepped
            }
            for optimizer in self.optimizers
        ]
        return LiveTensors(model, optimizers)

    def load_model_state_dict(self: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy the owned values into the module."""
        tensors: Mapping[str, Any] = checkpoint["state_dict"]
        left_out = set(checkpoint.get(LEFT_OUT, ())) & self._frozen_names()
        owned = (self._owned_names() | self._buffer_names()) - left_out
        if not checkpoint.get(_IS_SHARDED):
            known = set(self.lightning_module.state_dict(keep_vars=True)) - left_out
            missing, unexpected = known - set(tensors), set(tensors) - known
            if strict and (left := missing & set(checkpoint.get(LEFT_OUT, ()))):
                raise ValueError(why_left_out("The checkpoint", left))
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
        held, regions, names = self._held_now(), self._regions(), self._held().names
        state = self._held().module.state_dict(keep_vars=True)
        parts: dict[str, Any] = {}
        rest = OrderedDict()
        for name, value in tensors.items():
            own = names.get(id(state.get(name)), name)
            if own not in held:
                rest[name] = value
                continue
            wanted = regions[own].shape if is_whole else regions[own].local_shape
            if tuple(value.shape) != tuple(wanted):
                raise ValueError(
                    f"`{name}` has shape {list(value.shape)} in the checkpoint and {list(wanted)} in the module."
                )
            parts[own] = regions[own].take(value) if is_whole else value
        versions = getattr(tensors, "_metadata", None)
        if versions is not None:
            rest._metadata = versions  # type: ignore[attr-defined]  # as torch's state dicts carry it
        left = {name for name in owned if names.get(id(state.get(name)), name) not in held}
        load_model_state(self.lightning_module, rest, left)
        with torch.no_grad():
            for name, value in parts.items():
                if value.data_ptr() != held[name].data_ptr():  # else it was read there
                    held[name].copy_(value)
        if self._sharded is not None:
            shards = self._sharded.shards
            shards.publish([p for p in shards.parameters if shards.records[id(p)].name in parts])

    def _part_of_state(
        self: Any, optimizer: Optimizer, name: str, key: str, value: Any, regions: Mapping[str, RegionLayout]
    ) -> Any:
        """What this rank steps of a state entry that was read as a whole; others stay as they are."""
        if name not in regions or not isinstance(value, Tensor):
            return value
        factored = self._factored(optimizer, name, regions[name], (key,)).get(key)
        layout = regions[name] if factored is None else factored
        is_whole = tuple(value.shape) == layout.shape != layout.local_shape
        return layout.take(value) if is_whole else value

    def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of owned parameters, and all group options."""
        sharded = self._sharded
        _host.rebuild_finetuned_groups(
            self._trainer(), (lambda p: p) if sharded is None else lambda p: sharded.shards.shard_of(p)
        )
        names = self._parameter_names()
        owned_ids = {id(parameter) for parameter in self._held().owned}
        owned = {names[key] for key in owned_ids}
        raise_other_states(self.optimizers, checkpoint["optimizer_states"])
        before = [[set(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        errors: list[tuple[float, float]] = []

        def quantized(entries: dict[str, Any]) -> dict[str, Any]:
            loaded = quantized_entries(entries)
            errors.append(requantization_error(entries, loaded))
            return loaded

        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if checkpoint.get(_IS_SHARDED):
                regions = self._regions()
                loaded = {
                    name: quantized(
                        {k: self._part_of_state(optimizer, name, k, value, regions) for k, value in entries.items()}
                    )
                    for name, entries in saved["state"].items()
                }
                load_optimizer_state(optimizer, {"state": loaded, "param_groups": saved["param_groups"]}, names, owned)
                continue
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            regions, state = self._regions(), {}
            for key, parameter in zip(keys, parameters, strict=True):
                name = names[id(parameter)]
                if name not in owned or key not in saved["state"]:
                    continue
                entries = portable_entries(saved["state"][key])
                state[key] = quantized(
                    {k: self._part_of_state(optimizer, name, k, value, regions) for k, value in entries.items()}
                )
            optimizer.load_state_dict({**saved, "state": state})
        raise_lost_options(self.optimizers, before)
        _note_quantization(errors)


def _note_quantization(errors: Sequence[tuple[float, float]]) -> None:
    """Say on the first rank that 8-bit moments are not those that were saved, and how far off. Collective."""
    found = _host.all_objects((max((e for e, _ in errors), default=0.0), max((b for _, b in errors), default=0.0)))
    worst, bound = max(error for error, _ in found), max(bound for _, bound in found)
    if worst > _FP32_ROUNDING:
        rank_zero_info(
            "8-bit optimizer moments were saved in blocks that begin elsewhere than here, and have been quantised again"
            f": they differ by up to {worst:.2g} of the largest value in their block (at most {bound:.2g})."
        )


_FP32_ROUNDING = 1e-6
_EXTRA_STATE = "_extra_state"
_IS_SHARDED = "lightning_bigmodel_sharded"
_LATEST_METRICS = "bigmodel_latest_metrics"  # which schedules follow
_MICROBATCH_SIZE = "bigmodel_microbatch_size"  # what `num_microbatches="auto"` has found
