"""The only place that touches private or moving API of torch and Lightning.

Each entry says what it stands for and for which versions it was checked. Lightning is imported inside functions only,
so that the plain-torch packages can use this module.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# FakeTensorMode has no public home (torch 2.11 - 2.14).
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "after_configure_model",
    "after_configure_optimizers",
    "all_gather_flat",
    "alias_below_autograd",
    "all_objects",
    "asked_weights_only",
    "callbacks",
    "compute_dtype",
    "default_store",
    "end_restart",
    "end_skipped_step",
    "epoch_left",
    "first_loader",
    "follow_finetuning",
    "follow_toggles",
    "follows_accumulation_schedule",
    "forget_after_configure",
    "forget_workers",
    "function_modes",
    "give_back_sampling",
    "graph_break",
    "has_workers",
    "host_attributes",
    "in_backward",
    "init_process_group",
    "is_fake",
    "iterate_again",
    "load_loader_states",
    "logged_results",
    "logging_from",
    "looks_at_gradients",
    "makes_results",
    "mark_schedule_initialized",
    "not_moved",
    "num_batches_used",
    "num_evaluation_batches",
    "optimizers_to_device",
    "plain_batch_sampler",
    "queue_after_backward",
    "rebuild_finetuned_groups",
    "reduce_scatter_flat",
    "replace_norm_clipping",
    "restore_logged_results",
    "restore_norm_clipping",
    "restore_shown_metrics",
    "script_launcher",
    "set_device",
    "set_device_mesh",
    "set_dtype",
    "shown_metrics",
    "silence_deprecations",
    "silence_sync_advice",
    "silent_loggers",
    "skip_step",
    "step_arguments",
    "take_over_sampling",
    "traced",
    "train_loader",
    "transfer_batch",
    "unfollow_finetuning",
    "unfollow_toggles",
    "use_own_precision",
    "without_modes",
]


def default_store() -> Any:
    """The store of the default process group (torch 2.11 - 2.14)."""
    return dist.distributed_c10d._get_default_store()


def mark_schedule_initialized(schedule: Any) -> None:
    """Tell a schedule that its stages need no metadata exchange and no warm-up.

    Our stages know every shape beforehand. The flags are private: `_stage_initialized` / `_stages_initialized` up to
    torch 2.12, `_stage_forward_initialized` ... from 2.13 on. Setting one that a version does not read is harmless.
    """
    for flag in (
        "_stage_initialized",
        "_stages_initialized",
        "_stage_forward_initialized",
        "_stage_backward_initialized",
        "_stages_forward_initialized",
        "_stages_backward_initialized",
    ):
        setattr(schedule, flag, True)


@contextmanager
def logging_from(module: Any, hook: str) -> Iterator[None]:
    """`module.log` within takes the defaults of that hook (Lightning 2.5 to 2.6)."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def all_gather_flat(output: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    """Start an all-gather of one flat tensor a rank.

    torch 2.13 renamed `all_gather_into_tensor` and warns of the old name; versions before have only that.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, own, group=group, async_op=True)


def reduce_scatter_flat(output: torch.Tensor, everything: torch.Tensor, group: Any) -> Any:
    """Start a reduce-scatter (sum) of one flat tensor; renamed in torch 2.13 like `all_gather_flat`."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, everything, group=group, async_op=True)


_clippers: list[Any] = []


def add_clipper(clipper: Any) -> None:
    """Let `clipper.clip_norm` and `.clip_value` have the first word in torch's two functions that clip gradients.

    They take the arguments of those and return NotImplemented for parameters that are not theirs. What is replaced is
    the function inside of torch's wrapper, as users import these by name; `remove_clipper` of the last one undoes it.
    """
    _clippers.append(clipper)
    if len(_clippers) == 1:
        _set_clipping(_dispatching("clip_norm", _CLIP_NORM), _dispatching("clip_value", _CLIP_VALUE))


def remove_clipper(clipper: Any) -> None:
    """Undo `add_clipper`; does nothing where it was not called."""
    if clipper in _clippers:
        _clippers.remove(clipper)
        if not _clippers:
            _set_clipping(_CLIP_NORM, _CLIP_VALUE)


def _inner(function: Any) -> tuple[Any, Any]:
    """What torch's `no_grad` wrapper calls, and the cell that holds it."""
    inner = function.__wrapped__
    return inner, next(cell for cell in function.__closure__ if cell.cell_contents is inner)


