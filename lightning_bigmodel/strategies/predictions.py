"""Put the predictions of all data ranks together, each sample once and in the loader's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bigmodel.mesh import MeshLoader, RankMesh
from lightning_bigmodel.pipeline.tree import children, map_tensors, rebuild, tensor_leaves

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["gather_predictions"]


def gather_predictions(trainer: pl.Trainer, mesh: RankMesh) -> None:
    """Make `trainer.predict` return on every rank what one process would return.

    Batches of all data ranks that belong to one batch of one process are merged row by row where they consist of
    tensors with one row a sample; other predictions follow each other in rank order.

    Communication: all predictions once over the data ranks, if they are to be returned. Memory: all of them.
    """
    loop = trainer.predict_loop
    if mesh.data_size == 1 or not loop.return_predictions or loop._combined_loader is None:
        return
    for loader, predictions in zip(loop._combined_loader.flattened, loop._predictions, strict=True):
        positions = [
            loader.positions(index) if isinstance(loader, MeshLoader) else None for index in range(len(predictions))
        ]
        own = [
            (map_tensors(lambda tensor: tensor.cpu(), prediction), place)
            for prediction, place in zip(predictions, positions, strict=True)
        ]
        gathered: list[Any] = [None] * mesh.data_size
        dist.all_gather_object(gathered, own, group=mesh.data_group)
        merged: list[Any] = []
        for index in range(max(map(len, gathered))):
            merged.extend(_merge([part[index] for part in gathered if index < len(part)]))
        predictions[:] = merged


def _merge(parts: list[tuple[Any, range | None]]) -> list[Any]:
    outputs = [output for output, _ in parts]
    places = [place for _, place in parts if place is not None]
    if len(places) < len(parts) or not all(
        _is_per_sample(output, len(place)) for output, place in zip(outputs, places, strict=True)
    ):
        return outputs
    order = torch.argsort(torch.tensor([position for place in places for position in place]))
    return [_join(outputs, order)]


def _is_per_sample(output: Any, num_samples: int) -> bool:
    tensors = tensor_leaves(output)
    return bool(tensors) and all(tensor.ndim > 0 and tensor.shape[0] == num_samples for tensor in tensors)


def _join(outputs: list[Any], order: Tensor) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)[order]
    pairs = children(first)
    if pairs is None:
        return first
    columns = zip(*([child for _, child in children(output) or ()] for output in outputs), strict=True)
    return rebuild(first, [_join(list(column), order) for column in columns])
