"""Saved tensors that leave the device and come back: the same bits and strides, in time, and no more than said."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bigmodel.recompute.install import TreatedBlocks
from lightning_bigmodel.recompute.link import DirectLink, measured_bandwidth
from lightning_bigmodel.recompute.moved import HostMemoryError, MovedTensors
from lightning_bigmodel.recompute.offload import Offload
from lightning_bigmodel.recompute.policy import Block, Chain
from tests.recompute.chains import Mixed, assert_same, run
from tests.recompute.checked_link import CheckedLink

BYTES = 4 * 64  # a tensor of 64 floats


class Late(Offload):
    """Over a link that checks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"min_bytes": 0, **settings})
        self.links: list[CheckedLink] = []
        self.made: list[MovedTensors] = []

    def link(self, device: torch.device) -> CheckedLink:
        """Kept, to be looked at."""
        self.links.append(CheckedLink())
        return self.links[-1]

    def moved(self, device: torch.device) -> MovedTensors:
        """Kept, to be looked at."""
        self.made.append(super().moved(device))
        return self.made[-1]


class Views(nn.Module):
    """Saves a tensor, its transpose, a slice, an expansion, a view of another type, a parameter and a view of that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """`(8, 8)`."""
        hidden = x * 1.5
        mixed = hidden.mT @ self.weight.mT + hidden @ self.weight
        part = hidden[:2] * hidden[2:4]
        wide = hidden[0].expand(8, 8) * mixed
        odd = hidden[1:, 1::2].exp().sum()
        bits = torch.view_as_complex(hidden.reshape(8, 4, 2))
        return torch.sin(wide + part.sum() + odd + (bits * bits).real.sum())


class Exp(nn.Module):
    """Saves one tensor of 64 floats."""

    def forward(self, x: Tensor) -> Tensor:
        """Saves its result."""
        return torch.exp(x) * 1e-3


def deep(module: type[nn.Module], policy: Offload | None, count: int, **options: Any) -> list[Any]:
    """Gradients of a chain."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(module() for _ in range(count))
    chain = Chain([Block(f"block {i}", block, i) for i, block in enumerate(blocks)], ends_in_backward=False, **options)
    treated = None if policy is None else TreatedBlocks(chain, policy.treatments(chain))
    x = torch.randn(8, 8, requires_grad=True)
    hidden = x * 1
    for block in blocks:
        hidden = block(hidden)
    hidden.square().mean().backward()
    if treated is not None:
        treated.close()
    return [x.grad, *(parameter.grad for parameter in blocks.parameters())]


@pytest.mark.parametrize("settings", [{}, {"prefetch": 3}, {"saved": "inputs"}])
def test_gradients_over_a_late_link(settings: dict[str, Any]) -> None:
    """Bytes that are read before they came, memory that is given up too early, views with other strides."""
    policy = Late(**settings)
    assert_same(run(Mixed, policy), run(Mixed, None))
    assert_same(deep(Views, policy, 4), deep(Views, None, 4))
    for link, moved in zip(policy.links, policy.made, strict=True):
        gc.collect()
        assert link.sizes[0]
        assert link.sizes[1]
        assert link.under_way == []
        assert link.released
        assert (moved.host_bytes, moved.device_bytes) == (0, 0)


def test_each_storage_is_copied_once_and_parameters_never() -> None:
    """A copy for each view, or of weights, which the optimizer then changes beside."""
    policy = Late()
    deep(Views, policy, 1)
    (link,) = policy.links
    # What autograd saves of the block: hidden, mixed, the result of exp (7 x 4), and the input of sin.
    assert sorted(link.sizes[0]) == [4 * 28, BYTES, BYTES, BYTES]
    policy = Late(min_bytes=BYTES)
    deep(Views, policy, 1)
    assert sorted(policy.links[0].sizes[0]) == [BYTES, BYTES, BYTES]


def test_the_device_holds_what_prefetch_says_at_any_depth() -> None:
    """Everything fetched at once, or nothing ahead."""
    for prefetch in (1, 2, 4):
        for count in (8, 24):
            policy = Late(prefetch=prefetch)
            deep(Exp, policy, count)
            (moved,) = policy.made
            # A block saves its result, 256 bytes.
            assert moved.peak_device_bytes == (prefetch + 1) * BYTES
            assert moved.num_copies == [count, count - prefetch]