(_CLIP_NORM, _NORM_CELL), (_CLIP_VALUE, _VALUE_CELL) = (
    _inner(torch.nn.utils.clip_grad_norm_),
    _inner(torch.nn.utils.clip_grad_value_),
)


def _set_clipping(norm: Any, value: Any) -> None:
    _NORM_CELL.cell_contents, _VALUE_CELL.cell_contents = norm, value


def _dispatching(name: str, original: Any) -> Any:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for clipper in reversed(_clippers):
            result = getattr(clipper, name)(given, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return original(given, *args, **kwargs)

    return clip


# Method of a process group -> what it does, and the place of the argument that has the payload. Names differ between
# torch 2.11 and 2.14: a version has some of those that are in one line.
_GROUP_METHODS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all_reduce", 0)),
    **dict.fromkeys(("reduce",), ("reduce", 0)),
    **dict.fromkeys(("broadcast",), ("broadcast", 0)),
    **dict.fromkeys(("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"), ("all_gather", 1)),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), ("all_gather", 1)),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), ("reduce_scatter", 1)),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ("reduce_scatter", 1)),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("all_to_all", 1)),
    **dict.fromkeys(("gather",), ("gather", 1)),
    **dict.fromkeys(("scatter",), ("scatter", 0)),
    **dict.fromkeys(("send",), ("send", 0)),
    **dict.fromkeys(("recv", "recv_anysource"), ("recv", 0)),
    **dict.fromkeys(("barrier", "monitored_barrier"), ("barrier", 0)),
}
_group_watchers: list[Callable[[Any, str, Any], None]] = []
_group_methods: dict[str, Any] = {}  # what was replaced


def watch_process_groups(watcher: Callable[[Any, str, Any], None]) -> None:
    """Call `watcher(group, kind, payload)` before each collective or message that Python issues, on its thread.

    Replaces methods of `torch.distributed.ProcessGroup`, through which all functions of `torch.distributed` go, as long
    as anything watches. Collectives that C++ issues by itself are not seen.
    """
    _group_watchers.append(watcher)
    if len(_group_watchers) == 1:
        for name, (kind, place) in _GROUP_METHODS.items():
            if name in vars(dist.ProcessGroup):
                _group_methods[name] = vars(dist.ProcessGroup)[name]
                setattr(dist.ProcessGroup, name, _watched_method(_group_methods[name], kind, place))


def unwatch_process_groups(watcher: Callable[[Any, str, Any], None]) -> None:
    """Undo `watch_process_groups`; does nothing where it was not called."""
    if watcher in _group_watchers:
        _group_watchers.remove(watcher)
        if not _group_watchers:
            for name, method in _group_methods.items():
                setattr(dist.ProcessGroup, name, method)
            _group_methods.clear()


def _watched_method(method: Any, kind: str, place: int) -> Any:
    bound = method.__get__(None, dist.ProcessGroup)

    def watched(group: Any, *args: Any, **kwargs: Any) -> Any:
        payload = args[place] if place < len(args) else None
        for watcher in _group_watchers:
            watcher(group, kind, payload)
        return bound(group, *args, **kwargs)

    return watched


def ddp_buckets(module: Any) -> list[int] | None:
    """Bytes of each bucket that DDP's reducer sums by itself; None where a hook of Python's sums them.

    Private in torch 2.11 - 2.14. The sizes are known after the first backward, and change once, after the second.
    """
    if module._comm_hooks:
        return None
    found = module._get_ddp_logging_data()
    return [int(size) for size in (found.get("rebuilt_bucket_sizes") or found["bucket_sizes"]).split(",")]


