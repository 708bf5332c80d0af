import pytest
import torch

from lightning_bigmodel.demo.model import ByteGPT, TransformerBlock, generate_text


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ByteGPT(width=32, num_blocks=2, context=16)


def test_training_lowers_the_loss(model):
    """A model that cannot learn would leave the demo with nothing to show."""
    text = torch.tensor(list(b"for i in range(10): pass\n" * 20)).unfold(0, 17, 17)
    batch = (text[:, :-1], text[:, 1:])
    optimizer = model.configure_optimizers()
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = model._loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.2), "an untrained model should know nothing: ln 256"
    assert losses[-1] < 1.0


def test_a_byte_is_predicted_from_earlier_bytes_only(model):
    """A model that sees its targets learns to copy, and its loss means nothing."""
    byte_ids = torch.randint(256, (1, 16))
    changed = byte_ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(byte_ids), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_every_parameter_gets_a_gradient(model):
    """A parameter outside the computation would be an idle passenger that no comparison can check."""
    byte_ids = torch.randint(256, (4, 16))
    model._loss((byte_ids, byte_ids)).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_generated_text_depends_on_the_seed_alone(model):
    """Sampling must be repeatable, and must not disturb the generator training draws from."""
    state = torch.get_rng_state()
    first = generate_text(model, "def ", num_bytes=40, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert first == generate_text(model, "def ", num_bytes=40, seed=1)
    assert first != generate_text(model, "def ", num_bytes=40, seed=2)
    assert first.startswith("def ")
    assert model.training


def test_temperature_zero_takes_the_likeliest_byte(model):
    """Greedy sampling that still draws would differ from seed to seed."""
    with torch.no_grad():
        model.head.bias[ord("x")] = 100.0
    assert generate_text(model, "a", num_bytes=3, temperature=0, seed=5) == "axxx"


def test_wrong_sizes_are_refused(model):
    """Sizes that do not fit must be named, not end in a reshape error."""
    with pytest.raises(ValueError, match="`width`=30 is not divisible by `num_heads`=4"):
        TransformerBlock(width=30, num_heads=4)
    with pytest.raises(ValueError, match="`prompt` is empty"):
        generate_text(model, "")
