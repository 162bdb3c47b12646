"""The shapes that `attention.py` measures, and their tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec, MaskFormula, TensorSpec

DTYPE = torch.bfloat16
PASSES = ("fwd", "fwd+bwd")
# Inputs in turn, so that they do not come out of the L2 cache (50 MB on Hopper); at most so many,
# and so much memory.
CACHE_BYTES, SETS, SETS_BYTES = 2 * 50_000_000, 8, 8_000_000_000


@dataclass(frozen=True)
class Shape:
    """One attention problem, with the words of `fa_inductor.spec.AttentionSpec`.

    window: how many keys left of the diagonal are seen, None for all.
    bias: "none"; "batch" (B, 1, Sq, Sk) and "heads" (1, H, Sq, Sk), added to the scores; "padding"
        (B, 1, 1, Sk), "causal mask", causal and padding, and "documents", each sequence in some
        parts, (B, 1, Sq, Sk), are bool.
    layout: "bshd", views of contiguous (B, S, H, D); "bhsd", contiguous (B, H, S, D); "packed",
        slices of one (B, S, 3, H, D).
    backward: whether a backward is measured too.
    flex: whether flex_attention is measured by default; it compiles for seconds.
    """

    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int]
    causal: str = "none"
    window: int | None = None
    bias: str = "none"
    dropout: float = 0.0
    layout: str = "bshd"
    backward: bool = True
    flex: bool = False

    def __str__(self) -> str:
        words = [f"B{self.batch}", "H" + _pair(self.heads), "S" + _pair(self.lengths)]
        words.append("d" + _pair(self.dims))
        if self.causal != "none":
            words.append("causal" if self.causal == "top_left" else "causal BR")
        if self.window is not None:
            words.append(f"w{self.window}")
        if self.bias != "none":
            words.append(
                {"padding": "mask B11S", "batch": "bias B1SS", "heads": "bias 1HSS"}.get(
                    self.bias, self.bias
                )
            )
        if self.dropout:
            words.append(f"drop{self.dropout}")
        return " ".join([*words, self.layout])

    @property
    def passes(self) -> tuple[str, ...]:
        return PASSES if self.backward else PASSES[:1]

    @property
    def out_order(self) -> str:
        """What eager's output has for such inputs."""
        return "BHSD" if self.layout == "bhsd" else "BSHD"

    def visible(self) -> int:
        """How many (query, key) pairs are seen in one head."""
        sq, sk = self.lengths
        if self.causal == "none":
            return sq * sk
        offset = 0 if self.causal == "top_left" else sk - sq
        left = sk if self.window is None else self.window
        return sum(max(0, min(sk, i + offset + 1) - max(0, i + offset - left)) for i in range(sq))

    def flops(self, passed: str) -> int:
        """Of the matrix products: two in the forward, five in the backward."""
        d, dv = self.dims
        products = d + dv + (3 * d + 2 * dv if passed == "fwd+bwd" else 0)
        return 2 * self.batch * self.heads[0] * self.visible() * products

    def tiny(self) -> Shape:
        """The same kind of problem for a CPU."""
        heads_q, heads_kv = self.heads
        ratio = heads_q // heads_kv
        sq, sk = (1 if length == 1 else min(33, length) + length % 2 for length in self.lengths)
        return dataclasses.replace(
            self,
            batch=min(self.batch, 2),
            heads=(ratio * min(heads_kv, 2), min(heads_kv, 2)),
            lengths=(sq, sk if sk == sq or sq == 1 else sk + 7),
            dims=(self.dims[0] // 8, self.dims[1] // 8),
            window=None if self.window is None else 9,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(given: dict[str, Any]) -> Shape:
        pairs = {name: tuple(given[name]) for name in ("heads", "lengths", "dims")}
        return Shape(**{**given, **pairs})


def _pair(values: tuple[int, int]) -> str:
    return str(values[0]) if values[0] == values[1] else f"{values[0]}/{values[1]}"


@dataclass(frozen=True)
class Tensors:
    """One set of inputs: (B, H, S, D) views. `mask` is what `F.scaled_dot_product_attention`
    takes; `rng` (seed, offset) of the op's dropout. read: what the mask is made from, as its text
    (`MASKS`) reads it."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    mask: Tensor | None = None
    rng: Tensor | None = None
    read: Tensor | None = None

    @cached_property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, to be differentiated by autograd."""
        q, k, v = (tensor.detach().requires_grad_() for tensor in (self.q, self.k, self.v))
        return q, k, v

    def bytes(self) -> int:
        """What a forward reads."""
        given = (self.q, self.k, self.v, self.mask)
        return sum(t.numel() * t.element_size() for t in given if t is not None)


def tensors(shape: Shape, device: str) -> Tensors:
    """A set of inputs. grad_out lies in memory as eager's output does."""
    (heads_q, heads_kv), (sq, sk), (d, dv) = shape.heads, shape.lengths, shape.dims

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=DTYPE)

    def make(heads: int, length: int, dim: int) -> Tensor:
        if shape.layout == "bhsd":
            return normal(shape.batch, heads, length, dim)
        return normal(shape.batch, length, heads, dim).transpose(1, 2)

    if shape.layout == "packed":
        q, k, v = normal(shape.batch, sq, 3, heads_q, d).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        q, k, v = make(heads_q, sq, d), make(heads_kv, sk, d), make(heads_kv, sk, dv)
    mask = read = None
    if shape.bias in MASKS:
        read = _read(shape, device)
        mask = seen(shape.bias, read, torch.arange(sq, device=device)[:, None])
    elif shape.bias != "none":
        mask = normal(*((shape.batch, 1) if shape.bias == "batch" else (1, heads_q)), sq, sk)
    rng = torch.randint(1 << 31, (2,), device=device) if shape.dropout else None
    return Tensors(q, k, v, make(heads_q, sq, dv), mask, rng, read)


# The text of each bool mask, and its kind in `fa_inductor.spec.MaskFormula`.
MASKS = {
    "padding": MaskFormula("(t0[b, j] != 0)", "keys"),
    "causal mask": MaskFormula("((j <= i) and (t0[b, j] != 0))", "causal"),
    "documents": MaskFormula("(t0[b, i] == t0[b, j])", "other"),
}


def _read(shape: Shape, device: str) -> Tensor:
    """Which keys are not padding: all sequences but the first are shorter, the last by half. Or in
    which of three documents each token is, with bounds of its own in each sequence."""
    places = torch.arange(shape.lengths[1], device=device)
    if shape.bias != "documents":
        ends = torch.linspace(len(places), len(places) // 2, shape.batch, device=device)
        return places < ends[:, None]
    generator = torch.Generator().manual_seed(shape.batch)
    bounds = torch.randint(0, len(places), (shape.batch, 2, 1), generator=generator)
    return (places >= bounds.to(device)).sum(1)


def seen(bias: str, read: Tensor, queries: Tensor) -> Tensor:
    """The bool mask (B, 1, Sq or 1, Sk) for `queries` (Sq, 1)."""
    if bias == "documents":
        return (read[:, :, None] == read[:, None, :])[:, None]
    padding = read[:, None, None, :]
    if bias == "padding":
        return padding
    return padding & (torch.arange(read.shape[1], device=read.device) <= queries)


def input_sets(shape: Shape, device: str) -> list[Tensors]:
    """As many sets as it takes for the cache to hold none of them when its turn comes."""
    first = tensors(shape, device)
    each = first.bytes()
    count = max(1, min(-(-CACHE_BYTES // each), SETS, SETS_BYTES // each))
    return [first, *(tensors(shape, device) for _ in range(count - 1))]


def spec_of(shape: Shape, passed: str) -> AttentionSpec:
    """What the compile-time pass knows of such an attention on a CUDA device."""
    given = tensors(shape, "meta")
    q, k, v, mask = (
        None if t is None else dataclasses.replace(TensorSpec.of(t), device=torch.device("cuda"))
        for t in (given.q, given.k, given.v, given.mask)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    return AttentionSpec(
        q,
        k,
        v,
        DTYPE,
        causal=shape.causal,
        scale=shape.dims[0] ** -0.5,
        mask=None if mask is None else f"attn_mask {mask.dtype} {mask}",
        bias=mask,
        formula=MASKS.get(shape.bias),
        dropout_p=shape.dropout,
        window=(shape.window, None if shape.window is None else 0),
        needs_grad=passed != "fwd",
    )


def _shapes() -> Iterator[Shape]:
    """Batches are such as fit into a training step or a request of that length."""
    mha, llama, qwen, mqa = (16, 16), (32, 8), (28, 4), (16, 1)
    causal, d64, d128 = "top_left", (64, 64), (128, 128)

    def dense(batch: int, heads: tuple[int, int], length: int, d: Any, *rest: Any, **more: Any):
        dims = d if isinstance(d, tuple) else (d, d)
        return Shape(batch, heads, (length, length), dims, *rest, **more)

    # Encoders, vision and diffusion transformers, small language models.
    yield dense(64, mha, 128, d64, layout="packed")
    yield dense(128, mha, 197, d64, layout="packed")
    yield dense(16, mha, 197, d64, layout="bhsd")
    yield dense(32, mha, 512, d64)
    yield dense(16, mha, 1024, d64, layout="bhsd")
    yield dense(16, mha, 1024, d64, causal, layout="packed", flex=True)
    yield dense(8, mha, 2048, d64, causal)
    yield dense(4, mha, 4096, d64)
    yield dense(4, llama, 4096, d64, causal)
    yield dense(2, llama, 8192, d64, causal)
    yield dense(1, mha, 16384, d64, causal, layout="bhsd")
    yield Shape(4, mha, (4096, 77), d64)  # image latents to the words of a prompt
    yield dense(8, mha, 1024, 96)
    yield dense(4, mha, 2048, 96, causal, layout="packed")
    yield dense(2, llama, 4096, 96, causal)
    # Language models with 128 a head.
    yield dense(32, llama, 128, d128, causal)
    yield dense(16, llama, 512, d128, causal)
    yield dense(8, mha, 512, d128, causal, layout="bhsd")
    yield dense(8, mha, 1024, d128)
    yield dense(1, llama, 1024, d128, causal)
    yield dense(4, mha, 2048, d128, layout="packed", flex=True)
    yield dense(4, llama, 2048, d128, causal, flex=True)
    yield dense(4, qwen, 2048, d128, causal)
    yield dense(2, mha, 4096, d128, causal, flex=True)
    yield dense(2, llama, 4096, d128, causal, layout="bhsd")
    yield dense(2, mqa, 4096, d128, causal)
    yield dense(1, mha, 8192, d128)
    yield dense(1, qwen, 8192, d128, causal)
    yield dense(1, mha, 16384, d128)
    yield dense(1, llama, 16384, d128, causal, flex=True)
    yield dense(1, qwen, 32768, d128, causal)
    yield dense(1, mha, 65536, d128, causal)
    yield Shape(1, llama, (1024, 8192), d128, "bottom_right", backward=False)  # chunked prefill
    # Wide heads: latent attention as DeepSeek trains it, Gemma.
    yield dense(4, mha, 1024, (192, 128), causal)
    yield dense(4, mha, 2048, (192, 128))
    yield dense(2, mha, 4096, (192, 128), causal)
    yield dense(1, mha, 8192, (192, 128), causal)
    yield dense(4, mha, 1024, 256, causal)
    yield dense(2, mha, 2048, 256)
    yield dense(2, mqa, 4096, 256, causal)
    yield dense(1, llama, 8192, 256, causal)
    # Sliding windows.
    yield dense(2, llama, 4096, d128, causal, 1024, flex=True)
    yield dense(1, qwen, 8192, d128, causal, 1024)
    yield dense(1, llama, 16384, d64, causal, 1024)
    yield dense(1, mqa, 65536, d128, causal, 1024)
    # Masks and dropout.
    yield dense(8, mha, 512, d64, bias="batch")
    yield dense(2, llama, 2048, d128, bias="batch", flex=True)
    yield dense(16, mha, 512, d64, bias="heads")
    yield dense(2, mha, 2048, d64, bias="heads")
    yield dense(16, mha, 512, d64, bias="padding")
    yield dense(4, mha, 2048, d128, bias="padding")
    yield dense(64, (12, 12), 128, d64, bias="padding")
    yield dense(4, (12, 12), 4096, d64, bias="padding")
    yield dense(16, mha, 512, d64, bias="causal mask")
    yield dense(4, llama, 1024, d128, bias="causal mask")
    yield dense(4, llama, 2048, d128, bias="causal mask")
    yield dense(2, (16, 8), 8192, d128, bias="causal mask", flex=True)
    yield dense(1, llama, 16384, d128, bias="causal mask")
    yield dense(2, mha, 2048, (192, 128), bias="causal mask")
    yield dense(2, mha, 2048, 256, bias="causal mask")
    yield dense(16, mha, 512, d64, bias="documents")
    yield dense(4, mha, 2048, d128, bias="documents")
    yield dense(2, mha, 8192, d128, bias="documents", flex=True)
    yield dense(32, mha, 512, d64, dropout=0.1)
    yield dense(8, mha, 1024, d64, causal, dropout=0.1, layout="packed")
    yield dense(4, mha, 2048, d128, causal, dropout=0.1)
    # One new token on a cache of keys and values.
    yield Shape(64, llama, (1, 1024), d128, backward=False)
    yield Shape(16, mha, (1, 1024), d64, layout="bhsd", backward=False)
    yield Shape(16, llama, (1, 8192), d128, layout="bhsd", backward=False)
    yield Shape(1, qwen, (1, 8192), d128, backward=False)
    yield Shape(16, mqa, (1, 8192), d128, backward=False)
    yield Shape(4, llama, (1, 32768), d128, layout="bhsd", backward=False)


SHAPES = tuple(_shapes())
