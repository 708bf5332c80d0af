"""The tiny modules: each trains under plain Lightning, and has the awkwardness it is there for."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_bigmodel.testing import CollectiveCounter, ForwardCounter, tiny

_CLASSES = [getattr(tiny, name) for name in tiny.__all__ if name != "TinyModule"]


def _fit(module, tmp_path, max_steps=3):
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    loader = DataLoader(module.dataset(12), batch_size=4)
    trainer.fit(module, loader, loader)
    return trainer, loader


@pytest.mark.parametrize("kind", _CLASSES)
def test_each_trains_logs_and_predicts(kind, tmp_path):
    """An oracle that does not train compares nothing with nothing."""
    torch.manual_seed(0)
    module = kind()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer, loader = _fit(module, tmp_path)
    assert {"train_loss", "val_loss"} <= set(trainer.callback_metrics)
    unchanged = [name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])]
    assert unchanged == []
    outputs = trainer.predict(module, loader)
    assert [len(output) for output in outputs] == [4, 4, 4]


@pytest.mark.parametrize("kind", _CLASSES)
def test_batches_depend_on_their_seed_alone(kind):
    """Ranks build their batches apart: a batch drawn from global state would differ between them."""
    module = kind()
    state = torch.get_rng_state()
    first, again, other = (module.example_batch(3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (list(b.values()) if isinstance(b, dict) else b for b in (first, again, other))
    rows = next(iter(DataLoader(module.dataset(3, seed=1), batch_size=3)))
    rows = list(rows.values()) if isinstance(rows, dict) else rows
    for values, same, different, row in zip(first, again, other, rows, strict=True):
        assert torch.equal(values, same)
        assert torch.equal(values, row)
        assert not torch.equal(values, different)


def _gradients(module):
    module.loss(module.example_batch(4)).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_a_tied_head_is_one_parameter():
    """A tie that is only a copy would hide the two owners a pipeline must sum over."""
    module = tiny.TinyTransformer(tied_head=True)
    assert module.head.weight is module.embedding.weight
    assert "head.weight" not in _gradients(module)
    assert "positions" in dict(module.named_parameters(recurse=False))


def test_dropout_drops_in_training_alone():
    """Dropout that does nothing would not test the random state of stages."""
    module = tiny.TinyTransformer(dropout=0.5)
    batch = module.example_batch(2)
    assert module.loss(batch) != module.loss(batch)
    module.eval()
    assert module.loss(batch) == module.loss(batch)


def test_a_transformer_is_causal():
    """A model that sees its labels learns nothing worth comparing."""
    module = tiny.TinyTransformer()
    tokens = module.example_batch(1)["input_ids"]
    changed = tokens.clone()
    changed[:, -1] += 1
    assert torch.equal(module(tokens)[:, :-1], module(changed % 256)[:, :-1])


@pytest.mark.parametrize(("kind", "name"), [(tiny.TinySkips, "blocks.1"), (tiny.TinyLeak, "blocks.0.linear")])
def test_the_loss_reads_values_from_the_middle(kind, name):
    """Without the second path into the loss the module would be one more plain chain."""
    module = kind()
    kept = []
    module.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(output))
    loss = module.loss(module.example_batch(2))
    outputs, targets = module(module.example_batch(2)[0]), module.example_batch(2)[1]
    error = torch.nn.functional.mse_loss(outputs, targets)
    torch.testing.assert_close(loss - error, 0.1 * kept[0].square().mean())


def test_a_skip_passes_over_the_middle_blocks():
    """Without its skip the module would be one more plain chain."""
    module = tiny.TinySkips()
    outputs, last_inputs = [], []
    for block in module.blocks:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    module.blocks[-1].register_forward_pre_hook(lambda module, args: last_inputs.append(args[0]))
    module(module.example_batch(2)[0])
    torch.testing.assert_close(last_inputs[0], outputs[-2] + outputs[0])


def test_a_long_skip_needs_three_blocks():
    """With two blocks the skip would pass over nothing, silently."""
    with pytest.raises(ValueError, match="`num_blocks=2`"):
        tiny.TinySkips(num_blocks=2)


def test_one_block_runs_twice():
    """The block that runs twice is the whole point of the module."""
    module = tiny.TinyCalledTwice()
    with ForwardCounter(module.blocks) as counter:
        module.loss(module.example_batch(2))
    assert [counter.num_forwards[str(index)] for index in range(4)] == [1, 2, 1, 1]


def test_every_decoder_block_reads_the_encoder():
    """Memory read by one decoder block alone would need no forwarding past it."""
    module = tiny.TinyEncoderDecoder(num_blocks=3)
    memories = []
    for block in module.decoder:
        block.register_forward_pre_hook(lambda module, args: memories.append(args[1]))
    module.loss(module.example_batch(2))
    assert len(memories) == 3
    assert all(memory is memories[0] for memory in memories)


def test_batch_norm_depends_on_the_other_samples():
    """A normalisation that ignores the rest of the batch would be safe to cut into micro-batches."""
    module = tiny.TinyBatchNorm()
    inputs = module.example_batch(4)[0]
    assert not torch.allclose(module(inputs)[:2], module(inputs[:2]))


def test_plain_training_sends_nothing(tmp_path):
    """The oracle is one process: had it found a process group, it would not be one."""
    with CollectiveCounter() as counter:
        _fit(tiny.TinyChain(), tmp_path)
    assert counter.as_dict() == {}
