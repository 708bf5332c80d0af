"""The ``bigmodel`` command.

Its subcommands are plain typed functions; jsonargparse makes the options from their signatures and docstrings.
Whatever a subcommand needs beyond that is imported when it runs, so ``bigmodel --help`` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["convert", "demo", "inspect", "main"]

_FAILED = 1
_BAD_USAGE = 2
_INTERRUPTED = 130


class _UsageError(Exception):
    """The command line asks for something impossible; the message says what and what to change."""


def demo(
    ranks: Literal["auto", 1, 2, 4] = "auto",
    steps: int = 120,
    seed: int = 0,
    output: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda"] = "auto",
) -> int:
    """Train a small model over pipeline stages and data replicas, and prove its numbers against one process.

    Trains a byte-level GPT on Python's own standard library, shows what each rank owns and how the loss falls, then
    repeats the run on one process and resumes it from the middle, and compares. Needs no download and about a minute.

    Args:
        ranks: Processes: 4 is two pipeline stages times two data replicas, 2 is two pipeline stages, 1 is one process.
            By default 4, or as many of these as there are GPUs.
        steps: Optimizer steps, at least 2. Some 60 are needed before the model makes use of context.
        seed: Seed of the weights and of the order of the data.
        output: Folder for checkpoints, logs and results, new or empty. By default ``bigmodel-demo`` in the current
            folder, with a number added if that exists.
        accelerator: Where ranks compute. By default on GPUs if there are any, one a rank.

    Returns:
        Exit code: 0 if every claim held, else 1.
    """
    from rich.console import Console

    from lightning_bigmodel.demo import DemoSettings, run_demo

    chosen_accelerator, num_ranks = _choose_ranks(None if ranks == "auto" else ranks, accelerator)
    try:
        settings = DemoSettings(
            output=_output_folder(output),
            num_ranks=num_ranks,
            accelerator=chosen_accelerator,
            num_steps=steps,
            seed=seed,
        )
    except ValueError as error:
        raise _UsageError(str(error)) from error
    return run_demo(settings, Console())


def convert(
    source: str,
    target: str,
    to: Literal["sharded", "ckpt", "safetensors"] | None = None,
    overwrite: bool = False,
    ema: bool = False,
    strip_prefix: str = "",
    add_prefix: str = "",
    max_shard_size: str | None = None,
    allow_code: bool = False,
) -> int:
    """Convert a checkpoint: sharded folder, Lightning file or safetensors, from each to each.

    safetensors has weights alone. Averages that `ExponentialMovingAverage` has saved become `ema_state_dict` in a
    Lightning file. Reads folders of Lightning's `ModelParallelStrategy` too. Runs no code from the checkpoint. Both
    may be URLs of fsspec's, such as ``s3://bucket/last.ckpt``.

    Args:
        source: A sharded folder, a Lightning file, a file of safetensors or a folder with their index.
        target: Where to write, such as ``model.ckpt``, ``model.safetensors`` or a folder.
        to: The kind to write. By default safetensors for ``*.safetensors``, else of a folder a file and of a file a
            folder; of safetensors a file for ``*.ckpt`` and else a folder.
        overwrite: Replace what is there.
        ema: Write the averaged weights as the weights, for inference: without optimizer states.
        strip_prefix: Taken from the beginning of names, to or from safetensors, such as ``model.`` for transformers.
        add_prefix: Put before names, to or from safetensors.
        max_shard_size: Most of a file in a folder of safetensors, such as ``2GB``. By default ``5GB``.
        allow_code: Load pickled objects that may run code: only of checkpoints you trust.

    Returns:
        Exit code: 0.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from lightning_bigmodel.checkpoint.formats import convert_checkpoint
    from lightning_bigmodel.checkpoint.remote_formats import stored_bytes

    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("converting", total=None)

        def on_progress(num_done: int, num_values: int, key: str) -> None:
            progress.update(task, completed=num_done, total=num_values)

        left_out = convert_checkpoint(
            source,
            target,
            to=to,
            overwrite=overwrite,
            weights_only=not allow_code,
            weights_from="ema" if ema else None,
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
            max_shard_size=max_shard_size,
            progress=on_progress,
        )
    console.print(f"wrote {escape(target)} ({stored_bytes(target):,} bytes)", highlight=False, soft_wrap=True)
    if left_out:
        console.print(f"left out, being no tensors: {escape(', '.join(left_out))}", highlight=False, soft_wrap=True)
    return 0


def inspect(path: str, as_json: bool = False, allow_code: bool = False) -> int:
    """Show what a checkpoint holds, and whether it is whole.

    Names, shapes, types, layout, step, epoch and sizes of a sharded folder (Lightning's own too), a Lightning file or
    safetensors. Reads no tensors and runs no code from the checkpoint; says which file would need it.

    Args:
        path: The checkpoint, or its URL.
        as_json: Print JSON.
        allow_code: Also read a Lightning file whose pickled objects may run code: only of checkpoints you trust.

    Returns:
        Exit code: 0, or 1 if something is missing or damaged.
    """
    import json

    from rich.console import Console

    from lightning_bigmodel.checkpoint.inspection import inspect_checkpoint

    report = inspect_checkpoint(path, weights_only=not allow_code)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console().print(_report_lines(report), markup=False, highlight=False, soft_wrap=True)
    return _FAILED if report["problems"] else 0


