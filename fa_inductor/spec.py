"""`AttentionSpec`: everything that is known about one attention problem before it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from . import symbolic
from .problem import Problem
from .symbolic import Dim

CAUSAL_KINDS = ("none", "top_left", "bottom_right")

# Order of (B, H, S, D) in memory that PyTorch's own flash attention gives its output.
BSHD = "BSHD"


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of one tensor: (B, H, S, D), strides in elements."""

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    storage_offset: Dim = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.storage_offset(),
        )

    def __str__(self) -> str:
        return "(" + ", ".join(map(symbolic.text, self.shape)) + ")"


@dataclass(frozen=True)
class MaskFormula:
    """A mask that only shows and hides, as text (`fa_inductor.mask_text`).

    kind: "causal" if no query sees what comes after it, "keys" if all queries see the same keys,
        else "other".
    """

    text: str
    kind: str


@dataclass(frozen=True)
class AttentionSpec:
    """One attention problem.

    q: (B, Hq, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv), Hq a multiple of Hkv.
    dtype: what the scores are computed from and the output has (under autocast the inputs
        may still have another).
    causal: "none"; "top_left": query i sees keys j <= i; "bottom_right": j <= i + Sk - Sq.
    scale: factor on q·k; None means 1/sqrt(D).
    mask: what the attention mask is, in words; None without one.
    proven: what a mask that is no longer needed was proven to be, in words; it is then in causal
        and window, and mask is None.
    bias: the mask as the op takes it, (B or 1, Hq or 1, Sq or 1, Sk or 1), bool (True is
        visible) or added to the scores; None without a mask and for one that the op cannot take.
    bias_needs_grad: whether the bias is differentiated.
    formula: the mask as text, for kernels that evaluate it; None if it is not only a mask.
    dropout_p: probability with which a weight is dropped.
    window: (left, right) bounds of a sliding window, None where unbounded, as in
        `fa_inductor.problem.Problem`.
    softcap: scores become softcap · tanh(score / softcap); 0.0 for none.
    has_sink: whether a learnable sink logit takes part in each softmax.
    has_seqlens: whether sequences are shorter than Sq and Sk, by lengths on the device.
    needs_grad: whether a backward can be asked for.
    deterministic: whether the backward must be repeatable bit by bit.
    sdp_backends: names of `torch.nn.attention.SDPBackend` that the user left enabled around
        the call, None when nothing is restricted.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    dtype: torch.dtype
    causal: str = "none"
    scale: float | None = None
    mask: str | None = None
    proven: str | None = None
    bias: TensorSpec | None = None
    bias_needs_grad: bool = False
    formula: MaskFormula | None = None
    dropout_p: float = 0.0
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    has_sink: bool = False
    has_seqlens: bool = False
    needs_grad: bool = False
    deterministic: bool = False
    sdp_backends: tuple[str, ...] | None = None

    @property
    def head_dims(self) -> tuple[Dim, Dim]:
        """(D, Dv)."""
        return self.q.shape[3], self.v.shape[3]

    @property
    def heads(self) -> tuple[Dim, Dim]:
        """(Hq, Hkv)."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def lengths(self) -> tuple[Dim, Dim]:
        """(Sq, Sk)."""
        return self.q.shape[2], self.k.shape[2]

    @property
    def scores(self) -> tuple[Dim, Dim, Dim, Dim]:
        """The shape of the scores, (B, Hq, Sq, Sk)."""
        batch, heads = self.q.shape[:2]
        return (batch, heads, *self.lengths)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(left, right) bounds of the band of visible keys, causal taken in."""
        return Problem(0.0, self.causal, *self.window).band

    def to_json(self) -> dict[str, Any]:
        def tensor(t: TensorSpec) -> dict[str, Any]:
            return {
                "shape": [_json_dim(d) for d in t.shape],
                "stride": [_json_dim(d) for d in t.stride],
                "dtype": str(t.dtype).removeprefix("torch."),
                "device": str(t.device),
            }

        return {
            "q": tensor(self.q),
            "k": tensor(self.k),
            "v": tensor(self.v),
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": self.causal,
            "scale": _json_number(self.scale),
            "mask": self.mask,
            "proven": self.proven,
            "formula": self.formula.text if self.formula else None,
            "dropout_p": _json_number(self.dropout_p),
            "window": [_json_number(bound) for bound in self.window],
            "softcap": _json_number(self.softcap),
            "sink": self.has_sink,
            "sequence_lengths": self.has_seqlens,
            "needs_grad": self.needs_grad,
            "deterministic": self.deterministic,
            "sdp_backends": list(self.sdp_backends) if self.sdp_backends is not None else None,
        }

    def __str__(self) -> str:
        sq, sk = self.lengths
        parts = [
            str(self.dtype).removeprefix("torch."),
            f"q{self.q}",
            f"k{self.k}",
            f"v{self.v}",
        ]
        if self.causal != "none":
            parts.append("causal" if symbolic.same(sq, sk) else f"causal {self.causal}")
        if self.window != (None, None):
            parts.append("window ({}, {})".format(*("∞" if w is None else w for w in self.window)))
        if self.mask:
            parts.append(self.mask)
        if self.softcap:
            parts.append(f"softcap {self.softcap}")
        if self.has_sink:
            parts.append("sink")
        if self.has_seqlens:
            parts.append("sequence lengths")
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p}")
        parts.append("fwd+bwd" if self.needs_grad else "fwd")
        return " ".join(parts)


def default_scale(head_dim: int) -> float:
    """1/sqrt(D), the scale of "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.1."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _json_dim(dim: Dim) -> int | str:
    return symbolic.as_int(dim) if symbolic.is_static(dim) else str(dim)


def _json_number(value: Any) -> Any:
    """A number that may be a symbol, which is text then."""
    return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value
