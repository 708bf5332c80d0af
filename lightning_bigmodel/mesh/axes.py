"""The axes of the rank mesh and the sizes a user may give them."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["AXES", "Layout"]

AXES = ("pipe", "data_replicate", "data_shard", "tensor")
"""Mesh axes, slowest varying first: neighbouring ranks are tensor ranks, which talk most and share a machine."""

_NUM_SUGGESTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks lie along each axis of the mesh.

    The product of the four axes is the world size. `expert` is a view over the data ranks, never a further factor: an
    expert axis of its own would leave every dense layer replicated along it.

    Args:
        pipe: Ranks a model is cut over, in order.
        data_replicate: Whole-model replicas.
        data_shard: Ranks one replica's states are sharded over.
        tensor: Ranks one layer is split over.
        expert: Data ranks the experts of a layer are spread over; divides `data_size`.

    Raises:
        TypeError: If a size is not an `int`.
        ValueError: If a size is below 1, or `expert` does not divide the number of data ranks.

    Example:
        >>> layout = Layout.resolve(8, pipeline_parallel_size=2, zero_stage=3)
        >>> layout.data_shard, layout.world_size
        (4, 8)
    """

    pipe: int
    data_replicate: int
    data_shard: int
    tensor: int
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_size(field.name, getattr(self, field.name))
        if self.data_size % self.expert:
            raise ValueError(
                f"`expert_parallel_size={self.expert}` does not divide the {self.data_size} data-parallel ranks: "
                f"experts are spread over data ranks. Use one of {_divisors(self.data_size)}."
            )

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks: each of them gets its own part of a batch."""
        return self.data_replicate * self.data_shard

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole mesh."""
        return self.pipe * self.data_size * self.tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return (self.pipe, self.data_replicate, self.data_shard, self.tensor)

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_replicate_size: int | None = None,
        zero_stage: int = 0,
    ) -> Layout:
        """Find the layout of `world_size` ranks; ranks that no other axis takes are data-parallel.

        Args:
            world_size: Number of ranks.
            pipeline_parallel_size: Ranks a model is cut over.
            tensor_parallel_size: Ranks a layer is split over.
            expert_parallel_size: Data ranks the experts are spread over.
            data_replicate_size: With `zero_stage` above 0, how many whole-model replicas the data ranks form
                (default 1: all of them shard one model). With `zero_stage=0` every data rank is a replica.
            zero_stage: 0 replicates every state; 1, 2 and 3 shard over the data ranks.

        Raises:
            TypeError: If a size is not an `int` (`bool` and `str` included).
            ValueError: If a size is below 1, or the ranks do not factor into the sizes.
        """
        _check_size("world_size", world_size)
        _check_size("pipeline_parallel_size", pipeline_parallel_size)
        _check_size("tensor_parallel_size", tensor_parallel_size)
        _check_size("expert_parallel_size", expert_parallel_size)
        if type(zero_stage) is not int:
            raise TypeError(f"`zero_stage` must be an int in 0..3, got {zero_stage!r} ({type(zero_stage).__name__}).")
        if zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero_stage` must be one of 0, 1, 2, 3, got {zero_stage}.")
        model_size = pipeline_parallel_size * tensor_parallel_size
        if world_size % model_size:
            raise ValueError(_unfactored_message(world_size, pipeline_parallel_size, tensor_parallel_size))
        data_size = world_size // model_size
        replicate, shard = _split_data_ranks(data_size, data_replicate_size, zero_stage)
        return cls(
            pipe=pipeline_parallel_size,
            data_replicate=replicate,
            data_shard=shard,
            tensor=tensor_parallel_size,
            expert=expert_parallel_size,
        )


def _check_size(name: str, value: object) -> None:
    # `type(...) is int` and not `isinstance`: True is an int, and a YAML "2" a str; both are slips worth naming.
    if type(value) is not int:
        raise TypeError(f"`{name}` must be an int >= 1, got {value!r} ({type(value).__name__}).")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}.")


def _split_data_ranks(data_size: int, data_replicate_size: int | None, zero_stage: int) -> tuple[int, int]:
    if data_replicate_size is not None:
        _check_size("data_replicate_size", data_replicate_size)
    if zero_stage == 0:
        if data_replicate_size not in (None, data_size):
            raise ValueError(
                f"`data_replicate_size={data_replicate_size}` has no effect with `zero_stage=0`: all {data_size} "
                f"data-parallel ranks are replicas. Leave it out, or set `zero_stage` to 1, 2 or 3."
            )
        return data_size, 1
    replicate = 1 if data_replicate_size is None else data_replicate_size
    if data_size % replicate:
        raise ValueError(
            f"`data_replicate_size={replicate}` does not divide the {data_size} data-parallel ranks. "
            f"Use one of {_divisors(data_size)}."
        )
    return replicate, data_size // replicate


def _unfactored_message(world_size: int, pipe: int, tensor: int) -> str:
    model_size = pipe * tensor
    message = (
        f"{world_size} ranks cannot be divided into models of {model_size} ranks "
        f"(`pipeline_parallel_size={pipe}` times `tensor_parallel_size={tensor}`): the product must divide the number "
        "of ranks. "
    )
    below, above = world_size // model_size * model_size, -(-world_size // model_size) * model_size
    choices = [f"{above} ranks" if below == 0 else f"{below} or {above} ranks"]
    if world_size % tensor == 0:
        choices.append(f"`pipeline_parallel_size` of {_nearest(pipe, _divisors(world_size // tensor))}")
    if world_size % pipe == 0:
        choices.append(f"`tensor_parallel_size` of {_nearest(tensor, _divisors(world_size // pipe))}")
    return message + "Nearest legal settings: " + "; or ".join(choices) + "."


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _nearest(wanted: int, legal: list[int]) -> str:
    nearest = sorted(sorted(legal, key=lambda size: abs(size - wanted))[:_NUM_SUGGESTIONS])
    return " or ".join(map(str, nearest))
