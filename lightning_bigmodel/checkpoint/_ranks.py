"""Agreement between ranks: what fails on one rank is an error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import torch.distributed as dist

_Result = TypeVar("_Result")

# Errors a user can act on keep their type on every rank; anything else becomes a RuntimeError.
_KEPT_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError)
}


class Ranks:
    """The ranks that write or read one checkpoint together; one process without a process group is one rank.

    Args:
        process_group: Group of all ranks taking part. Default: ``None``, the default group if there is one.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.group = process_group
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if self.is_distributed else 0
        self.num_ranks = dist.get_world_size(process_group) if self.is_distributed else 1

    def agree(self, doing: str, action: Callable[[], _Result], *, only_rank: int | None = None) -> list[_Result | None]:
        """Run ``action`` on every rank, or on one; return what each rank got, or raise on every rank.

        Communication: one object all-gather, so results must be small and picklable.

        Args:
            doing: What ``action`` does, for the message ("writing ...").
            action: Called without arguments; it may not communicate.
            only_rank: The rank that runs ``action``; the others' results are ``None``. Default: ``None``, all run it.

        Raises:
            ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError: If all ranks that failed failed
                with this one.
            RuntimeError: If any failed with something else.
        """
        if not self.is_distributed:
            return [action()]
        result: _Result | None = None
        failure: tuple[str, str] | None = None
        interrupt: BaseException | None = None
        cause: BaseException | None = None
        if only_rank is None or self.rank == only_rank:
            try:
                result = action()
            except Exception as error:
                failure, cause = (_kind(error), str(error)), error
            except BaseException as error:  # the others must not wait for a rank that is being interrupted
                failure, interrupt = (type(error).__name__, str(error)), error
        outcomes: list[tuple[tuple[str, str] | None, _Result | None]] = [(None, None)] * self.num_ranks
        dist.all_gather_object(outcomes, (failure, result), group=self.group)
        if interrupt is not None:
            raise interrupt
        failures = {rank: outcome[0] for rank, outcome in enumerate(outcomes) if outcome[0] is not None}
        if failures:
            self.raise_failures(doing, failures, cause)
        return [outcome[1] for outcome in outcomes]

    def raise_failures(
        self, doing: str, failures: Mapping[int, tuple[str, str]], cause: BaseException | None = None
    ) -> NoReturn:
        """Raise one error that names each failed rank; ``failures`` maps group ranks to (type name, message)."""
        kinds = {kind for kind, _ in failures.values()}
        error_type = _KEPT_TYPES.get(next(iter(kinds)), RuntimeError) if len(kinds) == 1 else RuntimeError
        messages: dict[tuple[str, str], list[int]] = {}
        for rank, failure in sorted(failures.items()):
            messages.setdefault(failure, []).append(self._global_rank(rank))
        # The same message from many ranks is said once, so that 512 ranks do not print it 512 times each.
        lines = []
        for (kind, message), at in messages.items():
            who = f"{'rank' if len(at) == 1 else 'ranks'} {', '.join(map(str, at))}"
            lines.append(f"{who}: {message}" if kind == error_type.__name__ else f"{who}: {kind}: {message}")
        raise error_type(f"{doing} failed on " + "\n".join(lines)) from cause

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _kind(error: Exception) -> str:
    """Name of its type, or of the kept type that one of our own types stands for."""
    own = type(error).__module__.startswith(__package__ or "")
    kept = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KEPT_TYPES] if own else []
    return kept[0] if kept else type(error).__name__
