"""What a block's forward reads beside its arguments, kept so that a second run of it is the same run.

Random states, autocast, default type, function modes (lists of operators with a precision of their own), which
attention kernels are allowed, and the block's own buffers and plain attributes that its forward writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bigmodel import _host
from lightning_bigmodel.mesh.rng import capture_rng, restore_rng
from lightning_bigmodel.recompute._contents import contents_of, has_contents, is_same, put_back

__all__ = ["Ambient", "Keeper", "OwnState"]

# Called in the forward: returns what enters the same state again.
Keeper = Callable[[], Callable[[], AbstractContextManager[Any]]]

_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
# Buffers of more are copied before a forward only where they were seen to change.
_SMALL_BUFFER_BYTES = 256 * 1024
# Forwards of a block whose buffers are compared with what they were, on devices where that takes time.
_NUM_COMPARED = 3
_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _attention_kernels() -> list[bool]:
    return [bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")()) for name in _ATTENTION_KERNELS]


def _allow_attention_kernels(allowed: Sequence[bool]) -> None:
    for name, is_allowed in zip(_ATTENTION_KERNELS, allowed, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_allowed)


class Ambient:
    """The state around a forward, as it is when this is made. About 12 KiB, and 60 us on a CPU.

    Args:
        keepers: Further state to keep, such as what other parts of a program hold in thread-local variables.
    """

    def __init__(self, keepers: Sequence[Keeper] = ()) -> None:
        self._random = capture_rng()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _device_types()
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._dtype = torch.get_default_dtype()
        self._modes = _host.function_modes()
        self._kernels = _attention_kernels()
        self._further = [keep() for keep in keepers]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """It is all so again within, and gradients are enabled; as it was on the way out."""
        random, dtype, kernels = capture_rng(), torch.get_default_dtype(), _attention_kernels()
        active = _host.function_modes()
        with ExitStack() as stack:
            stack.callback(restore_rng, random)
            restore_rng(self._random)
            if dtype != self._dtype:
                stack.callback(torch.set_default_dtype, dtype)
                torch.set_default_dtype(self._dtype)
            if kernels != self._kernels:
                stack.callback(_allow_attention_kernels, kernels)
                _allow_attention_kernels(self._kernels)
            for kind, is_enabled, half in self._autocast:
                stack.enter_context(torch.autocast(kind, half, is_enabled, cache_enabled=self._caches_casts))
            for mode in self._modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            for enter in self._further:
                stack.enter_context(enter())
            stack.enter_context(torch.enable_grad())
            yield


class OwnState:
    """What a block's forward writes into the block itself: a second run starts from the same values, and leaves none.

    Buffers (running statistics, counters, power iterations) that the forward changes are copied before it; the second
    run works on those copies. Changes by `buffer.data`, which torch does not count, are seen in the first forwards, and
    on a CPU always. A block that writes its own parameters cannot be computed again from them, and raises; by
    `parameter.data`, if it does so in the first forward.

    Attributes that it sets are put back after the second run; plain values (numbers, flags)
    also have, within it, what they had before the first. So it is with collections that it changes, and with random
    generators of the block's own.

    Args:
        block: The module.

    Memory: the changed buffers, once for each forward whose backward has not come yet.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._written: set[tuple[int, str]] = set()
        self._hidden: set[tuple[int, str]] = set()  # written in a way that torch does not count
        self._is_learned = False
        self._num_forwards = 0
        # Its forward, one within it, or a function that it holds.
        self.is_compiled = any(
            module._compiled_call_impl is not None
            or any(hasattr(value, "_torchdynamo_orig_callable") for value in (module, *module.__dict__.values()))
            for module in self._modules
        )

    def _buffers(self) -> Iterator[tuple[tuple[int, str], nn.Module, str, Tensor]]:
        for index, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (index, name), module, name, buffer

    def has_hooks_on_both_ends(self) -> bool:
        """Whether forwards within the block are told of their beginning and of their end, and may count on both."""
        inner = self._modules[1:]
        return any(module._forward_pre_hooks for module in inner) and any(module._forward_hooks for module in inner)

    def before(self) -> Any:
        """A note of the state before a forward."""
        copies = {key: (buffer, buffer._version, self._copy(key, buffer)) for key, _, _, buffer in self._buffers()}
        parameters = {
            id(parameter): (parameter, parameter._version, self._sum(parameter))
            for _, _, parameter in self._parameters()
        }
        attributes = [dict(module.__dict__) for module in self._modules]
        contents = [
            {
                name: contents_of(value)
                for name, value in each.items()
                if name not in _OF_MODULES and has_contents(value)
            }
            for each in attributes
        ]
        return copies, attributes, contents, parameters

    def _parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for module in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield module, name, parameter

    def _sum(self, parameter: nn.Parameter) -> str | None:
        """In the first forward: tells whether `parameter.data` was written, which torch does not count."""
        if self._num_forwards or _host.is_fake(parameter) or type(parameter) is not nn.Parameter:
            return None
        return repr(parameter.detach().sum().item()) if parameter.is_floating_point() else None

    def _copy(self, key: tuple[int, str], buffer: Tensor) -> Tensor | None:
        if key in self._written or not self._is_learned or buffer.nbytes <= _SMALL_BUFFER_BYTES:
            return buffer.detach().clone()
        return None

    def changed(self, before: Any) -> Any:
        """What a forward has changed since `before`: to be kept until `restored`.

        Raises:
            RuntimeError: Where a large buffer that earlier forwards left alone has changed, or a parameter.
        """
        copies, attributes, contents, parameters = before
        for module, name, parameter in self._parameters():
            _, version, total = parameters.get(id(parameter), (None, parameter._version, None))
            if version != parameter._version or total != self._sum(parameter):
                raise RuntimeError(
                    f"The parameter `{name}` of {type(module).__name__} is written in the block's forward, so that it "
                    "cannot be computed again from the old values. Leave this block out of `Recompute(blocks=[...])`, "
                    "or write the parameter outside of it."
                )
        buffers: dict[tuple[int, str], Tensor] = {}
        for key, module, name, buffer in self._buffers():
            old, version, copy = copies.get(key, (None, -1, None))
            if old is buffer and buffer._version == version and not self._is_written_unseen(key, module, buffer, copy):
                continue
            self._written.add(key)
            if old is None:
                continue
            if copy is None:
                raise RuntimeError(
                    f"The buffer `{name}` ({buffer.nbytes} bytes) of {type(module).__name__} is written in a forward "
                    "for the first time in this run, and there is no copy of its old values to compute the block again "
                    "with. Leave this block out of `Recompute(blocks=[...])`, or write the buffer in every forward."
                )
            buffers[key] = copy
        if not any(_host.is_fake(tensor) for tensor, *_ in (*copies.values(), *parameters.values())):
            self._is_learned, self._num_forwards = True, self._num_forwards + 1
        written: dict[int, dict[str, Any]] = {}
        for index, (module, old_attributes) in enumerate(zip(self._modules, attributes, strict=True)):
            for name, value in module.__dict__.items():
                old_value = old_attributes.get(name, _ABSENT)
                if value is not old_value and name not in _OF_MODULES and name != "forward":
                    written.setdefault(index, {})[name] = old_value if isinstance(old_value, _PLAIN) else _UNKNOWN
        insides = [
            (attributes[index][name], _startable(old))
            for index, of_module in enumerate(contents)
            for name, old in of_module.items()
            if not is_same(old, contents_of(attributes[index][name]))
        ]
        return buffers, written, insides

    def _is_written_unseen(self, key: tuple[int, str], module: nn.Module, buffer: Tensor, copy: Tensor | None) -> bool:
        """Whether a buffer was changed though its version says that it was not."""
        if module.training and key[1] in ("running_mean", "running_var"):
            return True  # norms write them within an operator that does not count it
        if key not in self._hidden and copy is not None and not _host.is_fake(buffer):
            # On other devices the host would wait for each comparison.
            compares = buffer.device.type == "cpu" or self._num_forwards < _NUM_COMPARED
            if compares and not torch.equal(buffer, copy):
                self._hidden.add(key)
        return key in self._hidden

    @contextmanager
    def restored(self, changed: Any) -> Iterator[None]:
        """Within, the block is as it was before its forward; what is written within is undone."""
        buffers, written, insides = changed
        present = {key: (module, name, buffer) for key, module, name, buffer in self._buffers() if key in buffers}
        attributes = {
            (index, name): self._modules[index].__dict__.get(name, _ABSENT)
            for index, names in written.items()
            for name in names
        }
        present_insides = [(value, contents_of(value)) for value, _ in insides]
        clones: dict[int, Tensor] = {}  # modules may share a buffer
        for key, (module, name, buffer) in present.items():
            if id(buffer) not in clones:
                clones[id(buffer)] = buffers[key].clone()
            module._buffers[name] = clones[id(buffer)]
        for value, old in insides:
            if old is not _UNKNOWN:
                put_back(value, old)
        for index, name in attributes:
            if written[index][name] is not _UNKNOWN:
                self._modules[index].__dict__[name] = written[index][name]
        try:
            yield
        finally:
            for module, name, buffer in present.values():
                module._buffers[name] = buffer
            for value, now in present_insides:
                put_back(value, now)
            for (index, name), value in attributes.items():
                if value is _ABSENT:
                    self._modules[index].__dict__.pop(name, None)
                else:
                    self._modules[index].__dict__[name] = value


def _startable(contents: Any) -> Any:
    """What a second run may start from. Not collections of tensors, of which a note would hold graphs."""
    is_collection = isinstance(contents, list)
    items = (
        [part for item in contents for part in (item if isinstance(item, tuple) else (item,))] if is_collection else []
    )
    return contents if all(isinstance(item, _PLAIN) for item in items) else _UNKNOWN


_ABSENT: Any = object()
_UNKNOWN: Any = object()