class Parts(nn.Module):
    """Writes to parts of a tensor that are no views of it for autograd, as recurrent cells do, and saves each."""

    def forward(self, x: Tensor) -> Tensor:
        """`(8, 8)`."""
        first, second = (x * 0.5).unsafe_chunk(2, 1)
        return torch.cat([first.sigmoid_(), second.exp_()], 1)


def test_parts_that_are_written_one_after_the_other() -> None:
    """What the first part was saved with, for the second one too: its bytes from before it was written."""
    # Over a link that copies at once: a late one would read what came after.
    assert_same(deep(Parts, Offload(min_bytes=0), 4), deep(Parts, None, 4))


def test_what_all_blocks_save_stays_while_they_do() -> None:
    """An encoder's memory, sent out and fetched anew by each block of the decoder."""
    moved = MovedTensors(CheckedLink(), prefetch=1)
    memory = torch.ones(64, requires_grad=True) * 2
    hidden = torch.ones(64, requires_grad=True) * 1
    for index in range(6):
        with moved.moving("block", index):
            hidden = hidden * memory * 0.5
    hidden.sum().backward()
    # The memory once, and what each block multiplies it with and gives.
    assert moved.num_copies[0] == 1 + 6
    assert moved.num_copies[1] == 6 - 1


def test_fetches_run_ahead() -> None:
    """A fetch that begins when its bytes are needed waits for the whole way."""
    policy = Late(prefetch=2)
    order: list[str] = []

    class Noted(Exp):
        def __init__(self) -> None:
            super().__init__()
            self.name = str(len(names))
            names.append(self.name)

        def forward(self, x: Tensor) -> Tensor:
            """Says when its backward begins."""
            output = torch.exp(x) * 1e-3
            output.register_hook(lambda gradient: order.append(f"{self.name}: {len(policy.links[0].sizes[1])}"))
            return output

    names: list[str] = []
    deep(Noted, policy, 6)
    # When backward comes to block 3, whose result is still there, 3 and 2 and 1 have been or are being fetched.
    assert order == ["5: 0", "4: 1", "3: 2", "2: 3", "1: 4", "0: 4"]


def test_bytes_in_flight_are_bounded() -> None:
    """A host that runs ahead of the link with all copies of a pass."""
    policy = Late(max_in_flight_bytes=2 * BYTES, prefetch=4)
    most = []
    send = CheckedLink.start_out

    def noted(self: CheckedLink, source: Tensor, target: Tensor) -> Any:
        most.append(sum(copy.source.numel() for copy in self.under_way))
        return send(self, source, target)

    CheckedLink.start_out = noted  # type: ignore[method-assign]
    try:
        deep(Exp, policy, 8)
    finally:
        CheckedLink.start_out = send  # type: ignore[method-assign]
    assert max(most) == 2 * BYTES


def test_no_room_on_the_host_is_named_with_what_would_do() -> None:
    """A run that ends in an allocator, or goes on without moving anything."""
    with pytest.raises(HostMemoryError, match=r"`max_host_bytes=600` .* The least that would do is 2048 bytes\. Set"):
        deep(Exp, Late(max_host_bytes=600), 8)
    policy = Late(max_host_bytes=2048)
    assert_same(deep(Exp, policy, 8), deep(Exp, None, 8))

    class Full(CheckedLink):
        def host_buffer(self, num_bytes: int) -> Tensor:
            """As the system says it."""
            raise RuntimeError("CUDA error: out of memory")

    moved = MovedTensors(Full())
    x = torch.ones(64, requires_grad=True)
    with moved.moving("block 0", 0):
        output = x.exp()
    with pytest.raises(
        HostMemoryError, match=r"The host \(CUDA error: out of memory\) leaves no room for 256 of the 256"
    ):
        output.sum().backward()


