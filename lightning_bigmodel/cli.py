"""The ``bigmodel`` command.

Its subcommands are plain typed functions; jsonargparse makes the options from their signatures and docstrings.
Whatever a subcommand needs beyond that is imported when it runs, so ``bigmodel --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

__all__ = ["convert", "demo", "main"]

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


def convert(directory: str, output_path: str, overwrite: bool = False, ema: bool = False) -> int:
    """Make one ordinary Lightning checkpoint file of a sharded checkpoint folder.

    Averages that `ExponentialMovingAverage` has saved become `ema_state_dict` in the file. Loads the folder's Python
    objects as Lightning's own loading does: convert only checkpoints you trust.

    Args:
        directory: A complete sharded checkpoint folder.
        output_path: The file to write, such as ``model.ckpt``.
        overwrite: Replace the file if it exists.
        ema: Write the averaged weights as the weights, for inference: without optimizer states.

    Returns:
        Exit code: 0.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from lightning_bigmodel.checkpoint.convert import convert_to_single_file

    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)

        def on_progress(num_read: int, num_values: int, key: str) -> None:
            progress.update(task, completed=num_read, total=num_values)

        convert_to_single_file(
            directory,
            output_path,
            overwrite=overwrite,
            weights_from="ema" if ema else None,
            progress=on_progress,
        )
    num_bytes = Path(output_path).stat().st_size
    console.print(f"wrote {escape(output_path)} ({num_bytes:,} bytes)", highlight=False, soft_wrap=True)
    return 0


_SUBCOMMANDS: dict[str, Callable[..., int]] = {"demo": demo, "convert": convert}


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

    flags = {
        "overwrite": "Replace the file if it exists.",
        "ema": "Write the averaged weights as the weights, for inference: without optimizer states.",
    }
    about = "Train an unchanged LightningModule under any layout of ranks, to the numbers of one process."
    parser = ArgumentParser(prog="bigmodel", description=about, exit_on_error=False)
    subcommands = parser.add_subcommands(title="subcommands", required=True)
    for name, function in _SUBCOMMANDS.items():
        subparser = ArgumentParser(description=_summary(function), exit_on_error=False)
        subparser.add_function_arguments(function, as_group=False, as_positional=True, skip=set(flags))
        # jsonargparse would make `--overwrite true` of a bool.
        for flag in (flag for flag in flags if flag in signature(function).parameters):
            subparser.add_argument(f"--{flag}", action="store_true", help=flags[flag])
        subcommands.add_subcommand(name, subparser, help=_summary(function).splitlines()[0])
    return parser


def _summary(function: Callable[..., Any]) -> str:
    lines = (function.__doc__ or "").partition("Args:")[0].strip().splitlines()
    return "\n".join(line.strip() for line in lines)


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
