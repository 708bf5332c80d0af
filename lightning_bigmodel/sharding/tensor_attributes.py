"""Numbers by which a module knows its heads and widths, and which of them a rank's share of the layers changes."""

from __future__ import annotations

from torch import nn

from lightning_bigmodel.sharding.tensor_styles import Target

__all__ = ["divided_attributes"]

# The width of one head.
_HEAD_WIDTHS = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_head",
    "dim_head",
    "d_kv",
    "d_k",
)
# How many heads: of queries, or of keys and values.
_HEAD_COUNTS = frozenset(
    {
        *("num_heads", "num_head", "n_heads", "n_head", "nhead", "heads", "h", "num_attention_heads", "num_q_heads"),
        *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_query_groups"),
        *("n_local_heads", "n_local_kv_heads"),
    }
)
# How many features: of all heads together, or between the layers of a feed-forward.
_WIDTHS = frozenset(
    {
        *("inner_dim", "inner_size", "d_inner", "all_head_size", "split_size", "q_size", "kv_size", "q_dim", "kv_dim"),
        *("embed_dim", "embed_dims", "hidden_size", "hidden_dim", "d_model", "dim", "width", "n_embd"),
        *("intermediate_size", "ffn_dim", "ff_dim", "d_ff", "mlp_dim"),
    }
)


def divided_attributes(
    column: Target,
    parent: nn.Module,
    widths: tuple[int, ...],
    heads_width: int | None,
    is_attention: bool,
    size: int,
) -> dict[str, int]:
    """Attributes of the module around a colwise layer with the values they have on a rank.

    A number is divided if its name says that it counts heads or features, and if it is that of the layer: a
    feed-forward whose `hidden_size` is the width of its input keeps that one.

    Args:
        column: The layer.
        parent: The module it lies in.
        widths: Widths of its parts.
        heads_width: Width of all heads, where queries, keys and values of a head lie together.
        is_attention: Whether the layer is one of several that belong together, as queries, keys and values do.
        size: Number of ranks.

    Raises:
        ValueError: If a number of heads or a width does not divide by `size`.
    """
    numbers = {
        name: value
        for name, value in vars(parent).items()
        if isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
    head = next((numbers[name] for name in _HEAD_WIDTHS if name in numbers), None)
    divided: dict[str, int] = {}
    for width in widths if heads_width is None else (heads_width,):
        if is_attention and head and width % head == 0:
            num_heads = width // head
            if num_heads % size:
                raise ValueError(
                    f"{column.name!r} has {num_heads} heads of width {head}, which `tensor_parallel_size={size}` does "
                    f"not divide. Choose a size that divides {num_heads}, or write 'replicate' for "
                    f"{column.pattern!r} and the layers that belong to it."
                )
            divided |= {name: v for name, v in numbers.items() if name in _HEAD_COUNTS and v == num_heads}
        elif not head:
            divided |= {name: v for name, v in numbers.items() if name in _HEAD_COUNTS and width % v == 0}
    divided |= {name: v for name, v in numbers.items() if name in _WIDTHS and v in {*widths, sum(widths), heads_width}}
    for name, value in divided.items():
        if value % size:
            raise ValueError(
                f"`{name}={value}` of {column.name.rpartition('.')[0]!r} does not divide by "
                f"`tensor_parallel_size={size}`. Choose a size that divides it, or write 'replicate' for "
                f"{column.pattern!r} and the layers that belong to it."
            )
    return {name: value // size for name, value in divided.items()}
