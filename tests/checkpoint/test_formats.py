"""Every kind of checkpoint as every other, in little memory, and never half of one."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

from lightning_bigmodel.checkpoint import convert_checkpoint, kind_of, load_sharded, read_index
from lightning_bigmodel.cli import main
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import Net, make_net, same
from tests.checkpoint.test_convert import MEBIBYTE, Words, loader, save_plainly, saved_by_two_stages, trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Lightning file of two epochs, with moments of two groups, a schedule, tied weights and an extra state."""
    directory = tmp_path_factory.mktemp("plain")
    run = trainer(directory, 2)
    run.fit(Words(), loader())
    run.save_checkpoint(directory / "plain.ckpt")
    return directory / "plain.ckpt"


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_comes_back_from_a_directory(plain: Path, tmp_path: Path) -> None:
    """Anything lost on the way there and back: moments, groups, loops, callbacks, versions, ties."""
    seen: list[tuple[int, int, str]] = []
    convert_checkpoint(plain, tmp_path / "dir.ckpt", progress=lambda *report: seen.append(report))
    assert kind_of(tmp_path / "dir.ckpt") == "sharded"
    assert [number for number, _, _ in seen] == list(range(1, seen[0][1] + 1))
    convert_checkpoint(tmp_path / "dir.ckpt", tmp_path / "back.ckpt")
    expected, found = (torch.load(path, weights_only=False) for path in (plain, tmp_path / "back.ckpt"))
    assert found.keys() == expected.keys()
    for key in expected:
        assert same(found[key], expected[key]), key
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    assert found["state_dict"]["net.head.weight"].data_ptr() == found["state_dict"]["net.embedding.weight"].data_ptr()
    assert abs((tmp_path / "back.ckpt").stat().st_size - plain.stat().st_size) < 4096
    assert _names(tmp_path) == ["back.ckpt", "dir.ckpt"]


def test_numbered_states_have_names_once_they_are_loaded(plain: Path, tmp_path: Path) -> None:
    """States by place, given to a loader that does not say what is where, must not pass for states by name."""
    convert_checkpoint(plain, tmp_path / "dir")
    module = Words()
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = module.configure_optimizers()[0][0].param_groups
    order = [[[names[parameter] for parameter in group["params"]] for group in groups]]
    loaded = load_sharded(tmp_path / "dir", optimizer_order=order).optimizer_states[0]
    saved = torch.load(plain, weights_only=False)["optimizer_states"][0]
    flat = [name for group in order[0] for name in group]
    assert same(loaded["state"], {flat[number]: entries for number, entries in saved["state"].items()})
    assert [group["params"] for group in loaded["param_groups"]] == order[0]
    assert set(load_sharded(tmp_path / "dir").optimizer_states[0]["state"]) <= {f".{i}" for i in range(len(flat))}
    with pytest.raises(ValueError, match=r"Optimizer 0 has groups of \[1\] parameters, and the checkpoint"):
        load_sharded(tmp_path / "dir", optimizer_order=[[["net.body.weight"]]])


@pytest.mark.parametrize("source", ["file", "directory"])
def test_to_safetensors_and_back(source: str, plain: Path, tmp_path: Path) -> None:
    """The library must read the file, tied tensors must be there once and come back twice."""
    if source == "directory":
        convert_checkpoint(plain, tmp_path / "dir")
    origin = plain if source == "file" else tmp_path / "dir"
    left_out = convert_checkpoint(origin, tmp_path / "w.safetensors", strip_prefix="net.")
    assert left_out == ["net._extra_state"]
    expected = {
        name: value
        for name, value in torch.load(plain, weights_only=False)["state_dict"].items()
        if isinstance(value, torch.Tensor)
    }
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == {name.removeprefix("net.") for name in expected} - {"head.weight"}
    assert all(same(value, expected[f"net.{name}"]) for name, value in found.items())
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    # As the library takes a whole module, ties and all.
    net = Plain()
    assert load_model(net, tmp_path / "w.safetensors") == (set(), [])
    assert same(net.head.weight.detach(), expected["net.head.weight"])
    convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "w.ckpt", add_prefix="net.")
    back = torch.load(tmp_path / "w.ckpt")["state_dict"]
    assert same(dict(back), expected)
    convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "again", add_prefix="net.")
    assert read_index(tmp_path / "again").num_optimizers is None
    assert same(dict(load_sharded(tmp_path / "again").model_state), expected)


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    """Written by the library: every dtype, tensors without elements or dimensions, ties it left out."""
    tensors = {
        str(dtype): torch.arange(6).to(dtype).view(2, 3)
        for dtype in (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn)
    }
    tensors |= {"flags": torch.tensor([True, False, True]), "none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"made": "by the library"})
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "a.ckpt")
    assert same(dict(torch.load(tmp_path / "a.ckpt")["state_dict"]), tensors)
    convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), tensors)
    net = make_net()
    state = {name: value for name, value in make_net().state_dict().items() if isinstance(value, torch.Tensor)}
    model = torch.nn.ModuleDict({"embedding": net.embedding, "head": net.head})
    save_model(model, str(tmp_path / "tied.safetensors"))
    convert_checkpoint(tmp_path / "tied.safetensors", tmp_path / "tied.ckpt")
    found = torch.load(tmp_path / "tied.ckpt")["state_dict"]
    assert set(found) == {"embedding.weight", "head.weight"}
    assert same(found["head.weight"], state["head.weight"])


