"""What is a rank's own in a run: random states, its place in the data, gradients of a window that is not over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bigmodel import _host, _host_checkpoints, _host_last_hook, _host_resume
from lightning_bigmodel.checkpoint import read_index, read_rank_state
from lightning_bigmodel.checkpoint.index import is_foreign
from lightning_bigmodel.mesh import AXES, MeshLoader
from lightning_bigmodel.mesh.epoch import Position
from lightning_bigmodel.mesh.rng import RngState, capture_rng, restore_rng
from lightning_bigmodel.strategies.replica_syncing import ReplicaSyncing

__all__ = ["RunState"]


class RunState(ReplicaSyncing):
    """Saves it with every checkpoint, and brings a resumed run to the very place where the saved one was.

    In the same layout the resumed run is the same run, bit by bit. Another layout takes over what has a meaning there:
    each data rank the random state and the place of its like; gradients of an open window and sums of metrics only
    with as many data ranks.

    Memory in a checkpoint: 20 KiB a rank, and this rank's gradients where a window is open.
    """

    _saved_run: dict[str, Any] | None = None
    _saved_metrics: Mapping[str, Any] = {}  # the latest ones, of a file that has nothing else of it

    # -- save ----------------------------------------------------------------------------------------------------------

    def _rank_state(self) -> dict[str, Any]:
        """What only this rank has. Reading it changes nothing."""
        if self._engine is None:
            return {"num_steps": self._num_steps, "replicas": self._replica_state()}
        trainer = self._trainer()
        loader = _host.train_loader(trainer) if trainer.state.fn == TrainerFn.FITTING else None
        position = loader.position(_host.num_batches_used(trainer)) if isinstance(loader, MeshLoader) else None
        return {
            "num_steps": self.engine.num_steps,
            "num_batches_moved": self._num_batches_moved,
            "seed": self._seed,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "rng": capture_rng().plain(),
            "position": None if position is None else position.plain(),
            "window": None if self._window is None else self._window.state_dict(),
            "gradients": self._open_gradients(),
            "replicas": self._replica_state(),
            "metrics": {} if self.engine.metrics is None else self.engine.metrics.saved_states(),
            "logged": _host.logged_results(trainer),
            "shown": _host.shown_metrics(trainer),
            "row": _host_resume.logged_row(trainer),
            "due": _host_last_hook.due_hook(trainer),
            "callbacks": {
                callback.state_key: callback.rank_state_dict()
                for callback in _host.callbacks(trainer)
                if hasattr(callback, "rank_state_dict")
            },
        }

    def _open_gradients(self) -> dict[str, dict[str, Any]]:
        """Name -> gradients that the next batch adds to: of a whole parameter, and of what stands for it."""
        if self._window is None or not (self._window.is_open or self._is_manual):
            return {}
        share, sharded = self.engine.share, self._sharded
        assert share is not None
        if sharded is not None:
            sharded.shards.land()
        found: dict[str, dict[str, Any]] = {}
        for parameter in self.engine.trained_parameters():
            holder = self.engine.places.holder(parameter)
            is_shown = sharded is not None and sharded.has_shown(parameter)
            own = None if parameter.grad is None or is_shown else parameter.grad.detach().cpu()
            held = None if holder is parameter or holder.grad is None else holder.grad.detach().cpu()
            present = sharded is not None and id(parameter) in sharded.shards.present
            if own is not None or held is not None or present:
                found[share.names[id(parameter)]] = {"own": own, "held": held, "present": present}
        return found

    # -- load ----------------------------------------------------------------------------------------------------------

    def _take_rank_state(self, path: Path, own: Mapping[str, Any] | None) -> None:
        """Keep what a checkpoint has for this rank until the run starts; `own` is None if another layout saved it."""
        state, is_partial = own, False
        if state is None and is_foreign(path):
            return  # it has nothing of the kind
        if state is None:
            index = read_index(path, check_files=False)
            sizes = index.layout
            num_data_ranks = sizes.get("data_replicate", 1) * sizes.get("data_shard", 1)
            has_like = self.mesh.data_rank < num_data_ranks
            like = self.mesh.data_rank * sizes.get("tensor", 1) if has_like else 0
            state = read_rank_state(path, like) if like < index.num_ranks else {}
            is_partial = num_data_ranks != self.mesh.data_size
            self._tell_what_is_left(state, is_partial)
            state = {**state, "gradients": {}}
        self.engine.num_steps = state.get("num_steps", 0)
        if self._trainer().state.fn == TrainerFn.FITTING:
            states = [state.get("replicas")] if own is not None else self._states_of_all_replicas(path)
            self._take_replica_state(states, is_own=own is not None)
        if "rng" not in state or self._trainer().state.fn != TrainerFn.FITTING:
            return
        if is_partial:
            state = {**state, "metrics": {}, "logged": {}, "shown": {}, "callbacks": {}, "due": None}
        self._saved_run = dict(state)

    def _states_of_all_replicas(self, path: Path) -> list[Any] | None:
        """What the replicas that saved had of this rank's part of the model; None where parts were other ones."""
        if self._replica_sync is None:
            return None
        index = read_index(path, check_files=False)
        saved, own = index.layout, dict(zip(AXES, self.mesh.layout.shape, strict=True))
        if any(saved.get(axis, 1) != own[axis] for axis in own if axis != "data_replicate"):
            return None
        place = self.mesh.coordinates
        ranks = [
            ((place["pipe"] * saved["data_replicate"] + replica) * own["data_shard"] + place["data_shard"])
            * own["tensor"]
            + place["tensor"]
            for replica in range(saved["data_replicate"])
        ]
        return [read_rank_state(path, rank).get("replicas") for rank in ranks if rank < index.num_ranks]

    def _tell_what_is_left(self, state: Mapping[str, Any], is_partial: bool) -> None:
        window = state.get("window")
        left = ["gradients of an accumulation window that was not over"] if window and window["is_open"] else []
        if is_partial:
            left += ["random states of data ranks that are new", "sums of metrics within an epoch"]
        if left:
            rank_zero_info(
                f"The checkpoint was saved under another layout, which has no like here for: {', '.join(left)}. These "
                "begin anew; weights, optimizer states and schedules are taken over exactly."
            )

    def _tell_what_begins_anew(
        self, loader: Any, position: Mapping[str, Any] | None, due: Mapping[str, Any] | None
    ) -> None:
        """What no checkpoint can have: see "Checkpoints" in the README."""
        name = type(self.lightning_module).__name__
        if due is not None and "missing" in due:
            rank_zero_info(
                f"The checkpoint was saved by a callback before `{name}.on_train_batch_end` ran for its last batch, "
                f"whose {' and '.join(due['missing'])} are too large to be kept (over 16 MiB) or more than tensors and "
                "plain containers. What that call would have changed is left out: save after validations or epochs."
            )
        if position is not None and (position["was_reset"] or getattr(loader, "persistent_workers", False)):
            rank_zero_info(
                "Workers of the data loader that live on between epochs (`persistent_workers=True`) are new ones now, "
                "with the random states of those before. What a dataset keeps in them by itself (a generator of its "
                "own, a cache) is as it was made, and after the first epoch not what it would have been."
            )

    def _resume_run(self) -> None:
        """At the start of training, when all hooks before it have run. Collective where batches are sent."""
        state, self._saved_run = self._saved_run, None
        trainer = self._trainer()
        _host_checkpoints.take_up_links(trainer, self.broadcast)
        if state is None:
            metrics, self._saved_metrics = self._saved_metrics, {}
            _host.restore_shown_metrics(trainer, metrics)
            _host_resume.finish_batch(trainer, None)
            _host_resume.finish_epoch(trainer)
            _host_resume.end_restart_of_file(trainer)
            _host_resume.stay_stopped(trainer)
            return
        self._seed = state["seed"]
        self.engine.reseed(self._seed)
        self._num_batches_moved = state["num_batches_moved"]
        window = state["window"]
        if self._window is not None and window is not None:
            if not state["gradients"] and not self._is_manual:  # without them it begins anew
                window = {**window, "is_open": False, "reference": None, "total": 0.0}
            self._window.load_state_dict(window)
            self._load_gradients(state["gradients"])
        has_batches, has_end = _host.epoch_left(trainer)
        _host.restore_shown_metrics(trainer, state["shown"])
        logged = {entry["options"]["metric_attribute"] for entry in state["logged"].values()}
        # At an epoch's end the host resets the metrics that were logged.
        kept = {
            name: saved
            for name, saved in state["metrics"].items()
            if has_end or not any(name == metric or name.startswith(f"{metric}.") for metric in logged if metric)
        }
        if self.engine.metrics is not None:
            self.engine.metrics.load_states(kept)
        if has_batches and _host.follows_accumulation_schedule(trainer):
            trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        if has_end:
            _host.end_restart(trainer)
            _host.restore_logged_results(trainer, state["logged"])
        for callback in _host.callbacks(trainer):
            if hasattr(callback, "load_rank_state_dict") and callback.state_key in state["callbacks"]:
                callback.load_rank_state_dict(state["callbacks"][callback.state_key])
        loader, saved = _host.train_loader(trainer), state["position"]
        due = state["due"] if has_end else None
        self._tell_what_begins_anew(loader, state["position"], due)
        _host_resume.finish_batch(trainer, state.get("row", {}), None if due is None or "missing" in due else due)
        _host_resume.finish_epoch(trainer)
        _host_resume.stay_stopped(trainer)
        restore_rng(RngState.of_plain(state["rng"]))
        if isinstance(loader, MeshLoader) and saved is not None:
            loader.resume(Position.of_plain(saved), within_epoch=has_batches)
            with self._phase("going on within the data"):
                _host.iterate_again(trainer)
            restore_rng(RngState.of_plain(state["rng"]))

    def _load_gradients(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        share, sharded = self.engine.share, self._sharded
        assert share is not None
        for parameter in self.engine.trained_parameters():
            found = saved.get(share.names[id(parameter)])
            if found is None:
                continue
            holder = self.engine.places.holder(parameter)
            if found["own"] is not None:
                parameter.grad = found["own"].to(parameter.device)
            if found["held"] is not None:
                holder.grad = found["held"].to(holder.device)
            if found["present"] and sharded is not None:
                sharded.shards.present.add(id(parameter))