def device_for_numbers(group: Any, device: torch.device | None) -> torch.device:
    """Where a few numbers of the host are summed over `group`: there if the group communicates there, else `device`."""
    kinds = (group or dist.distributed_c10d._get_default_group())._device_types
    host = torch.device("cpu")
    return host if host in kinds or device is None else device


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread (torch 2.11 - 2.14; no public equal)."""
    return bool(torch._C._current_graph_task_id() != -1)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward in progress ends (torch 2.11 - 2.14; FSDP2 uses the same call)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def forward_hooks(module: Any) -> tuple[list[tuple[Any, bool]], list[tuple[Any, bool]]]:
    """A module's forward pre-hooks and forward hooks, each with whether it takes keyword arguments too."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    takes_before, takes_after = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs
    return (
        [(hook, key in takes_before) for key, hook in before.items()],
        [(hook, key in takes_after) for key, hook in after.items()],
    )


def checkpoint_region() -> Any:
    """The outermost `torch.utils.checkpoint.checkpoint` call around this code, as an object to compare, or None."""
    region = None
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "checkpoint" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            region = frame
        frame = frame.f_back
    return region


def asked_weights_only() -> bool | None:
    """What the running `Trainer.fit(..., weights_only=...)` (or validate, test, predict) was given; None if nothing.

    Lightning 2.6.0 to 2.6.6 does not hand it on to a strategy that restores after its setup, as ours does
    (`Trainer._run`, the second call of `_restore_modules_and_callbacks`).
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_globals.get("__name__") == "lightning.pytorch.trainer.trainer":
            given: bool | None = frame.f_locals.get("weights_only")
            return given
        frame = frame.f_back
    return None


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are active, outermost first (torch 2.11 - 2.14)."""
    return list(torch.overrides._get_current_function_mode_stack())