class Plain(Net):
    """Without the extra state, which the library cannot hold."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    """Transformers writes a tied head under the embedding's name alone; the other must not be missed."""
    save_file({"embedding.weight": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "dir")
    names = ["embedding.weight", "head.weight"]
    with pytest.raises(ValueError, match=r"lacks `head\.weight`"):
        load_sharded(tmp_path / "dir", model_names=names)
    assert set(load_sharded(tmp_path / "dir", model_names=names, same_tensor=[names]).model_state) == {names[0]}
    with pytest.raises(ValueError, match="lacks"):
        load_sharded(tmp_path / "dir", model_names=["a", "b"], same_tensor=[["a", "b"]])


def _gpt2(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, **options)
    return transformers.GPT2LMHeadModel(config)


class Wrapped(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = _gpt2()


@pytest.mark.parametrize("size", ["20KB", None])
def test_transformers_reads_what_is_written_and_the_other_way_round(
    size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from_pretrained` takes names without the prefix, an index for several files, and ties the head itself."""
    import transformers

    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would stay
    module = Wrapped()
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.0"}, tmp_path / "m.ckpt")
    convert_checkpoint(
        tmp_path / "m.ckpt", tmp_path / "hub", to="safetensors", strip_prefix="model.", max_shard_size=size
    )
    assert ("model.safetensors.index.json" in _names(tmp_path / "hub")) == (size is not None)
    module.model.config.save_pretrained(tmp_path / "hub")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(dict(again.state_dict()), dict(module.model.state_dict()))
    # And one that transformers wrote, whose tied head has no name in it.
    module.model.save_pretrained(tmp_path / "theirs", max_shard_size=size or "5GB")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "t.ckpt", add_prefix="model.")
    state = torch.load(tmp_path / "t.ckpt")["state_dict"]
    expected = module.state_dict()
    assert set(expected) - set(state) <= {"model.lm_head.weight"}
    assert all(same(value, expected[name]) for name, value in state.items())


@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict but not in the checkpoint")
def test_weights_of_safetensors_in_lightning(plain: Path, tmp_path: Path) -> None:
    """Weights alone must load where weights are wanted, and be refused with the reason where moments are."""
    convert_checkpoint(plain, tmp_path / "w.safetensors")
    convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "w.ckpt")
    module = Words.load_from_checkpoint(tmp_path / "w.ckpt", strict=False)
    assert same(module.net.body.weight.detach(), torch.load(plain, weights_only=False)["state_dict"]["net.body.weight"])
    module.strict_loading = False
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer(tmp_path, 3).fit(module, loader(), ckpt_path=tmp_path / "w.ckpt")


def test_settings_that_cannot_take_effect_are_refused(plain: Path, tmp_path: Path) -> None:
    """Each would otherwise be ignored in silence, or write what was not meant."""
    convert_checkpoint(plain, tmp_path / "dir")
    refused: list[tuple[Path, str, dict[str, Any], str]] = [
        (plain, "x.ckpt", {"to": "ckpt"}, "is of the kind `ckpt` already"),
        (tmp_path / "dir", "x", {"to": "sharded"}, "is of the kind `sharded` already"),
        (plain, "x", {"strip_prefix": "net."}, "are for safetensors"),
        (plain, "x", {"max_shard_size": "1GB"}, "`max_shard_size` is for safetensors"),
        (plain, "x.safetensors", {"max_shard_size": "100B"}, "would have more than `max_shard_size`"),
        (plain, "x.safetensors", {"max_shard_size": "many"}, "'many': give a size such as"),
        (plain, "x.safetensors", {"strip_prefix": "nett."}, "no name in .* begins with it"),
        (tmp_path / "dir", "x.safetensors", {"strip_prefix": "nett."}, "no name in .* begins with it"),
        (plain, "x.safetensors", {"weights_from": "ema"}, "has no tensors of `ema`"),
        (tmp_path / "dir", "x.safetensors", {"weights_from": "ema"}, "has no tensors of `ema`"),
    ]
    for source, target, options, message in refused:
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(source, tmp_path / target, **options)
    with pytest.raises(ValueError, match="a folder without a checkpoint"):
        convert_checkpoint(tmp_path, tmp_path / "x")
    assert _names(tmp_path) == ["dir"]


CONVERSIONS = [
    ("dir", "ckpt"),
    ("file", "sharded"),
    ("file", "safetensors"),
    ("dir", "safetensors"),
    ("w.safetensors", "ckpt"),
]


def _sources(plain: Path, folder: Path) -> dict[str, Path]:
    folder.mkdir()
    convert_checkpoint(plain, folder / "dir")
    convert_checkpoint(plain, folder / "w.safetensors")
    return {"file": plain, "dir": folder / "dir", "w.safetensors": folder / "w.safetensors"}


@pytest.mark.parametrize(("source", "to"), CONVERSIONS)
def test_nothing_is_overwritten_or_left_half(
    source: str, to: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted, or with a full disk, what had the name must be there still, and nothing beside it."""
    origin = _sources(plain, tmp_path / "from")[source]
    work = tmp_path / "work"
    work.mkdir()
    target = work / ("out" if to == "sharded" else f"out.{to}")
    convert_checkpoint(origin, target, to=to)
    before = _content(target)
    with pytest.raises(FileExistsError, match="exists. .* set `overwrite`"):
        convert_checkpoint(origin, target, to=to)

    def stop(*report: Any) -> None:
        raise KeyboardInterrupt

    if (source, to) != ("w.safetensors", "ckpt"):  # torch.save has no place to say so
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(origin, target, to=to, overwrite=True, progress=stop)
    for limited in (10, 1000):
        message = run_ranks(_convert_on_a_full_disk, 1, origin, target, to, limited, init_process_group=False)[0]
        assert message, "the conversion did not fail"
    assert _names(work) == [target.name]
    assert _content(target) == before
    convert_checkpoint(origin, target, to=to, overwrite=True)
    assert _names(work) == [target.name]


def _content(path: Path) -> Any:
    return path.read_bytes() if path.is_file() else {file.name: file.read_bytes() for file in path.iterdir()}


def _convert_on_a_full_disk(source: Path, target: Path, to: Any, num_bytes: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        convert_checkpoint(source, target, to=to, overwrite=True)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_of_other_things_is_not_replaced(plain: Path, tmp_path: Path) -> None:
    """`--overwrite` with the wrong folder would remove what is in it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="a folder of other things"):
        convert_checkpoint(plain, tmp_path / "mine", overwrite=True)
    assert _names(tmp_path / "mine") == ["thesis.tex"]
    convert_checkpoint(plain, tmp_path / "dir")
    with pytest.raises(FileExistsError, match="is what is converted"):
        convert_checkpoint(tmp_path / "dir", tmp_path / "dir", to="safetensors", overwrite=True)


def _break(source: Path, where: str) -> Callable[[bytes], None]:
    file = source if source.is_file() else source / where
    return lambda content: file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("w.safetensors", "most", "w.safetensors` has .* bytes instead of"),
        ("w.safetensors", "half", "w.safetensors` is damaged"),
        ("w.safetensors", "start", "w.safetensors` is damaged"),
        ("w.safetensors", "text", "w.safetensors` is damaged"),
        ("plain.ckpt", "half", "plain.ckpt` is damaged"),
        ("plain.ckpt", "text", "plain.ckpt` .*(is damaged|refuses)"),
        ("dir/__0_0.distcp", "half", "`__0_0.distcp` has .* bytes instead of"),
        ("dir/.metadata", "same size", ".metadata` is damaged"),
        ("dir/metadata.pt", "same size", "metadata.pt` .*(is damaged|refuses)"),
    ],
)
def test_damaged_files_are_named(name: str, damage: str, message: str, plain: Path, tmp_path: Path) -> None:
    """Half a file converted without a word, or an error that does not say which file."""
    folder = tmp_path / "from"
    _sources(plain, folder)
    shutil.copy(plain, folder / "plain.ckpt")
    content = (folder / name).read_bytes()
    damaged = {
        "half": content[: len(content) // 2],
        "most": content[:-10],
        "start": content[8:],
        "text": b"not a checkpoint at all",
        "same size": b"\x00" * len(content),
    }[damage]
    (folder / name).write_bytes(damaged)
    source = folder / name.split("/")[0]
    to: Any = "safetensors" if source.name != "w.safetensors" else "ckpt"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", to=to)
    assert _names(tmp_path) == ["from"]


def test_a_missing_file_of_an_index_is_named(tmp_path: Path) -> None:
    """A model with a third of its weights missing, loaded with `strict=False`."""
    save_plainly(tmp_path / "dir")
    convert_checkpoint(tmp_path / "dir", tmp_path / "hub", to="safetensors", max_shard_size=200)
    names = [name for name in _names(tmp_path / "hub") if name.endswith(".safetensors")]
    assert len(names) > 2
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    (tmp_path / "hub" / names[1]).unlink()
    with pytest.raises(ValueError, match=f"is incomplete: `{names[1]}` missing"):
        convert_checkpoint(tmp_path / "hub", tmp_path / "x.ckpt")


def test_the_command(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that the command names otherwise than the function."""
    folder = str(tmp_path / "hub")
    arguments = ["--to", "safetensors", "--strip-prefix", "net.", "--max-shard-size", "200B"]
    assert main(["convert", str(plain), folder, *arguments]) == 0
    assert "left out, being no tensors: net._extra_state" in capsys.readouterr().out
    assert "model.safetensors.index.json" in _names(tmp_path / "hub")
    assert main(["convert", folder, str(tmp_path / "back.ckpt"), "--add-prefix", "net."]) == 0
    assert main(["convert", folder, str(tmp_path / "back.ckpt"), "--add-prefix", "net."]) == 1
    assert "exists" in capsys.readouterr().err


def anonymous_bytes(directory: Path, source: str, target: str, to: Any) -> tuple[int, int]:
    """By how much a conversion raised the memory that only this process has, at its peak, beyond a small one before."""
    import threading
    import time

    def now() -> int:
        return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

    convert_checkpoint(directory / "small" / source, directory / "small" / target, to=to)  # what is allocated but once
    before, peak, is_done = now(), [0], threading.Event()

    def sample() -> None:
        while not is_done.is_set():
            peak[0] = max(peak[0], now())
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    convert_checkpoint(directory / "large" / source, directory / "large" / target, to=to)
    is_done.set()
    thread.join()
    return peak[0] - before, before


@pytest.mark.parametrize(
    ("source", "target", "to"),
    [
        ("dir", "new.ckpt", "ckpt"),
        ("dir", "new.safetensors", "safetensors"),
        ("file.ckpt", "new", "sharded"),
        ("file.ckpt", "new.safetensors", "safetensors"),
        ("w.safetensors", "new.ckpt", "ckpt"),
        ("w.safetensors", "new", "sharded"),
    ],
)
def test_memory_is_that_of_one_tensor(source: str, target: str, to: Any, tmp_path: Path) -> None:
    """A checkpoint of many ranks does not fit into the memory of the one process that converts it."""
    largest = 16 * MEBIBYTE
    for name, count, size in (("small", 2, 8), ("large", 12, largest // 4)):
        (tmp_path / name).mkdir()
        tensors = {f"layer_{number}": torch.full((size,), float(number)) for number in range(count)}
        if source == "dir":
            save_plainly(tmp_path / name / "dir", model_state=tensors, optimizer_states=None)
        elif source == "file.ckpt":
            torch.save({"state_dict": tensors}, tmp_path / name / source)
        else:
            save_file(tensors, tmp_path / name / source)
    ((used, _),) = run_ranks(anonymous_bytes, 1, tmp_path, source, target, to, init_process_group=False)
    assert used < 1.2 * largest
    shutil.rmtree(tmp_path / "large")


def test_directory_of_two_stages_to_safetensors(tmp_path: Path) -> None:
    """What several ranks wrote, a tied weight by two of them, is one file without repeats."""
    sharded = saved_by_two_stages(tmp_path)
    convert_checkpoint(sharded, tmp_path / "w.safetensors")
    expected = torch.load(tmp_path / "plain.ckpt", weights_only=False)["state_dict"]
    found = load_file(tmp_path / "w.safetensors")
    assert all(same(value, expected[name]) for name, value in found.items())
    assert {name for name, value in expected.items() if isinstance(value, torch.Tensor)} == set(found)
