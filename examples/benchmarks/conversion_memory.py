"""Memory of `bigmodel convert` on a checkpoint of 2 GB: what one process needs for each conversion.

    python conversion_memory.py --folder /tmp/conversion [--layers 10] [--width 4096]

Makes a Lightning file of weights and AdamW's moments, converts it to each kind in a process of its own, and samples
`/proc/self/status` every millisecond. RssAnon is memory that only the process has. RssFile are pages of mapped files,
which the system drops and reads again when it needs room.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import threading
import time
from pathlib import Path

CONVERSIONS = [
    ("file.ckpt", "sharded", "sharded"),
    ("sharded", "back.ckpt", "ckpt"),
    ("file.ckpt", "file.safetensors", "safetensors"),
    ("sharded", "folder", "safetensors"),
    ("file.safetensors", "weights.ckpt", "ckpt"),
    ("file.safetensors", "weights", "sharded"),
]


def resident() -> dict[str, int]:
    """Bytes of this process by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return {name: found[name] for name in ("RssAnon", "RssFile")}


def make(folder: Path, num_layers: int, width: int) -> None:
    """One Lightning file."""
    import torch

    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(width, width, generator=generator) for i in range(num_layers)}
    moments = {
        i: {"step": torch.tensor(1.0), "exp_avg": weight * 0.1, "exp_avg_sq": weight**2}
        for i, weight in enumerate(state.values())
    }
    groups = [{"lr": 1e-3, "params": list(range(num_layers))}]
    optimizer_states = [{"state": moments, "param_groups": groups}]
    torch.save({"state_dict": state, "optimizer_states": optimizer_states, "epoch": 0}, folder / "file.ckpt")


def measure(folder: Path, source: str, target: str, kind: str, connection: object) -> None:
    """Convert once a tiny checkpoint, so that what is loaded but once is there, then the large one."""
    import torch

    from lightning_bigmodel.checkpoint import convert_checkpoint

    tiny = folder / f"tiny-{kind}"
    tiny.mkdir()
    torch.save({"state_dict": {"a": torch.ones(2)}}, tiny / "file.ckpt")
    for name in ("sharded", "file.safetensors"):
        convert_checkpoint(tiny / "file.ckpt", tiny / name)
    convert_checkpoint(tiny / source, tiny / f"of {target}", to=kind)
    shutil.rmtree(tiny)
    before = resident()
    peak, is_done = dict(before), threading.Event()

    def sample() -> None:
        while not is_done.is_set():
            for name, value in resident().items():
                peak[name] = max(peak[name], value)
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    begin = time.monotonic()
    convert_checkpoint(folder / source, folder / target, to=kind)
    seconds = time.monotonic() - begin
    is_done.set()
    thread.join()
    connection.send(({name: peak[name] - before[name] for name in peak}, seconds))  # type: ignore[attr-defined]


def main() -> None:
    """Print a row for each conversion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    options.folder.mkdir()
    context = multiprocessing.get_context("spawn")
    maker = context.Process(target=make, args=(options.folder, options.layers, options.width))
    maker.start()
    maker.join()
    mebibyte = 2**20
    print(f"file: {(options.folder / 'file.ckpt').stat().st_size / mebibyte:.0f} MiB,", end=" ")
    print(f"largest tensor: {options.width**2 * 4 / mebibyte:.0f} MiB")
    for source, target, kind in CONVERSIONS:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(options.folder, source, target, kind, sender))
        process.start()
        peak, seconds = receiver.recv()
        process.join()
        anonymous, mapped = (peak[name] / mebibyte for name in ("RssAnon", "RssFile"))
        print(f"| {source} to {target} | {anonymous:.1f} | {mapped:.0f} | {seconds:.1f} |", flush=True)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