def storage_reference(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage, equal for equal storages; while it is held no other gets the address.

    `StorageWeakRef` has no public home (torch 2.11 - 2.14).
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """What a `TorchDispatchMode` may keep of a result: without its graph, with its version (torch 2.11 - 2.14)."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def makes_results(operator: Any) -> bool:
    """Whether torch runs an operator as such, and what it gives is new memory (torch 2.11 - 2.14)."""
    schema, name = operator._schema, operator.name()
    if not torch._C._dispatch_has_kernel(name) or schema.is_mutable or name.startswith("c10d::"):
        return False  # messages write into tensors, whatever their schemas say
    if any(result.alias_info is not None for result in schema.returns):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter, frozen or not, or a view of one, as a linear layer keeps of its weight."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks on the gradient of `tensor` are registered."""
    return bool(tensor._backward_hooks)


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, tensors are real though a `FakeTensorMode` or another dispatch mode is on (torch 2.11 - 2.14)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a shape but no data."""
    return isinstance(tensor, FakeTensor)


# -- Lightning (2.6) ---------------------------------------------------------------------------------------------------


def silence_deprecations() -> None:
    """Hide what Lightning 2.6 calls and newer torch deprecates: every rank of every run would print it."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def init_process_group(strategy: Any, backend: str | None, timeout: timedelta | None) -> None:
    """Start torch.distributed for a strategy, as Lightning's own strategies do.

    Theirs also go back to the seed of `seed_everything`; then a shuffled loader would give another order than in one
    process. On CUDA the default takes gloo along: batches and Python objects are exchanged as CPU tensors.
    """
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only

    environment = strategy.cluster_environment
    environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
    environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    for only in (rank_zero_only, fabric_rank_zero_only):
        only.rank = strategy.global_rank  # type: ignore[attr-defined]  # set by every strategy this way
    device = strategy.root_device
    if backend is None:
        backend = _get_default_process_group_backend_for_device(device)
        if device.type == "cuda":
            backend = f"cpu:gloo,cuda:{backend}"
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device.type != "cpu":
        options["device_id"] = device
    _init_dist_connection(environment, backend, **options)


def script_launcher(environment: Any, num_processes: int, num_nodes: int) -> Any:
    """What starts the user's script once more for each further rank of this node."""
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher(environment, num_processes, num_nodes)


def set_device_mesh(module: pl.LightningModule, device_mesh: Any) -> None:
    """What `LightningModule.device_mesh` answers."""
    module._device_mesh = device_mesh


def set_device(module: pl.LightningModule, device: torch.device) -> None:
    """What `LightningModule.device` answers, for a strategy that moves parameters by itself."""
    module._device = device


def after_configure_model(module: pl.LightningModule, action: Callable[[], object]) -> None:
    """Call `action` once when the module's next `configure_model` is over, whether or not it has one of its own.

    The Trainer calls that after all `setup` hooks and before the strategy's; a callback has no hook in between
    (`Trainer._run`, 2.6). What several callbacks ask for runs in the order they asked.
    """
    _after(module, "configure_model", lambda _: action())


def after_configure_optimizers(module: pl.LightningModule, action: Callable[[Any], None]) -> None:
    """Call `action` once with what the module's next `configure_optimizers` returns; as `after_configure_model`."""
    _after(module, "configure_optimizers", action)


def _after(module: pl.LightningModule, name: str, action: Callable[[Any], object]) -> None:
    before = module.__dict__.get(name)

    # Lightning compares code objects to see whether a hook is overridden: a plain function always is.
    def call_both() -> Any:
        if before is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before
        result = getattr(module, name)()
        action(result)
        return result

    module.__dict__[name] = call_both


def forget_after_configure(module: pl.LightningModule) -> None:
    """Take off what `after_configure_model` and `after_configure_optimizers` were asked for and did not come to."""
    for name in ("configure_model", "configure_optimizers"):
        if getattr(module.__dict__.get(name), "__name__", "") == "call_both":
            del module.__dict__[name]


@contextmanager
def not_moved(module: pl.LightningModule | None) -> Iterator[None]:
    """Leave a module without values where it is: `cpu()` in `Strategy.teardown` (2.6) would hide why a run failed."""
    if module is None or not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        yield
        return
    module.__dict__["cpu"] = lambda: module
    try:
        yield
    finally:
        del module.__dict__["cpu"]


@cache
def host_attributes() -> frozenset[str]:
    """Attributes every LightningModule has of its own."""
    import lightning.pytorch as pl

    return frozenset(pl.LightningModule().__dict__) | {"log", "_forward_module"}


def replace_norm_clipping(precision: Any, clip: Callable[[Any, float], None], before_step: Callable[[], None]) -> None:
    """Let a precision plugin clip by a norm over all ranks, and call `before_step` when all hooks have run.

    `clip(optimizer, clip_value)` is called in place of its own. The hooks before a step are called by a private method
    of Lightning 2.6 (`Precision._after_closure`).

    Lightning 2.6 also refuses to clip for fused optimizers in mixed precision where no scaler is in use
    (Lightning#21435): without one, gradients are what they are.
    """
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision

    precision.__dict__["clip_grad_by_norm"] = clip
    after_hooks = precision._after_closure

    def after_closure(model: Any, optimizer: Any) -> None:
        after_hooks(model, optimizer)
        before_step()

    precision.__dict__["_after_closure"] = after_closure
    if isinstance(precision, MixedPrecision) and precision.scaler is None:
        precision.__dict__["clip_gradients"] = MethodType(Precision.clip_gradients, precision)


def restore_norm_clipping(precision: Any) -> None:
    """Undo `replace_norm_clipping`."""
    precision.__dict__.pop("clip_grad_by_norm", None)
    precision.__dict__.pop("clip_gradients", None)
    precision.__dict__.pop("_after_closure", None)


def compute_dtype(precision: Any) -> torch.dtype | None:
    """The type that mixed precision casts operands to; None without mixed precision."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    if isinstance(precision, MixedPrecision):
        return torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
    return precision.dtype if getattr(precision, "is_mixed", False) else None


def use_own_precision(strategy_class: type, make: Callable[[Any], Any], names: Collection[str]) -> None:
    """Let `Trainer(precision=name)` with a strategy of this class take the plugin that `make(name)` gives.

    Lightning 2.6 makes the plugin in a private method of its connector, after it has turned "16-mixed" on the CPU
    into "bf16-mixed"; no hook of a strategy is asked before.
    """
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    make_default = _AcceleratorConnector._check_and_init_precision

    @wraps(make_default)
    def check_and_init_precision(self: Any) -> Any:
        is_own = isinstance(getattr(self, "strategy", None), strategy_class)
        if is_own and not self._precision_plugin_flag and self._precision_flag in names:
            return make(self._precision_flag)
        return make_default(self)

    _AcceleratorConnector._check_and_init_precision = check_and_init_precision  # type: ignore[method-assign]


def set_dtype(root: torch.nn.Module, dtype: torch.dtype) -> None:
    """What `module.dtype` answers, of Lightning's modules in `root`, for a plugin that casts parameters by itself."""
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

    for module in root.modules():
        if isinstance(module, _DeviceDtypeModuleMixin):
            module._dtype = dtype


def graph_break(reason: str) -> None:
    """Let `torch.compile` end a graph here; outside of a trace nothing happens (torch 2.11 - 2.14)."""
    torch._dynamo.graph_break(reason)


def skip_step(trainer: pl.Trainer) -> None:
    """Let the optimizer step that is under way not count: not in `global_step`, for schedulers, nor as a logger's step.

    Lightning 2.6 counts a step once the hook returns and then moves learning-rate schedulers, whether the precision
    plugin stepped or not (Lightning#18828).
    """
    loop = trainer.fit_loop.epoch_loop
    if not trainer.lightning_module.automatic_optimization:
        progress: Any = loop.manual_optimization.optim_step_progress
        trackers = [progress.total, progress.current]
    else:
        step = loop.automatic_optimization.optim_progress.optimizer.step
        trackers = [step.total, step.current]
        update = loop.update_lr_schedulers

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step":
                update(interval, update_plateau_schedulers=update_plateau_schedulers)
            elif update_plateau_schedulers:  # the last thing before the batch counts
                loop._batches_that_stepped -= 1
                end_skipped_step(trainer)

        loop.__dict__["update_lr_schedulers"] = update_lr_schedulers
    for tracker in trackers:  # both are counted up again when the hook returns
        tracker.ready -= 1
        tracker.completed -= 1


def end_skipped_step(trainer: pl.Trainer) -> None:
    """Undo what `skip_step` has put in place. Does nothing twice."""
    trainer.fit_loop.epoch_loop.__dict__.pop("update_lr_schedulers", None)


def all_objects(own: Any) -> list[Any]:
    """The objects of all ranks, or the own one where there are no others. Collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def optimizers_to_device(optimizers: Sequence[Any], device: torch.device) -> None:
    """Move optimizer states."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(list(optimizers), device)


def first_loader(trainer: pl.Trainer) -> tuple[Any, str]:
    """The first data loader of the run that is about to start, set up, and the name of the step that takes its batches.

    The loops keep what is set up here, as they do when `trainer.estimated_stepping_batches` is read.
    """
    from lightning.pytorch.trainer.states import TrainerFn

    loops: dict[Any, tuple[Any, str]] = {
        TrainerFn.FITTING: (trainer.fit_loop, "training_step"),
        TrainerFn.VALIDATING: (trainer.validate_loop, "validation_step"),
        TrainerFn.TESTING: (trainer.test_loop, "test_step"),
        TrainerFn.PREDICTING: (trainer.predict_loop, "predict_step"),
    }
    assert trainer.state.fn is not None
    loop, step_name = loops[trainer.state.fn]
    loop.setup_data()
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    if step_name == "training_step" and len(loaders) > 1:
        raise ValueError(
            f"The training data comes from {len(loaders)} loaders at once; a pipeline is cut on the batch of one. "
            "Combine them into one dataset or one loader whose batches hold all parts."
        )
    return (loaders[0] if loaders else None), step_name


def why_no_first_loader(trainer: pl.Trainer) -> str:
    """Why there is no one loader whose batches `first_loader` could give; or ""."""
    from lightning.pytorch.trainer.states import TrainerFn

    if trainer.state.fn != TrainerFn.FITTING:
        return ""
    trainer.fit_loop.setup_data()
    loaders = trainer.fit_loop._combined_loader
    num_loaders = 0 if loaders is None else len(loaders.flattened)
    return "" if num_loaders == 1 else f"its training data comes from {num_loaders} loaders"


def callbacks(trainer: pl.Trainer) -> list[Any]:
    """The Trainer's callbacks; an attribute set at run time, which type checkers do not see."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def set_callbacks(trainer: pl.Trainer, chosen: list[Any]) -> None:
    """The Trainer's callbacks in their order; not within one of their hooks, which goes from one to the next."""
    trainer.callbacks[:] = chosen  # type: ignore[attr-defined]


def evaluation_loader(trainer: pl.Trainer, index: int) -> Any:
    """The loader of that index in the evaluation that runs."""
    combined = trainer._evaluation_loop._combined_loader
    return None if combined is None else combined.flattened[index]


def num_evaluation_batches(trainer: pl.Trainer) -> float:
    """Batches this rank will see in the evaluation or prediction that starts, over all loaders; may be infinite."""
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return float(sum(loop.max_batches))


def looks_at_gradients(trainer: pl.Trainer) -> bool:
    """Whether the module or a callback has a hook between the gradients' completion and the optimizer step.

    Callbacks of ours that have such a hook for Lightning's own strategies only say so by `sees_parameter_grads`.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.model_helpers import is_overridden

    module_hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    callback_hooks = ("on_after_backward", "on_before_optimizer_step")
    return any(is_overridden(hook, trainer.lightning_module) for hook in module_hooks) or any(
        is_overridden(hook, callback, pl.Callback)
        for callback in callbacks(trainer)
        for hook in callback_hooks
        if getattr(callback, "sees_parameter_grads", True)
    )


def follow_finetuning(trainer: pl.Trainer, whole_of: Callable[[Any], Any]) -> None:
    """Let finetuning callbacks find the module's parameters in optimizers that hold something in their place.

    `BaseFinetuning` of Lightning 2.6 looks up what is in an optimizer's groups among the module's parameters.
    """
    from lightning.pytorch.callbacks import BaseFinetuning

    original = BaseFinetuning._apply_mapping_to_param_groups

    def apply(groups: list[dict[str, Any]], mapping: dict[Any, Any]) -> list[dict[str, Any]]:
        return original([{**group, "params": [whole_of(p) for p in group["params"]]} for group in groups], mapping)

    for callback in callbacks(trainer):
        if isinstance(callback, BaseFinetuning):
            callback.__dict__["_apply_mapping_to_param_groups"] = apply


def rebuild_finetuned_groups(trainer: pl.Trainer, held_of: Callable[[Any], Any]) -> None:
    """Let finetuning callbacks build the groups of a saved run again, before optimizer states are loaded.

    `BaseFinetuning` of Lightning 2.6 does so in `on_fit_start`, which has passed where a strategy loads checkpoints
    after the set-up. What it had put into a further group was trained.
    """
    from lightning.pytorch.callbacks import BaseFinetuning

    for callback in callbacks(trainer):
        if not (isinstance(callback, BaseFinetuning) and callback._restarting):
            continue
        numbers = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        followed = callback.__dict__.pop("_apply_mapping_to_param_groups", None)
        callback.on_fit_start(trainer, trainer.lightning_module)
        if followed is not None:
            callback.__dict__["_apply_mapping_to_param_groups"] = followed
        for optimizer, number in zip(trainer.optimizers, numbers, strict=True):
            for index, group in enumerate(optimizer.param_groups):
                held = [held_of(parameter) for parameter in group["params"]]
                if index >= number:
                    for parameter in (*group["params"], *held):
                        parameter.requires_grad = True
                group["params"] = held


def unfollow_finetuning(trainer: pl.Trainer) -> None:
    """Undo `follow_finetuning`."""
    for callback in callbacks(trainer):
        callback.__dict__.pop("_apply_mapping_to_param_groups", None)


def follow_toggles(module: pl.LightningModule, copy: Callable[[], None]) -> None:
    """Call `copy` after the module's `toggle_optimizer` and `untoggle_optimizer`."""

    def followed(name: str) -> Callable[..., None]:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            copy()

        return call

    module.__dict__.update({name: followed(name) for name in _TOGGLES})


def unfollow_toggles(module: pl.LightningModule) -> None:
    """Undo `follow_toggles`."""
    for name in _TOGGLES:
        module.__dict__.pop(name, None)


_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def train_loader(trainer: pl.Trainer) -> Any:
    """The training loader, if there is exactly one."""
    combined = trainer.fit_loop._combined_loader
    return combined.flattened[0] if combined is not None and len(combined.flattened) == 1 else None


def num_batches_used(trainer: pl.Trainer) -> int:
    """Training batches of this epoch that a checkpoint saved now counts as done (Lightning 2.6 keeps it private)."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def epoch_left(trainer: pl.Trainer) -> tuple[bool, bool]:
    """Of the epoch a resumed run begins in, asked when training starts: has it batches left, has it an end to come.

    Lightning 2.6 goes on with the end of an epoch whose last batch is done where the checkpoint was saved after
    validation; where it was saved in `on_train_batch_end`, `_host_resume.finish_batch` sees to it.
    """
    loop = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    is_done = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
    within = bool(loop.restarted_mid_epoch)
    return within and not is_done, within


def end_restart(trainer: pl.Trainer) -> None:
    """Let the epoch a run resumes in end as any other.

    Lightning 2.6 leaves schedulers that follow a metric alone there, as checkpoints have no metrics; ours do.
    """
    trainer.fit_loop._restarting = False


def follows_accumulation_schedule(trainer: pl.Trainer) -> bool:
    """Whether a callback sets the window at the start of each epoch, which a resumed epoch does not have."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks(trainer))


def has_workers(loader: Any) -> bool:
    """Whether a DataLoader's persistent workers are there already, and will not be seeded again (torch 2.11 - 2.14)."""
    return getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None


def forget_workers(loader: Any) -> None:
    """Let a DataLoader start new persistent workers."""
    if has_workers(loader):
        loader._iterator = None


def living_iterator(loader: Any) -> Any:
    """The iterator of a DataLoader whose persistent workers are there already; None without."""
    return loader._iterator if has_workers(loader) else None


def has_batches_on_their_way(loader: Any) -> bool:
    """Whether persistent workers load batches of an epoch that was cut short (torch 2.11 - 2.14)."""
    iterator = living_iterator(loader)
    return iterator is not None and iterator._tasks_outstanding > 0


def change_results(iterator: Any, change: Callable[[Any], Any]) -> None:
    """Let what workers give pass through a function, before a DataLoader's iterator sees it (torch 2.11 - 2.14)."""
    own = weakref.ref(iterator)  # not a cycle: an iterator that is dropped ends its workers at once
    get_data = type(iterator)._get_data

    def get_changed() -> tuple[Any, Any]:
        index, result = get_data(own())
        return index, change(result)

    iterator._get_data = get_changed


@contextmanager
def without_samples(loader: Any) -> Iterator[None]:
    """Let a DataLoader be iterated as if it had no sample (torch 2.11 - 2.14 refuse to set samplers)."""
    kept = {name: loader.__dict__.get(name) for name in ("sampler", "batch_sampler")}
    loader.__dict__.update({name: () for name, sampler in kept.items() if sampler is not None})
    try:
        yield
    finally:
        loader.__dict__.update({name: sampler for name, sampler in kept.items() if sampler is not None})


def take_sampler_again(iterator: Any, loader: Any) -> None:
    """Let the next epochs of an iterator be those of the loader's sampler (torch 2.11 - 2.14)."""
    iterator._index_sampler = loader._index_sampler


def iterate_again(trainer: pl.Trainer) -> None:
    """Let the training loop take a new iterator; it took one before the checkpoint was read (Lightning 2.6)."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    iter(fetcher)


_LOGGED = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def logged_results(trainer: pl.Trainer) -> dict[str, Any]:
    """What training has logged for the end of the epoch, as plain values and tensors (Lightning 2.6)."""
    found: dict[str, Any] = {}
    for key, entry in trainer.fit_loop.epoch_loop._results.items():
        meta = entry.meta
        if entry.has_reset or (not entry.is_tensor and meta.metric_attribute is None):
            continue
        found[key] = {
            "options": {name: getattr(meta, name) for name in _LOGGED},
            "reduction": meta.reduce_fx.__name__,
            "sync": (meta.sync.should, meta.sync.rank_zero_only),
            "value": entry.value.detach().cpu().clone() if entry.is_tensor else None,
            "weight": entry.cumulated_batch_size.cpu().clone() if hasattr(entry, "cumulated_batch_size") else None,
        }
    return found


def restore_logged_results(trainer: pl.Trainer, saved: dict[str, Any]) -> None:
    """Put back what `logged_results` gave, before anything is logged; metrics have their states again by then."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    module, device = trainer.lightning_module, trainer.strategy.root_device
    # The first batch of a loop resets what it logs; with this it passes for a later one.
    trainer._logger_connector._first_loop_iter = True
    results = trainer.fit_loop.epoch_loop._results
    for key, old in saved.items():
        meta = _Metadata(**old["options"], reduce_fx=old["reduction"])
        should, rank_zero_only = old["sync"]
        meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
        attribute = meta.metric_attribute
        value: Any = old["value"].to(device) if attribute is None else module.get_submodule(attribute)
        entry = results[key] = _ResultMetric(meta, is_tensor=attribute is None).to(device)
        entry.value, entry._update_count = value, 1
        if old["weight"] is not None:
            entry.cumulated_batch_size = old["weight"].to(device)


_SHOWN = {"_callback_metrics": "callback", "_logged_metrics": "log", "_progress_bar_metrics": "pbar"}


def shown_metrics(trainer: pl.Trainer) -> dict[str, Any]:
    """The latest values of what was logged, for callbacks, loggers and the progress bar (Lightning 2.6).

    Those of the batch or the epoch that ends now too, which Lightning puts there after the hooks. Collective at the end
    of an epoch, where means are made.
    """
    connector = trainer._logger_connector
    latest: Any = connector.metrics if trainer.training and trainer._results else {}
    found = {}
    for name, kind in _SHOWN.items():
        values = {**getattr(connector, name), **latest.get(kind, {})}.items()
        found[name] = {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in values}
    return found


def restore_shown_metrics(trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
    """Put back what `shown_metrics` gave."""
    device = trainer.strategy.root_device
    for name, values in saved.items():
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        getattr(trainer._logger_connector, name).update(moved)


def load_loader_states(trainer: pl.Trainer) -> None:
    """Hand saved loader states to loaders that were set up before the checkpoint was read; does nothing twice."""
    trainer.fit_loop._load_combined_loader_states()


def take_over_sampling(trainer: pl.Trainer) -> bool:
    """Keep the Trainer from putting samplers of its own into loaders; returns whether the user wants data sharded.

    Its samplers repeat samples in evaluation and reshuffle samplers of the user's own (Lightning#21447).
    """
    wanted = bool(trainer._accelerator_connector.use_distributed_sampler)
    trainer._accelerator_connector.use_distributed_sampler = False
    return wanted


def give_back_sampling(trainer: pl.Trainer, wanted: bool) -> None:
    """Undo `take_over_sampling`."""
    trainer._accelerator_connector.use_distributed_sampler = wanted


def plain_batch_sampler(loader: Any) -> None:
    """Take off the wrapper that Lightning puts around a prediction loader's batch sampler; it hides what to shard by.

    `DataLoader` forbids setting the attribute, so it is put into the instance's dict.
    """
    inner = getattr(getattr(loader, "batch_sampler", None), "_batch_sampler", None)
    if inner is not None and type(loader.batch_sampler).__name__ == "_IndexBatchSamplerWrapper":
        loader.__dict__["batch_sampler"] = inner


def silence_sync_advice(name: str) -> None:
    """Keep Lightning from advising `sync_dist=True` for a value that is that of all ranks already."""
    from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

    warning_cache.add(
        f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)` when logging on epoch level in "
        "distributed setting to accumulate the metric across devices."
    )


def transfer_batch(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch as a step sees it: converted, through the user's transfer hooks, on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def step_arguments(step: Callable[..., Any], rest: Sequence[Any]) -> Sequence[Any]:
    """The arguments after the batch that a step takes."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    if rest and not is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return ()
    return rest


@contextmanager
def traced(trainer: pl.Trainer) -> Iterator[None]:
    """For steps that are traced and not run: loggers that keep nothing, and blocks as they are, not compiled."""
    with silent_loggers(trainer), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def silent_loggers(trainer: pl.Trainer) -> Iterator[None]:
    """Loggers that take everything and keep nothing, for steps that are traced and not run."""
    from lightning.pytorch.loggers.logger import DummyLogger

    loggers = trainer.loggers
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