def test_what_the_host_has_no_room_for_goes_to_files(tmp_path: Path) -> None:
    """Bytes of another storage, files that stay, or a thread that does."""
    moved = MovedTensors(CheckedLink(), max_host_bytes=0, spill_path=tmp_path)
    output = torch.ones(64, requires_grad=True) * 1
    for index in range(3):
        with moved.moving("block", index):
            output = output.exp() * 0.1
    moved._folder._worker.submit(int).result()  # after all writes
    assert len(list(tmp_path.glob("*/*.bin"))) == 3
    output.sum().backward()
    moved._folder._worker.submit(int).result()
    assert list(tmp_path.glob("*/*.bin")) == []
    moved.close()
    policy = Late(max_host_bytes=2 * BYTES, path=tmp_path / "spill", prefetch=2)
    assert_same(deep(Exp, policy, 12), deep(Exp, None, 12))
    (moved,) = policy.made
    assert moved.spilled_bytes >= 9 * BYTES
    assert moved.peak_device_bytes == 3 * BYTES
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_disk_that_fails_is_named(tmp_path: Path) -> None:
    """An error that names a number of a file, or bytes that are missing at the other end."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"`path='.*/file'` takes no folder for activations: .* Give another\."):
        MovedTensors(CheckedLink(), max_host_bytes=0, spill_path=tmp_path / "file")
    moved = MovedTensors(CheckedLink(), max_host_bytes=0, spill_path=tmp_path)
    shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
    with pytest.raises(OSError, match=r"256 bytes of activations could not be written: .* Make room there"):
        _move_once(moved)
    moved.close()


def _move_once(moved: MovedTensors) -> None:
    output = torch.ones(64, requires_grad=True) * 1
    for index in range(3):
        with moved.moving("block", index):
            output = output.exp() * 0.1
    output.sum().backward()


def test_changes_in_place_raise_as_without() -> None:
    """Gradients of values that were there when the copy was made, for a loss of others."""
    for kept in (0, 3):  # still on the device; on the host
        moved = MovedTensors(CheckedLink(), prefetch=1)
        x = torch.ones(64, requires_grad=True) * 1
        outputs = []
        for index in range(4):
            with moved.moving("block", index):
                outputs.append(x.exp())
        with torch.no_grad():
            outputs[3 - kept].add_(1)
        with pytest.raises(RuntimeError, match="needed for gradient computation|modified by an inplace operation"):
            sum(output.sum() for output in outputs).backward()


def test_kept_graphs_and_gradients_of_gradients() -> None:
    """Bytes that are gone at a second backward."""
    moved = MovedTensors(CheckedLink(), prefetch=1)
    found = []
    for is_moved in (False, True):
        x = torch.linspace(-1, 1, 64, requires_grad=True)
        hidden = x * 1
        for index in range(4):
            if is_moved:
                with moved.moving("block", index):
                    hidden = hidden.sin()
            else:
                hidden = hidden.sin()
        loss = hidden.square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        assert moved.device_bytes <= 2 * BYTES or not is_moved  # though the graph is kept
        gradient.square().sum().backward(retain_graph=True)
        loss.backward()
        found.append([gradient.detach(), x.grad])
    assert_same(found[1], found[0])


def test_a_graph_without_backward_gives_everything_up() -> None:
    """Host memory that grows with each evaluation in training mode."""
    link = CheckedLink()
    moved = MovedTensors(link)
    for _ in range(2):
        hidden = torch.ones(64, requires_grad=True) * 1
        for index in range(3):
            with moved.moving("block", index):
                hidden = hidden.exp()
        del hidden
        assert (moved.host_bytes, moved.device_bytes, link.under_way) == (0, 0, [])


def test_the_checks_of_the_link_are_none_that_always_pass() -> None:
    """A stand-in that finds nothing."""
    link = CheckedLink()
    device, host = torch.ones(8, dtype=torch.uint8), link.host_buffer(8)
    copy = link.start_out(device, host)
    assert not torch.equal(host, device)
    for buffer in (device, host):
        with pytest.raises(AssertionError, match="freed while a copy was under way"):
            link.release(buffer)
    with pytest.raises(AssertionError, match="read before it arrived"):
        link.start_in(host, torch.empty_like(device))
    copy.wait()
    assert torch.equal(host, device)
    assert measured_bandwidth(DirectLink(torch.device("cpu")), torch.device("cpu"), 2**20) > 2**20


def test_settings() -> None:
    """A limit that is read as another number."""
    assert Offload(max_host_bytes="1.5GiB").max_host_bytes == 3 * 2**29
    with pytest.raises(ValueError, match="`prefetch=0` must be"):
        Offload(prefetch=0)
    with pytest.raises(ValueError, match="is for what goes beyond `max_host_bytes`"):
        Offload(path="/scratch")
