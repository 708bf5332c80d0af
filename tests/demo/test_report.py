import io

import pytest
from rich.console import Console

from lightning_bigmodel.demo.command import _compare_with_one_process, _compare_with_resumed, _Run
from lightning_bigmodel.demo.report import DemoReport, format_bytes, format_names, plot_losses
from lightning_bigmodel.demo.settings import DemoSettings


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def settings(tmp_path):
    return DemoSettings(output=tmp_path, num_steps=8)


def test_names_that_count_up_become_a_range():
    """A range over names that do not follow each other would claim modules a rank does not own."""
    names = ["tokens", "blocks.0", "blocks.1", "blocks.3", "other.4", "norm"]
    assert format_names(names) == "tokens, blocks.0 .. blocks.1, blocks.3, other.4, norm"
    assert format_names([]) == ""


def test_bytes_are_written_with_their_unit():
    """A wrong power of 1024 misleads by three orders of magnitude."""
    assert [format_bytes(size) for size in (5, 2048, 3 * 2**20, 5 * 2**30)] == [
        "5 B",
        "2.00 KiB",
        "3.00 MiB",
        "5.00 GiB",
    ]


def test_plot_puts_large_losses_on_top_and_marks_the_entropy():
    """An upside-down curve would show a model that unlearns."""
    lines = plot_losses([4.0, 3.0, 2.0, 1.0], entropy=2.0).splitlines()
    assert lines[0].startswith("  4.000 |*")
    assert lines[11] == "  1.000 |   *"
    (entropy_line,) = [line for line in lines if "entropy 2.000" in line]
    assert "--*-" in entropy_line
    with pytest.raises(ValueError, match="finite"):
        plot_losses([float("nan")], entropy=1.0)


def test_steps_are_plain_lines_where_there_is_no_terminal(console):
    """A live bar in a log file is unreadable; and the last step must be among the lines."""
    with DemoReport(console).steps("training", num_steps=40) as advance:
        for step in range(1, 41):
            advance(step, 5.0 / step)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "training ..."
    assert lines[1] == "  step 1/40  loss 5.0000 nats"
    assert lines[-1] == "  step 40/40  loss 0.1250 nats"
    assert len(lines) == 10


def test_a_live_bar_shows_the_loss_on_a_terminal():
    """The terminal's branch must work as well, which no other test walks."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with DemoReport(console).steps("training", num_steps=4) as advance:
        advance(4, 1.5)
    assert "loss 1.5000 nats" in console.file.getvalue()


def test_layout_shows_every_rank(console):
    """The table is how a user sees who owns what."""
    ranks = [
        {
            "rank": rank,
            "pipe_rank": rank % 2,
            "data_rank": rank // 2,
            "stages": [rank % 2],
            "modules": ["blocks.0", "blocks.1"],
            "num_parameters": 12_345 + rank,
            "parameter_bytes": 4096,
        }
        for rank in range(4)
    ]
    DemoReport(console).layout(ranks)
    text = console.file.getvalue()
    assert [f"{12_345 + rank:,}" in text for rank in range(4)] == [True] * 4
    assert text.count("blocks.0 .. blocks.1") == 4
    assert text.count("4.00 KiB") == 4


def test_generated_text_cannot_move_the_cursor(console):
    """An untrained model writes any byte, and a carriage return or escape would spoil the whole screen."""
    DemoReport(console).text("title", "a\rb\x1b[31mc\td\ne [bold]f")
    text = console.file.getvalue()
    assert "a\ufffdb\ufffd[31mc" in text
    assert "e [bold]f" in text
    assert not set(text) & set("\r\x1b\t")


def _run(num_steps=8, first_step=0, shift=0.0):
    losses = {step: 3.0 / step + shift for step in range(first_step + 1, num_steps + 1)}
    return _Run(losses=losses, validation_losses={num_steps: 2.0 + shift})


@pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (9e-4, True), (1.1e-3, False), (float("nan"), False)])
def test_a_run_that_differs_from_one_process_is_said_to(console, settings, shift, passes):
    """The demo must not call different numbers equal; nor NaN, which compares false with everything."""
    assert _compare_with_one_process(settings, DemoReport(console), _run(), _run(shift=shift)) is passes
    assert ("NO" in console.file.getvalue()) is not passes


@pytest.mark.parametrize(
    ("resumed", "passes"),
    [
        ({"first_step": 6}, True),
        ({"first_step": 6, "shift": 0.01}, False),
        ({"first_step": 0}, False),
        ({"first_step": 7}, False),
        ({"first_step": 6, "shift": float("nan")}, False),
    ],
)
def test_a_resumed_run_that_leaves_the_curve_is_said_to(console, settings, resumed, passes):
    """Resuming must continue: not begin again, not skip a step, not take another path."""
    assert settings.resume_step == 6
    assert _compare_with_resumed(settings, DemoReport(console), _run(), _run(**resumed)) is passes
    assert ("NO" in console.file.getvalue()) is not passes


def test_epochs_end_at_quarters_and_at_the_last_step(tmp_path):
    """Few steps give fewer epochs; there must always be one to resume from."""
    ends = {num: DemoSettings(output=tmp_path, num_steps=num).epoch_ends for num in (2, 3, 4, 160)}
    assert ends == {2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 3, 4), 160: (40, 80, 120, 160)}
    with pytest.raises(ValueError, match="`steps` is 1"):
        DemoSettings(output=tmp_path, num_steps=1)
