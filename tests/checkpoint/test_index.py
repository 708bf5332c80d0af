"""What a checkpoint directory says of itself, and what is refused."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bigmodel.checkpoint import (
    describe,
    is_complete,
    is_sharded_checkpoint,
    load_sharded,
    read_rank_state,
)
from lightning_bigmodel.testing import run_ranks
from tests.checkpoint.pipe_model import make_net
from tests.checkpoint.test_store import LAYOUT, METADATA, save_from_one_process, save_on_rank


def test_errors_of_reading_say_what_is_wrong(tmp_path: Path) -> None:
    """What is no checkpoint, or half of one, must not be loaded; a wrong name gets the right one."""
    directory = tmp_path / "last.ckpt"
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        load_sharded(directory)
    directory.mkdir()
    with pytest.raises(ValueError, match="is a directory without checkpoint files, not a sharded checkpoint"):
        load_sharded(directory)
    (tmp_path / "single.ckpt").touch()
    with pytest.raises(ValueError, match="is a single file, not a sharded checkpoint"):
        load_sharded(tmp_path / "single.ckpt")
    assert not is_sharded_checkpoint(directory)

    save_from_one_process(directory)
    assert is_complete(directory)
    with pytest.raises(ValueError, match=r"lacks `body.wieght` \(nearest: `body.weight`\)"):
        load_sharded(directory, model_names=["body.wieght"])
    with pytest.raises(ValueError, match="`rank` is 1, but .* was written by 1 ranks"):
        read_rank_state(directory, 1)

    mark = directory / "bigmodel.json"
    content = json.loads(mark.read_text())
    mark.write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(ValueError, match="has checkpoint format 99; .* Update lightning_bigmodel"):
        load_sharded(directory)
    mark.write_text(json.dumps(content)[:100])
    with pytest.raises(ValueError, match=r"is incomplete: its completion mark `bigmodel.json` is damaged"):
        load_sharded(directory)
    mark.write_text(json.dumps(content))
    (directory / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"is incomplete: `__0_0.distcp` has 5 bytes instead of \d+"):
        load_sharded(directory)
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: `__0_0.distcp` is missing"):
        load_sharded(directory)
    mark.unlink()
    with pytest.raises(ValueError, match="is incomplete: it has no completion mark"):
        load_sharded(directory)
    assert is_sharded_checkpoint(directory)
    assert not is_complete(directory)


class RunsCode:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("where", ["metadata.pt", "rank_00000.pt", ".metadata"])
def test_weights_only_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Any pickled file of a directory from elsewhere can hold code, the table of tensors included."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "last.ckpt"
    save_from_one_process(
        directory,
        metadata={**METADATA, "mine": RunsCode()} if where == "metadata.pt" else METADATA,
        rank_state={"mine": RunsCode()} if where == "rank_00000.pt" else {},
    )
    if where == ".metadata":
        (directory / where).write_bytes(pickle.dumps(RunsCode()))
        mark = json.loads((directory / "bigmodel.json").read_text())
        mark["files"][where] = (directory / where).stat().st_size
        (directory / "bigmodel.json").write_text(json.dumps(mark))
    with pytest.raises(ValueError, match=re.escape(where) + ".*weights_only"):
        load_sharded(directory)
    assert not Path("ran").exists()


def test_description_without_reading_tensors(tmp_path: Path) -> None:
    """What `inspect` shows must come from the mark alone, and count what is there."""
    directory = tmp_path / "last.ckpt"
    run_ranks(save_on_rank, 4, directory, 2)
    for path in directory.glob("*.distcp"):
        content = path.read_bytes()
        path.write_bytes(b"\0" * len(content))
    (directory / ".metadata").write_bytes(b"\0" * (directory / ".metadata").stat().st_size)
    found = describe(directory)
    assert (found["global_step"], found["epoch"], found["layout"], found["num_ranks"]) == (3, 1, LAYOUT, 4)
    tensors = [value for value in make_net().state_dict().values() if isinstance(value, torch.Tensor)]
    assert found["model"]["num_bytes"] == sum(value.nbytes for value in tensors)
    assert found["model"]["dtypes"]["bfloat16"] == 16
    trained_names = [n for n, p in make_net().named_parameters() if p.requires_grad and not n.startswith("unused")]
    assert found["optimizers"][0]["num_tensors"] == 3 * len(trained_names)
    assert found["tensors"]["state_dict.body.weight"] == {"shape": [4, 4], "dtype": "float32"}
    assert found["file_bytes"] == sum(p.stat().st_size for p in directory.iterdir() if p.name != "bigmodel.json")
    shutil.rmtree(directory)
    with pytest.raises(FileNotFoundError):
        describe(directory)
