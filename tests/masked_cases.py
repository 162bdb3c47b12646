"""Masked attention problems: texts, sizes, and inputs drawn for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor import mask_text
from fa_inductor.mask_blocks import mask_blocks
from fa_inductor.masked_problem import QUERY_BLOCK, key_block

CAUSAL_PADDING = "((j <= i) and (t0[b, j] != 0))"
PADDING = "(t0[b, j] != 0)"
DOCUMENTS = "(t0[b, i] == t0[b, j])"
CAUSAL_DOCUMENTS = "((j <= i) and (t0[b, i] == t0[b, j]))"
CHUNKS = "((j <= i) and (i // 100 == j // 100))"
PREFIX = "((j <= i) or (j < t0[b]))"
DENSE = "(t0[b, 0, i, j] != 0)"
PER_HEAD = "((j <= i + Sk - Sq) and (not (t0[0, h, i, j] != 0)))"
SHIFTED = "((t0[b, j - 5] != 0) and (t0[b, Sk - 1 - j] != 0))"


@dataclass(frozen=True)
class Case:
    """heads: (Hq, Hkv). lengths: (Sq, Sk). dims: (D, Dv)."""

    text: str
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (333, 333)
    dims: tuple[int, int] = (64, 64)
    softcap: float = 0.0
    sink: bool = False
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        extras = f"{' softcap' if self.softcap else ''}{' sink' if self.sink else ''}"
        return f"{self.text} H{self.heads} S{self.lengths} D{self.dims}{extras} {self.dtype}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads[0], *self.lengths

    def read(self, device: Any = "cpu") -> list[Tensor]:
        """What the text reads."""
        b, h, sq, sk = self.shape
        if self.text == CHUNKS:
            return []
        if self.text == PREFIX:
            return [torch.randint(0, sk, (b,), device=device)]
        if self.text in (DOCUMENTS, CAUSAL_DOCUMENTS):
            return [torch.randint(0, 9, (b, sk), device=device).sort(1).values]
        if self.text == DENSE:  # whole, empty and mixed blocks, and rows that see nothing
            rows = torch.rand(b, 1, sq, 1, device=device) < 0.9
            blocks = torch.rand(b, 1, -(-sq // 32), -(-sk // 200), device=device)
            spread = blocks.repeat_interleave(32, 2).repeat_interleave(200, 3)[:, :, :sq, :sk]
            return [(torch.rand(b, 1, sq, sk, device=device) < spread.round(decimals=1)) & rows]
        if self.text == PER_HEAD:
            return [torch.rand(1, h, sq, sk, device=device) < 0.3]
        padding = torch.rand(b, sk, device=device) < 0.7
        padding[0, sk // 3 :] = False
        return [padding]

    def blocks(self, read: list[Tensor], device: Any = "cpu") -> list[Tensor]:
        """The lists of blocks, by query and by key."""
        b, h, sq, sk = self.shape
        keys = key_block(self.dims[0])
        shape = (b, h if self.text == PER_HEAD else 1, sq, sk)
        seen = mask_text.rendered(self.text, read, shape, device)
        padded = F.pad(seen, (0, -sk % keys, 0, -sq % QUERY_BLOCK))
        tiles = padded.unflatten(3, (-1, keys)).unflatten(2, (-1, QUERY_BLOCK))
        count = tiles.sum((3, 5), dtype=torch.int32)
        made = [mask_blocks(count, QUERY_BLOCK * keys, by_key) for by_key in (False, True)]
        return [tensor for each in made for tensor in each]

    def inputs(self, device: Any = "cpu") -> list[Tensor]:
        """q, k, v and grad_out, (B, H, S, D) views of (B, S, H, D) memory."""
        (hq, hk), (sq, sk), (d, dv) = self.heads, self.lengths, self.dims
        sizes = ((sq, hq, d), (sk, hk, d), (sk, hk, dv), (sq, hq, dv))
        return [
            torch.randn(self.batch, *size, device=device, dtype=self.dtype).transpose(1, 2)
            for size in sizes
        ]


CASES = (
    Case(CAUSAL_PADDING),
    Case(CAUSAL_PADDING, (8, 2), (1000, 1000), (128, 128)),
    Case(CAUSAL_PADDING, (6, 2), (130, 130), (64, 64)),
    Case(CAUSAL_PADDING, (4, 2), (640, 640), (128, 128), softcap=20.0),
    Case(CAUSAL_PADDING, (8, 1), (257, 257), (64, 64), sink=True),
    Case(PADDING, (4, 4), (333, 500)),
    Case(PADDING, (4, 4), (500, 77)),
    Case(PADDING, (4, 4), (1, 300)),
    Case(DOCUMENTS, (4, 4), (1024, 1024)),
    Case(CAUSAL_DOCUMENTS, (4, 2), (700, 700), (128, 128)),
    Case(CHUNKS, (4, 4), (512, 512)),
    Case(PREFIX, (4, 4), (300, 300)),
    Case(SHIFTED, (4, 4), (300, 300)),
    Case(DENSE, (4, 4), (333, 777)),
    Case(DENSE, (4, 2), (333, 777), (128, 128), dtype=torch.float16),
    Case(DENSE, (4, 4), (384, 384), (96, 96)),
    Case(DENSE, (4, 4), (450, 333), (192, 128)),
    Case(DENSE, (2, 2), (333, 450), (256, 256)),
    Case(PER_HEAD, (4, 2), (260, 400)),
    Case(PER_HEAD, (4, 4), (260, 400), (128, 128)),
)
