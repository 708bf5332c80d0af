"""What does a rank hold for each parameter of a model: weights, gradients and optimizer states, counted?

Each way to train takes two steps of the demo's byte-level GPT on `--ranks` ranks, with `zero_stage=0` and `3`. At the
end of the second step, when weights, gradients and states are all there, the storages of all live tensors are added up
on every rank, each once; the largest rank counts. Activations are gone by then. Last, 8-bit moments are compared with
fp32 ones by the losses of one longer run each (`--curve-steps`; 0 leaves it out).

    python examples/benchmarks/memory_per_parameter.py --curve-steps 300
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_bigmodel import BigModelStrategy, EightBitOptimizer, LoRA, Quantize
from lightning_bigmodel.demo.data import ByteWindows, read_texts, window_order
from lightning_bigmodel.demo.model import ByteGPT
from lightning_bigmodel.testing import run_ranks

LAYERS = ["attention_in", "attention_out", "mlp_in", "mlp_out"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the work."""

    ranks: int = 2
    width: int = 256
    num_blocks: int = 4
    context: int = 32
    batch_size: int = 4
    curve_steps: int = 0
    curve_width: int = 96


class AdafactorGPT(ByteGPT):
    """The same with factored moments."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of torch."""
        return torch.optim.Adafactor(self.parameters(), lr=self.learning_rate)


WAYS: dict[str, tuple[type[ByteGPT], str, Callable[[], list[Callback]]]] = {
    "AdamW, fp32": (ByteGPT, "32-true", list),
    "AdamW, bf16-mixed": (ByteGPT, "bf16-mixed", list),
    "AdamW of 8 bits, fp32": (ByteGPT, "32-true", lambda: [EightBitOptimizer()]),
    "Adafactor, fp32": (AdafactorGPT, "32-true", list),
    "LoRA of rank 8, fp32": (ByteGPT, "32-true", lambda: [LoRA(LAYERS)]),
    "QLoRA of rank 8, fp32": (ByteGPT, "32-true", lambda: [Quantize(LAYERS), LoRA(LAYERS)]),
}


class CountLive(Callback):
    """Adds up what is there at the end of the last step."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Storages of tensors and of their gradients, each once."""
        gc.collect()
        with warnings.catch_warnings():  # attributes of whatever is there, deprecated ones too
            warnings.simplefilter("ignore")
            tensors = [found for found in gc.get_objects() if isinstance(found, Tensor) and not found.is_sparse]
        storages = {}
        for tensor in tensors:
            for each in (tensor, tensor.grad if tensor.is_leaf else None):
                if isinstance(each, Tensor):
                    with torch._C.DisableTorchFunctionSubclass():
                        storage = each.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        self.num_bytes = sum(storages.values())


class Losses(Callback):
    """Of all steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep one more."""
        self.losses.append(float(outputs["loss"]))


def make_trainer(strategy: Any, devices: int, callbacks: list[Callback], precision: Any = "32-true") -> Trainer:
    """A quiet one."""
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        precision=precision,
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader(context: int, batch_size: int, num_steps: int, num_bytes: int) -> DataLoader[Any]:
    """Windows of the standard library; the text is a tensor, too, and counts."""
    text = read_texts(num_train_bytes=num_bytes)[0]
    windows = ByteWindows(text, context)
    order = window_order(windows.num_windows, num_steps * batch_size, seed=0)
    return DataLoader(ByteWindows(text, context, order), batch_size=batch_size)


def measure(given: Settings) -> dict[str, list[float]]:
    """Bytes a parameter of the plain model: way -> at stages 0 and 3."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for name, (kind, precision, make) in WAYS.items():
        for stage in (0, 3):
            torch.manual_seed(0)
            module = kind(given.width, given.num_blocks, context=given.context)
            num_parameters = sum(p.numel() for p in module.parameters())
            count = CountLive()
            trainer = make_trainer(BigModelStrategy(zero_stage=stage), given.ranks, [*make(), count], precision)
            trainer.fit(module, loader(given.context, given.batch_size, 2 * given.ranks, 10_000))
            found.setdefault(name, []).append(count.num_bytes / num_parameters)
            del module, trainer, count
            gc.collect()
    return found


def curve(given: Settings, callbacks: list[Callback]) -> list[float]:
    """Losses of one process."""
    torch.manual_seed(0)
    keep = Losses()
    trainer = make_trainer("auto", 1, [*callbacks, keep])
    trainer.fit(ByteGPT(given.curve_width), loader(64, 16, given.curve_steps, 1_500_000))
    return keep.losses


def main() -> None:
    """Measure, print a table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    path = options.pop("json")
    given = Settings(**options)
    ranks = run_ranks(measure, given.ranks, given, timeout_seconds=900.0)
    results: list[dict[str, Any]] = [
        {"way": name, "zero_0": max(r[name][0] for r in ranks), "zero_3": max(r[name][1] for r in ranks)}
        for name in WAYS
    ]
    print(f"| bytes a parameter, {given.ranks} ranks | `zero_stage=0` | `zero_stage=3` |\n| --- | ---: | ---: |")
    for row in results:
        print(f"| {row['way']} | {row['zero_0']:.2f} | {row['zero_3']:.2f} |")
    if given.curve_steps:
        torch.set_num_threads(1)
        plain, small = curve(given, []), curve(given, [EightBitOptimizer()])
        span = max(1, given.curve_steps // 10)
        for start in range(0, given.curve_steps - span + 1, span):
            means = [sum(losses[start : start + span]) / span for losses in (plain, small)]
            row = {"way": f"steps {start} to {start + span - 1}", "fp32": means[0], "8 bits": means[1]}
            results.append(row)
            print(f"| {row['way']} | {means[0]:.4f} | {means[1]:.4f} | {means[1] / means[0] - 1:+.3%} |")
    if path:
        path.write_text(json.dumps({"settings": asdict(given), "results": results}))


if __name__ == "__main__":
    main()
