"""Records what dtype each operator gives, below every cast."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Dtypes(TorchDispatchMode):
    """`seen` holds pairs of an operator's name, such as "aten::bmm", and the dtype of its first output."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor):
            self.seen.append((func.name().split(".")[0].removeprefix("aten::"), first.dtype))
        return out

    def of(self, *names):
        """The dtypes of the named operators, in the order in which they ran."""
        return [dtype for name, dtype in self.seen if name in names]