def _report_lines(report: dict[str, Any]) -> str:
    known = ("global_step", "epoch", "layout", "num_ranks", "num_optimizers")
    lines = [f"{report['path']}: {report['kind']}"]
    lines += [f"{key}: {report[key]}" for key in known if report[key] is not None]
    lines += [
        f"tensors: {len(report['tensors'])}, {report['tensor_bytes']:,} bytes; files: {report['file_bytes']:,} bytes"
    ]
    width = max(map(len, report["tensors"]), default=0)
    lines += [f"  {key:{width}}  {entry['dtype']} {entry['shape']}" for key, entry in report["tensors"].items()]
    lines += [f"  {name} is the same tensor as {kept}" for name, kept in report["same_tensor"].items()]
    lines += [
        f"{name} needs code to be loaded ({', '.join(classes)}): if you trust it, give --allow-code"
        for name, classes in report["needs_code"].items()
    ]
    lines += [f"NOT COMPLETE: {problem}" for problem in report["problems"]]
    return "\n".join(lines if report["problems"] else [*lines, "complete"])


_SUBCOMMANDS: dict[str, Callable[..., int]] = {"demo": demo, "convert": convert, "inspect": inspect}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0 for success, 1 for failure, 2 for bad usage, 130 after Ctrl-C. Errors are one line on stderr.

    Example:
        >>> main(["convert", "missing-folder", "model.ckpt"])
        1
    """
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("bigmodel: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except _UsageError as error:
        return _fail(error, _BAD_USAGE)
    except (OSError, RuntimeError, ValueError) as error:
        return _fail(error, _FAILED)


def _run(argv: list[str]) -> int:
    from jsonargparse import ArgumentError, Namespace

    parser = _build_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return _BAD_USAGE
    try:
        namespace = parser.parse_args(argv)
    except ArgumentError as error:
        raise _UsageError(str(error)) from error
    except SystemExit as leaving:  # after --help
        return int(leaving.code or 0)
    chosen: Namespace = namespace[namespace.subcommand]
    return _SUBCOMMANDS[namespace.subcommand](**vars(chosen))


def _build_parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser

    about = "Train an unchanged LightningModule under any layout of ranks, to the numbers of one process."
    parser = ArgumentParser(prog="bigmodel", description=about, exit_on_error=False)
    subcommands = parser.add_subcommands(title="subcommands", required=True)
    for name, function in _SUBCOMMANDS.items():
        subparser = ArgumentParser(description=_summary(function), exit_on_error=False)
        # jsonargparse would make `--overwrite true` of a bool, and `--strip_prefix` of two words.
        own = [p for p in signature(function).parameters.values() if p.annotation == "bool" or "_" in p.name]
        subparser.add_function_arguments(function, as_group=False, as_positional=True, skip={p.name for p in own})
        for parameter in own:
            option, text = _option(parameter.name), _argument_help(function, parameter.name)
            if parameter.annotation == "bool":
                subparser.add_argument(option, dest=parameter.name, action="store_true", help=text)
            else:
                subparser.add_argument(option, dest=parameter.name, type=str, default=parameter.default, help=text)
        subcommands.add_subcommand(name, subparser, help=_summary(function).splitlines()[0])
    return parser


def _summary(function: Callable[..., Any]) -> str:
    lines = (function.__doc__ or "").partition("Args:")[0].strip().splitlines()
    return "\n".join(line.strip() for line in lines)


def _option(name: str) -> str:
    return "--" + name.removeprefix("as_").replace("_", "-")


def _argument_help(function: Callable[..., Any], name: str) -> str:
    arguments = (function.__doc__ or "").partition("Args:")[2].partition("\n\n")[0]
    found = re.search(rf"^ *{name}: (.*(?:\n {{12}}.*)*)", arguments, flags=re.MULTILINE)
    return "" if found is None else " ".join(found[1].split())


def _fail(error: Exception, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"bigmodel: error: {text}", file=sys.stderr)
    return code


def _choose_ranks(ranks: int | None, accelerator: Literal["auto", "cpu", "cuda"]) -> tuple[Literal["cpu", "cuda"], int]:
    import torch

    num_gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and num_gpus < (ranks or 1):
        raise _UsageError(
            f"`accelerator` is cuda and `ranks` is {ranks or 1}, but this machine has {num_gpus} GPUs; each rank takes"
            " one. Choose fewer `ranks`, or `--accelerator cpu`."
        )
    if num_gpus == 0 or num_gpus < (ranks or 1):
        return "cpu", ranks or 4
    return "cuda", ranks or max(size for size in (1, 2, 4) if size <= num_gpus)


def _output_folder(output: str | None) -> Path:
    if output is not None:
        folder = Path(output).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _UsageError(f"`output` is {folder}, which exists and is not an empty folder. Choose a new one.")
        return folder
    if not os.access(Path.cwd(), os.W_OK):
        return Path(tempfile.mkdtemp(prefix="bigmodel-demo-"))
    folder, number = Path.cwd() / "bigmodel-demo", 1
    while folder.exists():
        number += 1
        folder = Path.cwd() / f"bigmodel-demo-{number}"
    return folder


if __name__ == "__main__":
    sys.exit(main())
