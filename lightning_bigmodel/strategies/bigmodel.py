"""`BigModelStrategy`: the wiring between Lightning's Trainer and the plain-torch packages.

One training batch, every hook in place (`M` micro-batches, stages of this rank in schedule order):

    batch = next(loader)                       # first rank of a pipeline loads, the others receive
    batch_to_device                            # the same random numbers on every rank of a pipeline
    on_train_batch_start
    optimizer_step(closure):                   # without optimizer step while accumulating
        training_step:                         # Strategy.training_step
            split the batch into M micro-batches
            run the schedule:                  # forwards and backwards; parameter.grad set aside
                stage forward: the user's whole training_step, gated to the stage's blocks; self.log recorded
                stage backward                 # what watches the micro-batch's own gradient sees it here, whole
            gather losses, logs, outputs and attribute changes
            self.log replayed once             # progress bar, loggers, monitors see what one process would log
            return one loss                    # its graph is one node
        on_before_zero_grad, optimizer.zero_grad
        on_before_backward, loss.backward      # the set-aside gradients enter parameter.grad, weighted
        synchronize gradients                  # last batch of the window: tied parameters, data ranks, total weight;
                                               # from ZeRO stage 2 on they have become rows in each backward
        on_after_backward
        on_before_optimizer_step
        clip gradients                         # norm over all ranks of the pipeline
    optimizer.step                             # every rank: the parameters, or rows of them, it owns
    publish                                    # ZeRO stages 1 and 2: all ranks get the new rows of all parameters
    on_train_batch_end
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_bigmodel import _host, _host_checkpoints
from lightning_bigmodel.checkpoint import interrupted_names, newest_complete, saved_hyper_parameters
from lightning_bigmodel.mesh import Layout, MeshLoader, build_pipe_subgroups, build_rank_mesh, seeded_rng
from lightning_bigmodel.mesh.failures import FailureGuard, RankFailedError
from lightning_bigmodel.mesh.rng import capture_rng, derive_seed, restore_rng
from lightning_bigmodel.pipeline.batch_norm import check_deferral
from lightning_bigmodel.pipeline.blocks import check_blocks
from lightning_bigmodel.pipeline.engine import PipelineEngine
from lightning_bigmodel.pipeline.gradients import GradientPlaces, GradientWindow
from lightning_bigmodel.pipeline.memory_limit import MemoryLimit
from lightning_bigmodel.pipeline.microbatch import MicrobatchWeight, check_weight
from lightning_bigmodel.pipeline.microbatch_size import MicrobatchSizer
from lightning_bigmodel.pipeline.ownership import broadcast_module, broadcast_tensors
from lightning_bigmodel.pipeline.schedules import check_schedule
from lightning_bigmodel.pipeline.token_weight import TokenWeight
from lightning_bigmodel.precision.bigmodel import PRECISIONS, BigModelPrecision
from lightning_bigmodel.recompute.noting import noting_hidden
from lightning_bigmodel.replicas.all_reduce import all_reduce_sum
from lightning_bigmodel.replicas.sync import GradientSync, ReplicaSync
from lightning_bigmodel.sharding.fused import check_fused, choose_fused
from lightning_bigmodel.sharding.materialize import Materializer, has_meta_tensors
from lightning_bigmodel.sharding.offload import OffloadPolicy
from lightning_bigmodel.sharding.optimizers import adapt_optimizer, check_parts
from lightning_bigmodel.sharding.plan_check import has_pairs
from lightning_bigmodel.sharding.tensor import check_tensor_plan
from lightning_bigmodel.sharding.units import find_blocks
from lightning_bigmodel.strategies.checkpoints import CheckpointMixin
from lightning_bigmodel.strategies.collectives import CollectiveHooks
from lightning_bigmodel.strategies.combinations import (
    check_callbacks,
    check_checkpoint_settings,
    check_host_parts,
    check_memory_limit,
    check_module,
    check_op_lists,
    check_optimizers,
    check_precision,
    check_process_group_settings,
    check_quantized_layers,
)
from lightning_bigmodel.strategies.compiled import CompiledBlocks, check_compile_setting
from lightning_bigmodel.strategies.manual import ManualOptimization
from lightning_bigmodel.strategies.memory import resident_bytes
from lightning_bigmodel.strategies.predictions import gather_predictions
from lightning_bigmodel.strategies.preemption import PreemptedExit
from lightning_bigmodel.strategies.replica_settings import check_replica_run, check_replica_sync
from lightning_bigmodel.strategies.replicated import ReplicatedGradients
from lightning_bigmodel.strategies.saving import SavingHooks
from lightning_bigmodel.strategies.sharded import ShardedRun
from lightning_bigmodel.strategies.sharding_settings import ShardingSettings, mixed_precision_rule, named_blocks
from lightning_bigmodel.strategies.tensor import (
    TensorRun,
    check_tensor_settings,
    find_plan,
    log_untried,
    try_given_plan,
)
from lightning_bigmodel.strategies.watching import GradientWatching

__all__ = ["BigModelStrategy"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class BigModelStrategy(CheckpointMixin, SavingHooks, ManualOptimization, GradientWatching, CollectiveHooks):
    """Train an unchanged LightningModule over a pipeline of ranks, data-parallel replicas and shards of it.

    The module is traced once on its first batch, cut between blocks into stages of equal cost, and each rank runs the
    module's own `training_step` on every micro-batch, computing only its blocks. Losses, metrics, checkpoints and
    weights are those of one process (fp32, up to the order of sums). Do not use it for a model and batch that fit one
    device: it adds communication. GPipe (arXiv 1811.06965), 1F1B (arXiv 2006.09503) and later schedules; see
    `pipeline.schedules`.

    Memory a rank: its own parameters, gradients and optimizer state; activations of up to as many micro-batches as
    there are stages (1F1B) or of all (GPipe). Communication a step: for each cut and micro-batch the tensors that cross
    it, once forward and once backward; tied parameters' gradients over their owners; with several data ranks all
    gradients once. ZeRO (arXiv 1910.02054) shards over N of the data ranks, for P bytes of parameters and M
    micro-batches a rank keeps and sends (gathers and reduce-scatters count P each):

    ===== ========== ========= =============== ===============================================
    stage parameters gradients optimizer state communication a step
    ===== ========== ========= =============== ===============================================
    0     P          P         2P (Adam)       one all-reduce
    1     P          P         2P / N          one reduce-scatter, one gather
    2     P          P / N     2P / N          M reduce-scatters, one gather
    3     P / N      P / N     2P / N          M reduce-scatters, 2 M gathers (`keep_gathered`: one)
    ===== ========== ========= =============== ===============================================

    Args:
        pipeline_parallel_size: Ranks the model is cut over, in order; the remaining ranks are data-parallel replicas.
            `"all"` takes every rank.
        tensor_parallel_size: Ranks each layer of a plan is split over; they see the same batches.
        tensor_plan: `"auto"`: the plan a transformers model brings, or what is found in the module and proves right;
            or module name patterns and styles (`sharding.tensor.STYLES`), which are tried out on the first batch where
            that is possible (`sharding.plan_check`).
        zero_stage: What the data ranks shard instead of replicate: 0 nothing, 1 optimizer state, 2 also gradients,
            3 also parameters.
        data_replicate_size: With `zero_stage` above 0, whole-model replicas; the data ranks of each shard one model.
            Default: shards lie within a machine, and machines are replicas.
        keep_gathered: With `zero_stage=3`, keep parameters from their first use in a step to the optimizer step.
        reduce_every_microbatch: Whether gradients are reduced to shards after each micro-batch, or whole ones are kept
            and reduced once a step. Default: as the stage says; False in stage 2 or 3 saves communication for memory.
        offload: With `zero_stage` above 0, what is kept outside of the device: `"cpu"` rows, their gradients and the
            optimizer's state and step (ZeRO-Offload, arXiv 2101.06840); `OffloadPolicy("disk", path=...)` also the
            state in files (ZeRO-Infinity, arXiv 2104.07857). Bytes and copies: see `OffloadPolicy`.
        num_microbatches: Parts each training batch is split into; a smaller batch gives fewer. Default: twice the
            number of stages in a pipeline, else 1. Evaluation batches are not split. `"auto"`: that or more, as few as
            fit in memory on every rank, first by an estimate; a batch on which memory runs out is run again in smaller
            parts. Under tensor parallelism the ranks of a layer must run out together.
        schedule: `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, `"InterleavedZeroBubble"`, `"ZBVZeroBubble"` or
            `"DualPipeV"`.
        blocks: Where the model may be cut: `"auto"`, or module names / patterns (`["model.layers.*"]`), called once a
            step. As many names as stages is a cut of your own: each stage begins at its name.
        replica_sync: How whole-model replicas agree. Default: `AllReduce()`, by which they are one process. Others send
            less: `HierarchicalAllReduce`, `PowerSGD`, `DGC`, `TopKErrorFeedback` on gradients; `LocalSGD`,
            `AdaptiveLocalSGD`, `DiLoCo` on weights, now and then. Replicas may be cut, and sharded too
            (`data_replicate_size`).
        microbatch_weight: How micro-batches, accumulated batches and data ranks weigh in the mean: `"samples"`,
            `"tokens"` (live labels, which are looked for; or a `TokenWeight`), `"equal"` (each batch one share, as in
            Lightning), `"sum"` (for losses that are sums), or a callable from a micro-batch to its weight. A
            `training_step` that returns `{"loss": ..., "microbatch_weight": number}` says it itself, for every
            micro-batch with a loss and on all data ranks.
        fused: How torch's AdamW, Adam and SGD step: `"auto"` with one kernel for all parameters where the module has
            chosen nothing and there is one, True always, False never. Clipping and loss scales work with each. Default:
            as the module has chosen.
        compile_blocks: Compile the forward of each block with `torch.compile`, or with such options of it. Blocks are
            those of `blocks`, or the model's repeated modules.
        deferred_batch_norm: Let BatchNorm in training mode normalise by micro-batches, so that numbers in training
            differ from one process, and move its running statistics once a batch by the whole batch over all data
            ranks, which evaluation then uses (see `pipeline.batch_norm`). One small message a step. Without it such
            layers are refused where batches are split, and replicas keep running statistics of their own until an
            evaluation takes those of the first. SyncBatchNorm in training mode is refused where batches are split.
        batch_source: `"broadcast"`: the first rank of a pipeline loads, the others receive. `"replicated"`: every rank
            loads for itself under equal random states, with a check of the first batches.
        uneven_inputs: Where data ranks run out of training batches at different times, as loaders that the user shards
            may: `"join"`: those without a batch go on with weight zero until all are done; `"stop"`: all stop with the
            first.
        async_checkpoint: Write checkpoints in the background: a save copies what this rank holds to the host (memory
            for it is kept between saves; pinned, with CUDA) and training goes on. At most one is in flight: the next
            save, a load and the end of training wait for it, and raise its error. See `finish_saving`.
        checkpoint_format: `"sharded"`: a directory that all ranks write. `"single"`: one ordinary Lightning file, which
            takes longer, and does not have what only a rank has (random states, place in the data).
        checkpoint_parameters: `"trainable"`: checkpoints leave out parameters that take no gradients, such as the base
            under an adapter: a resumed run has those its module is built with. Resuming needs no setting.
        process_group_backend: Backend of torch.distributed. Default: gloo on the CPU, NCCL (and gloo for CPU tensors)
            on CUDA.
        timeout: Longest wait in a collective.
        memory_limit_bytes: With `num_microbatches="auto"`, what parameters, gradients, optimizer states and what is
            kept for backward may take on a rank. Needed on the CPU; default on CUDA: the memory of the device.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer; used for checkpoints in one file.
        precision_plugin: Set by the Trainer, `precision="16-mixed"` and the others as `BigModelPrecision`. With mixed
            precision and ZeRO, weights and biases of linear and convolution layers are kept and sent in 16 bits
            (2 bytes, their gradients 2, their fp32 rows and moments 12 / N), as autocast would cast them anyway;
            gradients are summed over ranks in fp32.

    Raises:
        ValueError: For settings that do not go together; here where that can be known, else at the start of a run, on
            every rank alike.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelStrategy
        >>> strategy = BigModelStrategy(pipeline_parallel_size=2, num_microbatches=8, schedule="1F1B")
        >>> trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, logger=False)  # 2 stages x 2 replicas
    """

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["all"] = 1,
        num_microbatches: int | Literal["auto"] | None = None,
        schedule: str = "1F1B",
        blocks: str | list[str] = "auto",
        tensor_parallel_size: int = 1,
        tensor_plan: Literal["auto"] | Mapping[str, str] = "auto",
        zero_stage: Literal[0, 1, 2, 3] = 0,
        data_replicate_size: int | None = None,
        keep_gathered: bool = False,
        reduce_every_microbatch: bool | None = None,
        offload: Literal["cpu", "disk"] | OffloadPolicy | None = None,
        replica_sync: ReplicaSync | None = None,
        microbatch_weight: Literal["samples", "tokens", "equal", "sum"]
        | TokenWeight
        | Callable[[Any], Any] = "samples",
        fused: Literal["auto"] | bool | None = None,
        compile_blocks: bool | Mapping[str, Any] = False,
        deferred_batch_norm: bool = False,
        batch_source: Literal["broadcast", "replicated"] = "broadcast",
        uneven_inputs: Literal["join", "stop"] = "join",
        async_checkpoint: bool = False,
        checkpoint_format: Literal["sharded", "single"] = "sharded",
        checkpoint_parameters: Literal["all", "trainable"] = "all",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
        memory_limit_bytes: int | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_host_parts(
            accelerator=(accelerator, Accelerator),
            parallel_devices=(parallel_devices, list),
            cluster_environment=(cluster_environment, ClusterEnvironment),
            checkpoint_io=(checkpoint_io, CheckpointIO),
            precision_plugin=(precision_plugin, Precision),
        )
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        for name, value in (("pipeline_parallel_size", pipeline_parallel_size), ("num_microbatches", num_microbatches)):
            optional = (name == "num_microbatches" and value in (None, "auto")) or (
                name == "pipeline_parallel_size" and value == "all"
            )
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                word = '"auto"' if name == "num_microbatches" else '"all"'
                raise ValueError(f"`{name}={value!r}` must be a whole number of at least 1, or {word}.")
        check_memory_limit(memory_limit_bytes, num_microbatches)
        if batch_source not in ("broadcast", "replicated"):
            raise ValueError(f"`batch_source={batch_source!r}` is not known. Use 'broadcast' or 'replicated'.")
        if not isinstance(deferred_batch_norm, bool):
            raise ValueError(f"`deferred_batch_norm={deferred_batch_norm!r}` must be True or False.")
        if not isinstance(async_checkpoint, bool):
            raise ValueError(f"`async_checkpoint={async_checkpoint!r}` must be True or False.")
        check_checkpoint_settings(checkpoint_format, checkpoint_parameters, async_checkpoint)
        self._checkpoint_format, self._checkpoint_parameters = checkpoint_format, checkpoint_parameters
        if not isinstance(schedule, str):
            raise ValueError(f"`schedule={schedule!r}` must be a name such as '1F1B'.")
        check_process_group_settings(process_group_backend, timeout)
        if uneven_inputs not in ("join", "stop"):
            raise ValueError(f"`uneven_inputs={uneven_inputs!r}` is not known. Use 'join' or 'stop'.")
        check_replica_sync(replica_sync, offload)
        self._replica_sync = replica_sync
        check_weight(microbatch_weight)
        check_blocks(blocks)
        if pipeline_parallel_size == 1 and (
            schedule != "1F1B" or (blocks != "auto" and zero_stage != 3 and not compile_blocks)
        ):
            raise ValueError(
                f"`schedule={schedule!r}` and `blocks={blocks!r}` cut a model over ranks, but "
                "`pipeline_parallel_size=1`. Set `pipeline_parallel_size` to 2 or more, or leave both out."
            )
        self._sharding = ShardingSettings(
            zero_stage, data_replicate_size, keep_gathered, reduce_every_microbatch, offload
        )
        self._sharding.check(schedule)
        check_compile_setting(compile_blocks)
        check_fused(fused)
        self._fused: Literal["auto"] | bool | None = fused
        self._compile_blocks = compile_blocks
        check_tensor_settings(tensor_parallel_size, tensor_plan)
        if pipeline_parallel_size == "all" and tensor_parallel_size > 1:
            raise ValueError(
                f'`pipeline_parallel_size="all"` leaves no ranks for `tensor_parallel_size={tensor_parallel_size}`. '
                "Give the pipeline a number of ranks."
            )
        self._tensor_parallel_size, self._tensor_plan = tensor_parallel_size, tensor_plan
        self._plan_is_tried = False
        self.num_nodes = 1
        self._pipeline_parallel_size = pipeline_parallel_size
        self._finds_microbatches = num_microbatches == "auto"
        self._num_microbatches = num_microbatches if isinstance(num_microbatches, int) else None
        self._memory_limit_bytes = memory_limit_bytes
        self._microbatch_state: dict[str, float] | None = None  # what an earlier run has found
        self._schedule, self._blocks = schedule, blocks
        self._microbatch_weight: MicrobatchWeight = (
            TokenWeight() if microbatch_weight == "tokens" else microbatch_weight
        )
        self._deferred_batch_norm = deferred_batch_norm
        self._batch_source: Literal["broadcast", "replicated"] = batch_source
        self._uneven_inputs: Literal["join", "stop"] = uneven_inputs
        self._saves_in_background = async_checkpoint
        self._process_group_backend, self._timeout = process_group_backend, timeout
        if isinstance(pipeline_parallel_size, int):
            self._microbatches_for(pipeline_parallel_size)

    def _microbatches_for(self, pipeline_size: int) -> int:
        """The number of micro-batches on a pipeline of that many ranks, checked against the schedule."""
        if self._num_microbatches is None:
            stages_per_rank = check_schedule(self._schedule, pipeline_size, 4 * pipeline_size).stages_per_rank
            return 2 * pipeline_size * stages_per_rank if pipeline_size > 1 else 1
        if pipeline_size > 1:
            check_schedule(self._schedule, pipeline_size, self._num_microbatches)
        return self._num_microbatches

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks each layer of a plan is split over."""
        return self._tensor_parallel_size

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        check_precision(precision_plugin, type(self).__name__)
        self._precision_plugin = precision_plugin

    # -- ranks and groups ----------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Lightning asks this before it synchronises logged values."""
        return True

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.data_size, "rank": self.mesh.data_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _host.script_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        _host.silence_deprecations()
        _host.init_process_group(self, self._process_group_backend, self._timeout)
        self._failed = False
        self._forget_signals()
        self._shards_data = _host.take_over_sampling(self._trainer())
        self._guard = FailureGuard(_host.default_store(), self.global_rank, self.world_size)
        with self._phase("setup"):
            size = self._pipeline_parallel_size
            pipeline_size = self.world_size if isinstance(size, str) else size
            tensor_size = self._tensor_parallel_size
            layout = Layout.resolve(
                self.world_size,
                pipeline_parallel_size=pipeline_size,
                tensor_parallel_size=tensor_size,
                data_replicate_size=self._sharding.replicas(
                    self.world_size, pipeline_size, tensor_size, self.num_processes
                ),
                zero_stage=self._sharding.zero_stage,
            )
            self._mesh = build_rank_mesh(layout, self.root_device.type)
            self._seed = self.broadcast(torch.initial_seed() % (1 << 62))
            self._begin_saving()
        assert self.lightning_module is not None
        _host.set_device_mesh(self.lightning_module, self._mesh.device_mesh)

    # -- set-up --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        with self._phase("setup"):
            self._setup(trainer)

    def _setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_cut = self.mesh.pipe_size > 1 or self.mesh.layout.tensor > 1
        check_quantized_layers(module, zero_stage=self._sharding.zero_stage, is_cut=is_cut)
        if fitting:
            is_scheduled = self.mesh.pipe_size > 1 or self._microbatches_for(self.mesh.pipe_size) > 1
            is_scheduled = is_scheduled or self._finds_microbatches
            check_module(module, is_scheduled=is_scheduled)
            is_partial = self.mesh.pipe_size > 1 or self.mesh.layout.tensor > 1 or self._sharding.zero_stage == 3
            check_callbacks(_host.callbacks(trainer), is_partial=is_partial)
            check_op_lists(self.precision_plugin, self._compile_blocks, self._tensor_parallel_size)
            check_replica_run(
                self._replica_sync,
                self.mesh.layout,
                self._sharding.zero_stage,
                trainer,
                module,
                self._reduce_dtype(),
            )
            if self._deferred_batch_norm:
                least = 2 if self._finds_microbatches else 1
                check_deferral(module, max(least, self._microbatches_for(self.mesh.pipe_size)), self.mesh.data_size)
        self.model = self.precision_plugin.convert_module(module)
        if self.world_size > 1:
            broadcast_module(module)
        self._materializer = None
        self._saved_run = None
        self._engine = PipelineEngine(
            module,
            self.mesh,
            self.root_device,
            schedule=self._schedule,
            num_microbatches=self._microbatches_for(self.mesh.pipe_size),
            blocks=self._blocks,
            weight=self._microbatch_weight,
            ignored_attributes=_host.host_attributes(),
            seed=self._seed,
            sizer=self._make_sizer() if fitting else None,
            limit=None if self._memory_limit_bytes is None else MemoryLimit(self._memory_limit_bytes),
            deferred_batch_norm=self._deferred_batch_norm,
        )
        self._begin_loss_scaling()
        self._engine.resident_bytes = lambda: resident_bytes(self)
        self._engine.noting_hidden = noting_hidden
        self._engine.signal = self._own_signals
        if fitting:
            # Before the trace, as a step may ask for its optimizers. Parameters stay the same objects throughout.
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            if self._fused is not None:
                device = torch.device("cpu") if self._sharding.policy is not None else self.root_device
                for optimizer in self.optimizers:
                    choose_fused(optimizer, self._fused, device)
            if self._replica_sync is not None:
                for optimizer in self.optimizers:
                    self._replica_sync.check_optimizer(optimizer)
        self._partition(trainer)
        self._place(trainer)
        self.setup_precision_plugin()
        _host.replace_norm_clipping(self.precision_plugin, self._clip_by_norm, self._take_gradients)
        _host.add_clipper(self)
        if fitting:
            device = self.root_device if self._sharded is None else self._sharded.state_device
            _host.optimizers_to_device(self.optimizers, device)

    def _make_sizer(self) -> MicrobatchSizer | None:
        if not self._finds_microbatches:
            return None
        if self.root_device.type == "cpu" and self._memory_limit_bytes is None:
            raise ValueError(
                '`num_microbatches="auto"` looks for what fits, but a CPU does not say so before the system ends the '
                "program. Give the memory one rank may take: `memory_limit_bytes=...`."
            )
        sizer = MicrobatchSizer(self._microbatches_for(self.mesh.pipe_size))
        if self._microbatch_state is not None:
            sizer.load_state_dict(self._microbatch_state)
        return sizer

    def _partition(self, trainer: pl.Trainer) -> None:
        """Cut the model on its first batch, which rank 0 shares: all ranks must come to one plan."""
        batch, step_name = None, "training_step"
        finds_plan = self.mesh.layout.tensor > 1 and self._tensor_plan == "auto"
        if finds_plan and not self.engine.root.automatic_optimization:
            raise ValueError(
                '`tensor_plan="auto"` proves a plan by running the step without an optimizer, which '
                f"`{type(self.engine.root).__name__}` with its manual optimization cannot. Give a plan: "
                "`tensor_plan={pattern: style}`."
            )
        plan = dict(self._tensor_plan) if isinstance(self._tensor_plan, Mapping) else {}
        tries_plan = bool(plan) and self._can_try_plan(trainer, plan)
        weight = self._microbatch_weight
        finds_labels = isinstance(weight, TokenWeight) and trainer.state.fn == TrainerFn.FITTING
        needs_batch = self.engine.num_stages > 1 or finds_plan or finds_labels
        if needs_batch or tries_plan:
            # What setting the loaders up draws, one process draws too; what comes after it does not.
            loader, step_name = _host.first_loader(trainer)
            state = capture_rng()
            batch = loader.peek() if isinstance(loader, MeshLoader) else None
            # The first rank that has one: loaders of the user's own may be empty on some.
            sources = [rank for rank, has_batch in enumerate(self._from_all_ranks(batch is not None)) if has_batch]
            if needs_batch and not sources:
                raise ValueError(
                    "The data loader gave no batch. A model is cut on the first batch of the run; give it at least one."
                )
            batch = self.broadcast(batch, sources[0] if sources else 0)
            restore_rng(state)
            with _host.silent_loggers(trainer), seeded_rng(self._seed):
                batch = _host.transfer_batch(trainer, batch) if sources else None
                step = self._step(step_name, (batch, 0))
                if isinstance(weight, TokenWeight) and finds_labels:
                    weight.resolve(self.engine.root, batch, step, self.root_device)
                self.engine.partition(*((batch, step) if needs_batch else (None, lambda _: None)))
                if tries_plan and sources:
                    self._try_plan(plan, batch, step, step_name)
                if finds_plan:
                    plan = find_plan(self.engine.root, self.mesh.layout.tensor, batch, step, self.root_device)
            plan = self.broadcast(plan)
        else:
            self.engine.partition(batch, lambda _: None)
        if self.mesh.layout.tensor > 1:
            check_tensor_plan(self.engine.root, plan, self.mesh.layout.tensor)
        self.engine.install()
        self._share = self.engine.share
        if has_meta_tensors(self.engine.root):
            self._materialize(trainer)
        self._tensor = TensorRun(self.engine.root, plan, self.mesh) if self.mesh.layout.tensor > 1 else None
        self.engine.planner.tracing = lambda: _host.traced(trainer)

    def _can_try_plan(self, trainer: pl.Trainer, plan: Mapping[str, str]) -> bool:
        """Whether a plan that was given has pairs of layers to try out; what stands in the way is logged."""
        size, module = self.mesh.layout.tensor, self.engine.root
        is_tried = self._plan_is_tried and trainer.state.fn != TrainerFn.FITTING
        if size == 1 or is_tried or not has_pairs(module, plan, size):
            return False
        why = "" if module.automatic_optimization else "its manual optimization cannot run without an optimizer"
        why = why or _host.why_no_first_loader(trainer)
        if why:
            log_untried((f"{type(module).__name__}: {why}",))
        return not why

    def _try_plan(self, plan: Mapping[str, str], batch: Any, step: Callable[[Any], Any], step_name: str) -> None:
        """On one rank, which tells the others: trials take memory and every processor there is."""
        module, size = self.engine.root, self.mesh.layout.tensor
        rest = _host.step_arguments(getattr(module, step_name), (0,))
        found = try_given_plan(
            module, plan, size, batch, step, (step_name, rest), self.root_device, tries=self.global_rank == 0
        )
        wrong, untried = self.broadcast((found.wrong, found.untried))
        if wrong:
            raise ValueError(wrong)
        if untried:
            log_untried(untried)
        self._plan_is_tried = True

    def _materialize(self, trainer: pl.Trainer) -> None:
        """Memory and first values for what this rank holds; where it keeps rows only, they are made unit by unit."""
        share = self.engine.share
        assert share is not None
        self._materializer = Materializer(
            self.engine.root, self._seed, self.root_device, is_loaded=trainer.ckpt_path is not None
        )
        keeps_rows = self._sharding.zero_stage == 3 and self.mesh.layout.data_shard > 1 and self.mesh.layout.tensor == 1
        self._fill([p for p in share.owned if not p.ndim] if keeps_rows else share.owned)

    def _fill(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        assert self._materializer is not None
        self._materializer.fill(parameters)
        if isinstance(self.precision_plugin, BigModelPrecision):
            self.precision_plugin.convert_new_buffers(self.engine.root)

    def _place(self, trainer: pl.Trainer) -> None:
        """Put what this rank holds on its device, in shards where so asked, and begin a window of gradients."""
        engine, share, settings = self.engine, self.engine.share, self._sharding
        fitting = trainer.state.fn == TrainerFn.FITTING
        assert share is not None
        self._sharded = None
        if self._tensor is not None:  # before rows are made of what it holds
            for optimizer in self.optimizers:
                self._tensor.hand_to(optimizer)
                if not settings.zero_stage:
                    adapt_optimizer(optimizer, {}, self._tensor.held(lambda parameter: parameter))
        if self.mesh.pipe_size > 1 and not settings.zero_stage:
            for optimizer in self.optimizers:
                check_parts(optimizer)
        if settings.zero_stage != 3:
            self.model_to_device()
        if settings.zero_stage:
            self._sharded = ShardedRun(
                engine,
                share,
                self.mesh,
                self.root_device,
                zero_stage=settings.zero_stage,
                keep_gathered=settings.keep_gathered,
                reduce_every_microbatch=settings.reduces_every_microbatch,
                # A manual step looks at them, if at all, within itself.
                shows_gradients=_host.looks_at_gradients(trainer) or not engine.root.automatic_optimization,
                blocks=None if self._blocks == "auto" else named_blocks(engine.root, self._blocks),
                offload=settings.policy,
                compute_dtype=mixed_precision_rule(engine.root, self.precision_plugin),
                reduce_dtype=self._reduce_dtype(),
                prepare=self._fill if self._materializer is not None else None,
                sums_replicas=self._replica_sync is None or not fitting,
            )
            engine.places = self._sharded
            slices = {} if self._tensor is None else self._tensor.held(self._sharded.holder)
            self._sharded.hand_to(self.optimizers, slices)
            _host.follow_finetuning(trainer, self._sharded.parameter_of)
        if settings.zero_stage == 3:
            self.model_to_device()
        shared = share.shared()
        planner = engine.planner
        if self._compile_blocks:
            options = {} if self._compile_blocks is True else dict(self._compile_blocks)
            self._compiled = CompiledBlocks(self.blocks_of_rank(), options)
        self._begin_manual()
        partial = self._tensor.slices.partial_gradients if self._tensor is not None else []
        overlap, num_agreeing = self._overlap, self.mesh.data_size
        if self._sharded is None and not self._is_manual:
            if overlap is None:
                engine.places = GradientPlaces(self.mesh.device_mesh.get_group("data_shard"))
            elif self.mesh.data_size > 1:
                tied = [parameter for parameters in shared.values() for parameter in parameters]
                engine.places = ReplicatedGradients(
                    self.mesh, share, [*tied, *partial], overlap.dtype or self._reduce_dtype(), overlap.bucket_bytes
                )
        agreeing = self.mesh.data_group
        if self._agrees_on_weights:
            agreeing, num_agreeing = self.mesh.device_mesh.get_group("data_shard"), self.mesh.layout.data_shard
        divides = self._microbatch_weight != "sum" and not self._is_manual
        engine.places.batches_a_window = num_agreeing * trainer.accumulate_grad_batches if divides else 1
        self._window = GradientWindow(
            share.owned,
            shared,
            build_pipe_subgroups(self.mesh, list(shared)),
            None if planner.first_trace is None else lambda: planner.trained,
            engine.places,
            functools.partial(all_reduce_sum, dtype=self._reduce_dtype())
            if self._sharded is None
            else self._sharded.sum_gradients,
            divides=divides,
            partial=partial,
            partial_group=self.mesh.tensor_group,
            agreeing=agreeing,
            reduce_replicas=self._reduce_replicas
            if overlap is None and isinstance(self._replica_sync, GradientSync)
            else None,
        )

    def blocks_of_rank(self) -> list[torch.nn.Module]:
        """The blocks that this rank computes: those of its stages, in order; empty if the model has none."""
        planner, root = self.engine.planner, self.engine.root
        if planner.tree is not None and planner.ownership is not None:
            stages, of_unit = set(self.engine.stage_indices), planner.ownership.stage_of_unit
            return [block for block in planner.tree.blocks if stages & set(of_unit.get(block, ()))]
        if self._blocks != "auto":
            return list(named_blocks(root, self._blocks).values())
        return [module for module in find_blocks(root).values() if next(module.children(), None) is not None]

    @override
    def model_to_device(self) -> None:
        assert self.engine.share is not None
        sharded = self._sharded
        kept = {id(p) for p in self.engine.share.owned if sharded and not sharded.is_whole and sharded.is_sharded(p)}
        self.engine.share.move_to(self.root_device, kept)
        assert self.lightning_module is not None
        _host.set_device(self.lightning_module, self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer()
        mode: Literal["train", "eval", "predict"] = (
            "predict" if trainer.predicting else "eval" if trainer.evaluating or trainer.sanity_checking else "train"
        )
        if mode == "predict" and self.mesh.data_size > 1:
            _host.plain_batch_sampler(dataloader)
        with self._phase("data loading"):
            loader = MeshLoader(
                dataloader,  # type: ignore[arg-type]  # any iterable; checked there
                model_group=self.mesh.model_group,
                model_rank=self.mesh.model_rank,
                data_group=self.mesh.data_group,
                data_rank=self.mesh.data_rank,
                data_size=self.mesh.data_size,
                mode=mode,
                batch_source=self._batch_source,
                shard=self._shards_data,
                uneven_inputs=self._uneven_inputs,
                keeps_pace=mode == "eval" and self._sharding.zero_stage == 3,
            )
            if mode != "train":
                loader.refuse_empty_ranks()
            return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        # Transfer hooks may augment; every rank of a pipeline must draw the same numbers for it.
        self._num_batches_moved += 1
        with seeded_rng(derive_seed(self._seed, self.mesh.data_rank, self._num_batches_moved)):
            return super().batch_to_device(batch, device, dataloader_idx)

    # -- end -----------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        _host.load_loader_states(self._trainer())
        self._begin_replica_sync()
        self._resume_run()

    @override
    def on_train_end(self) -> None:
        self._end_replica_sync()
        super().on_train_end()

    @override
    def on_validation_start(self) -> None:
        self._use_agreed_weights()
        self._start_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._use_own_weights()

    @override
    def on_test_start(self) -> None:
        self._start_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        self._share_buffers()
        self._keep_pace()

    def _share_buffers(self) -> None:
        """Running statistics of replicas drift apart in training; evaluate all with those of the first, as DDP does."""
        assert self.lightning_module is not None
        if self.mesh.data_size > 1:
            with self._phase("sharing buffers"):
                buffers = [(0, buffer) for buffer in self.lightning_module.buffers() if buffer.numel()]
                broadcast_tensors(buffers, self.mesh.data_group)

    @override
    def on_predict_end(self) -> None:
        gather_predictions(self._trainer(), self.mesh)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._guard is None or isinstance(exception, PreemptedExit):  # which all ranks raise together
            return
        error = self._guard.translate(exception)
        if error is exception:
            self._guard.report(exception, "the run")
        elif not isinstance(exception, RankFailedError):
            self.teardown()
            raise error from exception

    @override
    def teardown(self) -> None:
        unsaved = self._end_saving()
        if self._engine is not None:
            self._close_replica_sync()
            _host.restore_norm_clipping(self.precision_plugin)
            _host.remove_clipper(self)
            self._end_manual()
            _host.unfollow_finetuning(self._trainer())
            if self._compiled is not None:
                self._compiled.restore()
                self._compiled = None
            self._num_steps = self._engine.num_steps
            if self._engine.sizer is not None:
                self._microbatch_state = self._engine.sizer.state_dict()
            self._engine.places.close()
            with nullcontext() if self._failed else self._phase("teardown"):
                if self._sharded is not None:
                    (self._sharded.give_up if self._failed else self._sharded.restore)()
                if self._tensor is not None:
                    (self._tensor.give_up if self._failed else self._tensor.restore)()
                self._engine.uninstall(restore=not self._failed)
        if self._guard is not None:
            self._guard.close()
            _host.give_back_sampling(self._trainer(), self._shards_data)
        self._engine = self._window = self._guard = None
        with _host.not_moved(self.lightning_module):
            super().teardown()
        if unsaved is not None:
            raise unsaved

    def describe_ranks(self) -> list[dict[str, Any]]:
        """What each rank owns: a list over all ranks, the same on every rank, without communication.

        Keys: rank, pipe_rank, data_rank, tensor_rank, stages, modules, num_parameters, parameter_bytes (of whole
        parameters, before any sharding over data or tensor ranks; of slices where a plan has cut them).
        """
        from lightning_bigmodel.strategies.describe import describe_ranks

        return describe_ranks(self.engine, self.mesh)

    @contextmanager
    def whole_parameters(self, *, write: bool = True) -> Iterator[None]:
        """Every parameter this rank's stages hold is whole within; for hooks that read or change weights.

        Call it on all ranks together, outside of a step. Does nothing where parameters are whole anyway.

        Args:
            write: Whether changes made within are kept. All ranks must make the same ones.

        Memory and communication: all parameters of this rank's stages, once (`zero_stage=3`).
        """
        with self._sharded.gathered(write=write) if self._sharded is not None else nullcontext():
            yield

    def held_parameters(self) -> dict[str, torch.Tensor]:
        """Name -> what this rank keeps of a parameter and its optimizers step: its rows (`zero_stage` 1 to 3) or all.

        Of tied parameters the first name. Values changed here reach the module with `publish_parameters`.
        """
        share = self._held()
        holder = self._sharded.holder if self._sharded is not None else lambda parameter: parameter
        return {share.names[id(parameter)]: holder(parameter).data for parameter in share.owned}

    def publish_parameters(self) -> None:
        """Make the module compute with what `held_parameters` has. Call it on all ranks together.

        Communication: all parameters once (`zero_stage` 1 and 2); none otherwise.
        """
        if self._sharded is not None:
            self._sharded.shards.publish()

    @property
    def has_whole_parameters(self) -> bool:
        """Whether the parameters this rank's stages hold are whole between steps: not with `zero_stage=3`."""
        return self._sharded is None or self._sharded.is_whole

    def whole_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """The whole gradient of a parameter in `on_before_optimizer_step`, or None. Call it on all ranks together.

        Communication: the gradient once over the shards (`zero_stage` 1 to 3) and once over the tensor ranks.
        """
        gradient = parameter.grad if self._sharded is None else self._sharded.whole_gradient(parameter)
        if self._tensor is not None and gradient is not None:
            gradient = self._tensor.slices.gather_full(parameter, gradient)
        return gradient

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("bigmodel", cls, description="Data-parallel replicas")
        for stage, what in ((1, "optimizer state"), (2, "optimizer state and gradients"), (3, "all states")):
            strategy_registry.register(
                f"bigmodel_zero{stage}", cls, description=f"Data ranks shard {what} (ZeRO {stage})", zero_stage=stage
            )
        strategy_registry.register(
            "bigmodel_zero3_offload",
            cls,
            description="ZeRO 3 with states and optimizer steps on the host",
            zero_stage=3,
            offload="cpu",
        )
        strategy_registry.register(
            "bigmodel_pipeline",
            cls,
            description="The model cut over all ranks",
            pipeline_parallel_size="all",
        )


_host.use_own_precision(BigModelStrategy, BigModelPrecision, PRECISIONS)
_host_checkpoints.use_complete_checkpoints(BigModelStrategy, newest_complete, interrupted_names)
_host_checkpoints.use_saved_hyper_parameters(saved_hyper_parameters)
