"""Real models with random weights and tiny configs: which of their attention is covered?"""

from __future__ import annotations

from . import decoders, diffusion, encoders, seq2seq
from .entry import Case, Entry

ENTRIES: tuple[Entry, ...] = (
    *decoders.entries(),
    *encoders.entries(),
    *seq2seq.entries(),
    *diffusion.entries(),
)

__all__ = ["ENTRIES", "Case", "Entry"]
