"""Memory that the caching allocator is about to hand out, full of NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LADDER = tuple(1 << power for power in range(9, 25, 2))  # workspaces, of sizes not known here


def poison(sizes: Sequence[int], copies: int = 3) -> None:
    """Fill the caching allocator's free blocks of about these sizes with bits that are NaN in every
    float dtype, and -1 as integers."""
    if not torch.cuda.is_available():
        return
    held = [
        torch.full((max(1, size // 4),), -1, dtype=torch.int32, device="cuda")
        for size in (*(size for size in sizes for _ in range(copies)), *LADDER)
    ]
    del held
