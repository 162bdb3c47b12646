"""Fresh memory full of NaN, so that an element which nobody wrote shows."""

from __future__ import annotations

from fa_inductor.probing.poison import NAN, fill_cuda_free_memory, poisoned

__all__ = ["poison_cuda_free_memory", "poisoned"]


def poison_cuda_free_memory(fraction: float = 0.8) -> None:
    """Fill the CUDA caching allocator's free blocks, small and large, with NaN."""
    fill_cuda_free_memory(NAN, fraction)
