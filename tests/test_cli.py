import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_bigmodel.cli import main

_COMMAND = [sys.executable, "-m", "lightning_bigmodel.cli"]


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory):
    """A demo of four steps over 2 x 2 ranks: where its output lies, its exit code, what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "output"
    command = [*_COMMAND, "demo", "--ranks", "4", "--steps", "4", "--accelerator", "cpu", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (folder / "results.json").exists(), done.stdout + done.stderr + _logs(folder)
    return folder, done


def _logs(folder):
    return "".join(f"\n== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("logs/*.log")))


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["convert", "--help"], ["inspect", "--help"]])
def test_help_is_printed_and_succeeds(arguments, capsys):
    """Help that raises, or exits with an error, is no help."""
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "usage: bigmodel" in printed.out
    assert printed.err == ""


def test_help_names_every_subcommand_and_option(capsys):
    """An option that help does not show is not found."""
    main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("demo", "convert", "inspect"))
    main(["demo", "--help"])
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("ranks", "steps", "seed", "output", "accelerator"))
    main(["convert", "--help"])
    text = capsys.readouterr().out
    assert all(f"[--{name}]" in text for name in ("overwrite", "ema", "allow-code"))
    assert all(f"[--{name} " in text for name in ("to", "strip-prefix", "add-prefix", "max-shard-size"))
    assert "source target" in " ".join(text.split())
    main(["inspect", "--help"])
    assert all(f"[--{name}]" in capsys.readouterr().out for name in ("json",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["demo", "--ranks", "3"], "ranks"),
        (["demo", "--steps", "many"], "steps"),
        (["demo", "--steps", "1"], "`steps` is 1"),
        (["demo", "--no-such-option", "1"], "--no-such-option"),
        (["convert", "only-one"], "target"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments, message, capsys):
    """Bad usage must be named in one line, before any process is started."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("bigmodel: error: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_output_of_an_earlier_run_is_not_written_over(tmp_path, capsys):
    """A second run into the same folder would mix its checkpoints with the first run's."""
    (tmp_path / "precious").touch()
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_no_subcommand_shows_help_and_fails(capsys):
    """A bare `bigmodel` in a script must not look like success."""
    assert main([]) == 2
    assert "usage: bigmodel" in capsys.readouterr().err


def test_more_gpus_than_there_are_is_bad_usage(monkeypatch, capsys):
    """Ranks that share one GPU, or fall back to the CPU in silence, are not what was asked for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["demo", "--accelerator", "cuda", "--ranks", "2"]) == 2
    assert "`ranks` is 2, but this machine has 1 GPUs" in capsys.readouterr().err


def test_failure_to_convert_is_one_line_and_exit_code_1(tmp_path, capsys):
    """A missing checkpoint is a failure, not bad usage, and no traceback."""
    assert main(["convert", str(tmp_path / "missing"), str(tmp_path / "model.ckpt")]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("bigmodel: error: ")
    assert "missing" in printed.err
    assert printed.err.count("\n") == 1


def test_demo_does_what_it_shows(tiny_demo):
    """Four steps through every part: the comparisons must hold, and too few steps to learn must be said and fail."""
    folder, done = tiny_demo
    results = json.loads((folder / "results.json").read_text())
    assert sorted(results["trained"]["losses"]) == sorted(results["one_process"]["losses"]) == ["1", "2", "3", "4"]
    for step, loss in results["one_process"]["losses"].items():
        assert results["trained"]["losses"][step] == pytest.approx(loss, abs=1e-5)
    assert results["resumed"]["losses"] == pytest.approx({"4": results["trained"]["losses"]["4"]}, abs=1e-6)
    assert "NOT both below it" in done.stdout
    assert "NO   not every claim above holds" in done.stdout
    assert done.stdout.count("yes  ") == 2
    assert (done.returncode, done.stderr) == (1, "")


def test_demo_shows_what_each_rank_owns(tiny_demo):
    """Two stages must split the blocks, and two replicas must own the same."""
    _, done = tiny_demo
    rows = [line.strip("\u2502 ") for line in done.stdout.splitlines() if "tokens" in line or "head" in line]
    assert len(rows) == 4
    assert sum("tokens" in row for row in rows) == 2


def test_demo_checkpoint_converts_to_one_ordinary_file(tiny_demo, tmp_path, capsys):
    """What `bigmodel demo` saves, `bigmodel convert` must read, into a file plain Lightning loads whole."""
    from lightning_bigmodel.demo.model import ByteGPT

    folder, _ = tiny_demo
    source, target = str(folder / "checkpoints" / "step-4.ckpt"), str(tmp_path / "model.ckpt")
    assert main(["convert", source, target]) == 0
    assert "wrote" in capsys.readouterr().out
    model = ByteGPT.load_from_checkpoint(target, weights_only=False)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert main(["convert", source, target]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["convert", source, target, "--overwrite"]) == 0


def _group_processes(group):
    """Live processes of a process group, zombies aside."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, its_group, state in rows if int(its_group) == group and not state.startswith("Z")]


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["parent", "group"])
def test_interrupt_ends_everything(send, tmp_path):
    """Ctrl-C must leave no rank behind, whether the terminal sends it to all processes or a user to the parent."""
    command = [*_COMMAND, "demo", "--accelerator", "cpu", "--output", str(tmp_path / "output")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        try:
            assert any("step 1/" in line for line in demo.stdout), demo.stderr.read() + _logs(tmp_path / "output")
            # The command, four ranks, the process they are forked from, and Python's resource tracker.
            assert len(_group_processes(demo.pid)) >= 6
            began = time.monotonic()
            send(demo.pid, signal.SIGINT)
            # Seconds on an idle machine; the limit is for one whose cores other work shares.
            while len(_group_processes(demo.pid)) > 2:
                assert time.monotonic() < began + 20, "ranks outlived Ctrl-C"
            _, errors = demo.communicate(timeout=40)
            assert (demo.returncode, errors) == (130, "bigmodel: interrupted\n")
            while _group_processes(demo.pid):
                assert time.monotonic() < began + 40, "processes outlived the command"
        finally:
            for process in _group_processes(demo.pid):
                os.kill(process, signal.SIGKILL)
    assert "Traceback" not in _logs(tmp_path / "output")
