"""`BigModelPrecision`: what is computed in which type, and a loss scale that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_bigmodel import _host
from lightning_bigmodel.precision.conversion import check_buffers, convert_module
from lightning_bigmodel.precision.fp8 import check_fp8, convert_to_fp8
from lightning_bigmodel.scaling.found_inf import any_rank, first_overflowing, unscale_and_check
from lightning_bigmodel.scaling.loss_scale import LossScale, LossScaleError
from lightning_bigmodel.scaling.op_lists import ModulePrecision, OpPrecision, matching_modules

__all__ = ["PRECISIONS", "BigModelPrecision"]

_Name = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true", "fp8"]
_TYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "fp8": torch.bfloat16,
}
PRECISIONS = tuple(_TYPES)  # the values of `precision`
_REDUCE_TYPES = ("float32", "bfloat16", "float16")
_MATMUL = ("highest", "high", "medium")


class BigModelPrecision(Precision):
    """Mixed, half, single, double or fp8 precision, with operators and layers that keep full precision.

    `Trainer(precision=...)` with `BigModelStrategy` uses it with its defaults (but for fp8); give it in `plugins=` to
    set more. It also works under Lightning's own strategies, where, with manual optimization, gradients are scaled
    until the optimizer's step, as with Lightning's plugin.

    Under `"16-mixed"` the loss is multiplied by a scale, so that small gradients do not vanish in fp16 (Micikevicius et
    al., arXiv 1710.03740). Gradients are divided by it before any hook, clipping or step sees them. If one is not
    finite on any rank, all ranks skip the step: weights, moments, learning-rate schedules, averages and
    `trainer.global_step` stay, `on_before_optimizer_step` is not called, and the scale shrinks. Logged at each step:
    `loss_scale` and `skipped_steps`.

    ============ ================ ============ ====================================================================
    precision    parameters       computes in  remark
    ============ ================ ============ ====================================================================
    32-true      fp32             fp32
    64-true      fp64             fp64
    bf16-mixed   fp32             bf16, fp32   by `torch.autocast`; linear and convolution weights in bf16 with ZeRO
    16-mixed     fp32             fp16, fp32   the same in fp16, with a loss scale; on the CPU too
    bf16-true    bf16             bf16
    16-true      fp16             fp16         a loss scale only where one is asked for
    fp8          fp32             fp8, bf16    linear layers through torchao, the rest as `bf16-mixed`
    ============ ================ ============ ====================================================================

    Memory: none beside the parameters. Communication a step with a loss scale: one number over all ranks.

    Args:
        precision: One of the table.
        loss_scale: How the scale moves: `"torch"`, `"deepspeed"`, `"megatron"` or `"paddlefleet"` (see
            `scaling.loss_scale`), or a number that stays. Default: `"torch"` with `"16-mixed"`, none otherwise.
        init_scale: The first scale.
        growth_factor: What it is multiplied by after `growth_interval` good steps.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Good steps before it grows.
        hysteresis: Overflows before it shrinks.
        min_scale: It does not shrink below.
        max_scale: It does not grow above.
        max_consecutive_skips: This many skipped steps in a row at the least scale stop the run, with the names of the
            parameters whose gradients overflowed first.
        full_precision_ops: Operators and functions that compute in fp32 within a mixed precision: `"softmax"`, or
            `"my_package.my_module.my_function"`.
        half_precision_ops: Those that compute in the 16-bit type.
        full_precision_modules: Modules that compute in fp32, and keep fp32 parameters: patterns of names
            (`"model.layers.0.*"`) or class names (`"LayerNorm"`).
        full_precision_buffers: With `"16-true"` and `"bf16-true"`, floating-point buffers that stay fp32: patterns of
            names. `"auto"`: rotary frequencies, and running statistics with the layer they belong to.
        reduce_dtype: Type in which gradients are sent and summed over ranks: `"float32"` (default; fp64 stays),
            `"bfloat16"` or `"float16"`. Smaller ones send half the bytes and round.
        matmul_precision: What fp32 matrix products may be computed in (`torch.set_float32_matmul_precision`) while the
            Trainer runs: `"highest"`: fp32; `"high"`: TF32 or three bf16 products; `"medium"`: bf16. A permission:
            devices without such units compute in fp32. Convolutions are not concerned
            (`torch.backends.cudnn.allow_tf32`). Default: as it is set.
        fp8_modules: With `"fp8"`, patterns of names of the linear layers to convert. Default: all whose widths are
            multiples of 16, but for the last one.
        fp8_emulate: With `"fp8"`, round as fp8 does but compute in the wider type, where the device has no fp8 units.

    Raises:
        ValueError: For settings that are unknown or that nothing would use.
        ModuleNotFoundError: For `"fp8"` without torchao.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_bigmodel import BigModelPrecision, BigModelStrategy
        >>> precision = BigModelPrecision("16-mixed", init_scale=1024.0, growth_interval=500, hysteresis=2)
        >>> trainer = Trainer(
        ...     accelerator="cpu", devices=1, strategy=BigModelStrategy(), plugins=[precision], logger=False
        ... )
        >>> trainer.precision
        '16-mixed'
    """

    def __init__(
        self,
        precision: _Name = "32-true",
        *,
        loss_scale: Literal["torch", "deepspeed", "megatron", "paddlefleet"] | float | None = None,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        hysteresis: int | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = None,
        full_precision_ops: Sequence[str] = (),
        half_precision_ops: Sequence[str] = (),
        full_precision_modules: Sequence[str] = (),
        full_precision_buffers: Literal["auto"] | Sequence[str] = "auto",
        reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        matmul_precision: Literal["highest", "high", "medium"] | None = None,
        fp8_modules: Sequence[str] | None = None,
        fp8_emulate: bool = False,
    ) -> None:
        if not isinstance(precision, str) or precision not in _TYPES:
            raise ValueError(f"`precision={precision!r}` is not known. Use one of {list(get_args(_Name))}.")
        self.precision: Any = precision  # Lightning's list of names has no fp8
        self.dtype = _TYPES[precision]
        settings = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "max_consecutive_skips": max_consecutive_skips,
        }
        self.loss_scale = _make_loss_scale(
            precision, loss_scale, {name: value for name, value in settings.items() if value is not None}
        )
        self.full_precision_modules = _names("full_precision_modules", full_precision_modules)
        if self.full_precision_modules and precision in ("32-true", "64-true"):
            raise ValueError(f"`full_precision_modules` has no effect with `precision={precision!r}`. Leave it out.")
        self.full_precision_ops = _names("full_precision_ops", full_precision_ops)
        self._ops = self._make_ops(self.full_precision_ops, _names("half_precision_ops", half_precision_ops))
        self.full_precision_buffers = check_buffers(full_precision_buffers, precision)
        if reduce_dtype is not None and (not isinstance(reduce_dtype, str) or reduce_dtype not in _REDUCE_TYPES):
            raise ValueError(f"`reduce_dtype={reduce_dtype!r}` is not known. Use one of {list(_REDUCE_TYPES)}.")
        self.reduce_dtype: torch.dtype | None = getattr(torch, reduce_dtype) if reduce_dtype else None
        if matmul_precision is not None and (not isinstance(matmul_precision, str) or matmul_precision not in _MATMUL):
            raise ValueError(f"`matmul_precision={matmul_precision!r}` is not known. Use one of {list(_MATMUL)}.")
        self.matmul_precision = matmul_precision
        self._matmul_before: str | None = None
        self.fp8_modules = None if fp8_modules is None else _names("fp8_modules", fp8_modules)
        if not isinstance(fp8_emulate, bool):
            raise ValueError(f"`fp8_emulate={fp8_emulate!r}` must be True or False.")
        self.fp8_emulate = fp8_emulate
        check_fp8(precision, self.fp8_modules, fp8_emulate)
        self._modules: ModulePrecision | None = None
        self._device_type: str | None = None
        # Set by a strategy that scales and unscales by itself: whether the gradients of an optimizer have overflowed.
        self.overflow_of: Callable[[Optimizer], bool] | None = None
        self._first_overflowed: list[str] = []
        self._trainer: pl.Trainer | None = None

    def _make_ops(self, full: Sequence[str], half: Sequence[str]) -> OpPrecision:
        for name, ops in (("full_precision_ops", full), ("half_precision_ops", half)):
            if ops and not self.is_mixed:
                raise ValueError(
                    f"`{name}` chooses operators within a mixed precision, but `precision={self.precision!r}` is none. "
                    'Use "16-mixed" or "bf16-mixed", or leave it out.'
                )
        return OpPrecision(
            full_precision_ops=full, half_precision_ops=half, half_dtype=self.dtype if self.is_mixed else torch.bfloat16
        )

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are fp32 and operators choose the type they compute in."""
        return self.precision in ("16-mixed", "bf16-mixed", "fp8")

    @property
    def has_op_lists(self) -> bool:
        """Whether some operators compute in another type than autocast has them."""
        return bool(self._ops)

    def convert_new_buffers(self, module: nn.Module) -> None:
        """Cast buffers made since `convert_module`, as modules on the meta device make them when they get values."""
        if not self.is_mixed and self.precision != "32-true":
            kept = self.full_precision_ids(module)
            convert_module(module, self.dtype, kept, self.full_precision_buffers, buffers_only=True)

    def full_precision_ids(self, root: nn.Module) -> set[int]:
        """Ids of the modules that compute in full precision, with all within them."""
        found = matching_modules(root, self.full_precision_modules)
        return {id(part) for module in found.values() for part in module.modules()}

    @property
    def scale(self) -> float:
        """What losses are multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    # -- module and inputs ---------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._device_type = _device_type_of(module)
        if self.matmul_precision is not None:
            self._matmul_before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(self.matmul_precision)
        if self.precision == "fp8":
            convert_to_fp8(module, self.fp8_modules, device_type=self._device_type, emulate=self.fp8_emulate)
        elif not self.is_mixed and self.precision != "32-true":
            convert_module(module, self.dtype, self.full_precision_ids(module), self.full_precision_buffers)
        if self.full_precision_modules:
            self._modules = ModulePrecision(
                module, self.full_precision_modules, output_dtype=None if self.is_mixed else self.dtype
            )
            self._modules.install()
        self._ops.install()
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        if self.is_mixed or self.precision == "32-true":
            return data
        return apply_to_collection(data, Tensor, lambda x: x.to(self.dtype) if x.is_floating_point() else x)

    @override
    def teardown(self) -> None:
        if self._trainer is not None:
            _host.end_skipped_step(self._trainer)
            self._trainer = None
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        self._ops.remove()
        if self._matmul_before is not None:
            torch.set_float32_matmul_precision(self._matmul_before)
            self._matmul_before = None
        self.overflow_of = None

    # -- contexts ------------------------------------------------------------------------------------------------------

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(torch.float32 if self.is_mixed else self.dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        # Built in fp32 and converted then: what stays fp32 cannot be made of 16 bits.
        return _default_dtype(torch.float32) if self.dtype.itemsize == 2 else self.tensor_init_context()

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        """Every step of the user runs within: autocast, the default type, and the lists of operators."""
        with ExitStack() as stack:
            if self.is_mixed:
                device = self._device_type or ("cuda" if torch.cuda.is_available() else "cpu")
                # Without the cache, as in Lightning: it would keep casts that in-place changes make stale.
                stack.enter_context(torch.autocast(device, dtype=self.dtype, cache_enabled=False))
            elif self.precision != "32-true":
                stack.enter_context(_default_dtype(self.dtype))
            stack.enter_context(self._ops.active())
            yield

    def backward_context(self) -> AbstractContextManager[Any]:
        """Backwards run within, so that what they recompute goes by the same lists."""
        return self._ops.active()

    # -- loss scale ----------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        tensor = super().pre_backward(tensor, module)
        return tensor * self.scale if self.loss_scale is not None and self.overflow_of is None else tensor

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        with self.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.loss_scale is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS runs a step several times, and a loss scale cannot skip parts of it. Use another.")
        self._trainer = model.trainer
        _host.end_skipped_step(model.trainer)
        result = closure()
        find = self.overflow_of or self._unscale_own
        overflowed = find(optimizer)
        if not overflowed:
            self._first_overflowed = []
        try:
            self.loss_scale.update(overflowed)
        except LossScaleError as error:
            raise LossScaleError(f"{error} {self._where()}") from None
        if overflowed:
            _host.skip_step(model.trainer)
        self._log(model)
        if overflowed:
            return result
        self._after_closure(model, optimizer)
        return optimizer.step(closure=lambda: result, **kwargs)

    def _log(self, model: pl.LightningModule) -> None:
        assert self.loss_scale is not None
        for name, value in (("loss_scale", self.scale), ("skipped_steps", float(self.loss_scale.num_skipped))):
            model.log(name, value, on_step=True, on_epoch=False)

    def _unscale_own(self, optimizer: Optimizer) -> bool:
        """Under a strategy that leaves gradients scaled."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return self.unscale([(f"parameter {index}", p.grad) for index, p in enumerate(held)])

    def unscale(self, gradients: Iterable[tuple[str, Tensor]]) -> bool:
        """Divide named gradients of this rank by the scale, in place. Collective: one number over all ranks.

        Returns:
            Whether one was not finite on any rank.
        """
        named = list(gradients)
        flag = unscale_and_check([gradient for _, gradient in named], 1.0 / self.scale)
        overflowed = any_rank(flag)
        if overflowed:
            self.note_overflow(named)
        return overflowed

    def note_overflow(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the names of what overflowed here, of the first step in a row."""
        if not self._first_overflowed:
            self._first_overflowed = first_overflowing(named)

    def _where(self) -> str:
        """The names of all ranks. Collective: all ranks come here together."""
        names = sorted({name for of_rank in _host.all_objects(self._first_overflowed) for name in of_rank})
        if not names:
            return ""
        shown = ", ".join(f"`{name}`" for name in names[:10])
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return f"The first of these steps had gradients that are not finite in {shown}{more}."

    # -- clipping ------------------------------------------------------------------------------------------------------

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Of fused optimizers too: gradients are unscaled by now.
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.loss_scale is None:
            rank_zero_warn(
                f"The checkpoint has the state of a loss scale, which `precision={self.precision!r}` does not have. "
                "It is left alone."
            )
        else:
            self.loss_scale.load_state_dict(state_dict)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Of plain Lightning, whose plugin has another name.
        state = checkpoint.get("MixedPrecision")
        if state and self.loss_scale is not None and type(self).__qualname__ not in checkpoint:
            self.loss_scale.load_state_dict(state)


def _make_loss_scale(precision: str, kind: Any, settings: dict[str, Any]) -> LossScale | None:
    if precision not in ("16-mixed", "16-true"):
        given = [*(["loss_scale"] if kind is not None else []), *settings]
        if given:
            raise ValueError(
                f"`{given[0]}` steers a loss scale, which `precision={precision!r}` does not need: its gradients have "
                'the range of fp32. Leave it out, or use "16-mixed".'
            )
        return None
    if kind is None and not settings and precision == "16-true":
        return None
    if isinstance(kind, (int, float)) and not isinstance(kind, bool):
        moving = [name for name in settings if name != "max_consecutive_skips"]
        if moving:
            raise ValueError(
                f"`loss_scale={kind!r}` is a scale that stays, but `{moving[0]}` says how it moves. Give one of them."
            )
        if not 0 < kind < math.inf:
            raise ValueError(f"`loss_scale={kind!r}` must be above zero and finite, such as 1024.")
        return LossScale(init_scale=kind, dynamic=False, **settings)
    if kind is not None and not isinstance(kind, str):
        raise ValueError(
            f'`loss_scale={kind!r}` must be a number, or one of "torch", "deepspeed", "megatron" and "paddlefleet".'
        )
    return LossScale.preset("torch" if kind is None else kind, **settings)


def _names(name: str, given: Any) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(item, str) for item in given):
        example = "*.norm" if name.endswith("modules") else "softmax"
        raise ValueError(f"`{name}={given!r}` must be a list of names, such as ['{example}'].")
    return list(given)


def _device_type_of(module: nn.Module) -> str | None:
    trainer = getattr(module, "_trainer", None)
    return None if trainer is None else str(trainer.strategy.root_device.type)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
