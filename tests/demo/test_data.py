import math

import pytest
import torch

from lightning_bigmodel.demo.data import (
    ByteWindows,
    byte_entropy_nats,
    read_texts,
    standard_library_files,
    window_order,
)


@pytest.fixture
def library(tmp_path):
    for number in range(32):
        # Each file says its number only, so a byte tells which file it came from.
        (tmp_path / f"file{number:02}.py").write_bytes(bytes([number]) * (10 + 20 * number))
    (tmp_path / "notes.txt").write_bytes(b"\xff" * 100)
    return tmp_path


def test_texts_are_the_same_each_time():
    """Ranks that read different bytes would train on different data without anyone noticing."""
    assert read_texts() == read_texts()
    train_text, validation_text = read_texts()
    assert len(train_text) == 1_500_000
    assert len(validation_text) == 200_000


def test_no_file_is_in_both_texts(library):
    """A validation file seen in training would make the validation loss meaningless."""
    train_text, validation_text = read_texts(library, num_train_bytes=3000, num_validation_bytes=500)
    assert set(validation_text) == {0, 8, 16, 24}
    assert set(train_text) == set(range(32)) - {0, 8, 16, 24}


def test_texts_are_filled_up_to_their_size(library):
    """Files shorter than their share must not leave the text short while others have more to give."""
    train_text, validation_text = read_texts(library, num_train_bytes=5000, num_validation_bytes=500)
    assert (len(train_text), len(validation_text)) == (5000, 500)
    everything, _ = read_texts(library, num_train_bytes=10**6, num_validation_bytes=10)
    assert len(everything) == sum(10 + 20 * number for number in range(32) if number % 8)


def test_too_few_files_are_refused_with_the_reason(tmp_path):
    """An interpreter without sources must be named as the cause, not an error about an empty tensor."""
    (tmp_path / "only.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"found 1 Python files in .* needs at least 16"):
        standard_library_files(tmp_path)


def test_entropy_of_a_case_worked_by_hand():
    """The bar the demo's loss must pass: half a, a quarter b and c each is 1.5 bits."""
    assert byte_entropy_nats(b"aabc") == pytest.approx(1.5 * math.log(2), rel=1e-12)
    assert byte_entropy_nats(b"aaaa") == 0
    assert byte_entropy_nats(bytes(range(256))) == pytest.approx(math.log(256), rel=1e-12)
    with pytest.raises(ValueError, match="`text` is empty"):
        byte_entropy_nats(b"")


def test_order_depends_on_the_seed_alone_and_visits_all_before_any_twice():
    """A resumed run draws the order anew and must meet the windows of the uninterrupted one."""
    order = window_order(num_windows=10, num_needed=25, seed=3)
    assert torch.equal(order, window_order(num_windows=10, num_needed=25, seed=3))
    assert not torch.equal(order, window_order(num_windows=10, num_needed=25, seed=4))
    assert sorted(order[:10].tolist()) == sorted(order[10:20].tolist()) == list(range(10))
    # A longer run begins as the shorter one does.
    assert torch.equal(order[:15], window_order(num_windows=10, num_needed=15, seed=3))


def test_targets_are_the_inputs_one_byte_later():
    """Targets off by one make the task trivial or impossible."""
    windows = ByteWindows(bytes(range(10)), context=3, order=torch.tensor([2, 0]))
    assert len(windows) == 2
    inputs, targets = windows[0]
    assert (inputs.tolist(), targets.tolist()) == ([6, 7, 8], [7, 8, 9])
    assert windows[1][0].tolist() == [0, 1, 2]
    assert inputs.dtype == torch.int64


def test_last_window_has_a_target_for_each_byte():
    """A text of whole windows has no byte after the last one, so the last window must not be offered."""
    windows = ByteWindows(bytes(range(9)), context=3)
    assert len(windows) == 2
    assert all(len(targets) == 3 for _, targets in (windows[index] for index in range(len(windows))))
    with pytest.raises(ValueError, match="`text` has 3 bytes"):
        ByteWindows(b"abc", context=3)
