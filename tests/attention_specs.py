"""Attention problems and targets made from metadata, for planning without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fa_inductor import compile_pass
from fa_inductor.config import Config
from fa_inductor.rewrite import SiteRecord
from fa_inductor.spec import AttentionSpec, MaskFormula, TensorSpec
from fa_inductor.target import TESTED_LIBRARIES, Target

HOPPER, BLACKWELL, GEFORCE, AMPERE = "sm_90a", "sm_100a", "sm_120a", "sm_80"
# What times are measured of; see `fa_inductor.times`.
KINDS = ("plain", "causal", "window", "bias", "padding", "causal mask", "mask", "dropout")


def target(arch: str, **libraries: str) -> Target:
    """`arch` with every library in its tested version but for those given."""
    return Target(arch, named=True, libraries={**TESTED_LIBRARIES, **libraries})


def bshd(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A (B, H, S, D) view of contiguous (B, S, H, D) memory."""
    return torch.empty(b, s, h, d, dtype=dtype).transpose(1, 2)


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """A contiguous tensor on the CPU, which takes no memory."""
    described = TensorSpec.of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
    return dataclasses.replace(described, device=torch.device("cpu"))


def spec(
    d: int = 64,
    dv: int | None = None,
    *,
    b: int = 2,
    hq: int = 8,
    hkv: int = 8,
    sq: int = 128,
    sk: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    bias: Sequence[int] | None = None,
    bias_dtype: torch.dtype = torch.bool,
    **fields: Any,
) -> AttentionSpec:
    """An attention that every kernel takes, but for what is changed.

    bias: shape of a mask that the op can take.
    """
    sizes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, d if dv is None else dv))
    q, k, v = (TensorSpec.of(change(bshd(*size, dtype=dtype))) for size in sizes)
    if bias is not None:
        fields["bias"] = contiguous(bias, bias_dtype)
        name = str(bias_dtype).removeprefix("torch.")
        fields["mask"] = f"attn_mask {name} ({', '.join(map(str, bias))})"
    return AttentionSpec(q, k, v, dtype, **fields)


def planning(
    fn: Callable[..., Any],
    on: Target,
    kernels: tuple[str, ...],
    *,
    dynamic: bool | None = None,
) -> tuple[Callable[..., Any], list[SiteRecord]]:
    """`fn` compiled to what it is, each graph planned for `on`; and the sites, as graphs come."""
    planned: list[SiteRecord] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        config = Config(kernels=kernels, on_fallback="ignore")
        planned.extend(compile_pass.run(gm, config, on, apply=False))
        return gm.forward

    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), planned


# --- What each row of the support table refuses ---------------------------------------------------


@dataclass(frozen=True)
class Break:
    """A spec or target that one row of the table must refuse.

    value: how the reason begins. wanted: the feature of the row. change: what `spec` is given.
    """

    kernel: str
    wanted: str
    value: str
    arch: str
    change: dict[str, Any]
    libraries: dict[str, str]

    def __str__(self) -> str:
        return f"{self.kernel} {self.wanted}: {self.value} on {self.arch}"


def _broken(kernel: str) -> Callable[..., Break]:
    def broken(
        wanted: str,
        value: str,
        arch: str = HOPPER,
        libraries: dict[str, str] | None = None,
        **change: Any,
    ) -> Break:
        return Break(kernel, wanted, value, arch, change, libraries or {})

    return broken


TRAINING: dict[str, Any] = {"needs_grad": True}
FULL = (2, 8, 128, 128)  # a mask of every score
SEEN = MaskFormula("(t0[b, h, i, j] != 0)", "other")
HUGE = (1, 2, 32768, 32768)


def version(number: str) -> dict[str, str]:
    return {"cudnn": number}


fa4, cudnn, reference = (_broken(kernel) for kernel in ("fa4", "cudnn", "reference"))

FA4_BREAKS = [
    fa4("device", "device cpu", "cpu"),
    fa4("version", "flash-attn-4 4.0.0b12", libraries={"flash-attn-4": "4.0.0b12"}),
    fa4("version", "flash-attn-4 is not installed", libraries={"flash-attn-4": ""}),
    fa4("arch", "sm_75", "sm_75"),
    fa4("backward", "sm_80", AMPERE, **TRAINING),
    fa4("dtype", "dtype float32", dtype=torch.float32),
    fa4("dtype", "dtype float64", dtype=torch.float64),
    fa4("head_dim", "head_dim 33", d=33),
    fa4("head_dim", "head_dim 264", d=264),
    fa4("head_dim", "head_dim (q·k 64, v 256)", d=64, dv=256),
    fa4("head_dim", "head_dim (q·k 64, v 128)", d=64, dv=128, **TRAINING),
    fa4("head_dim", "head_dim 104", d=104, **TRAINING),
    fa4("head_dim", "head_dim 72", BLACKWELL, d=72, **TRAINING),
    fa4("head_dim", "head_dim 72", GEFORCE, d=72, **TRAINING),
    fa4("head_dim", "head_dim 160", BLACKWELL, d=160),
    fa4("head_dim", "head_dim (q·k 256, v 128)", BLACKWELL, d=256, dv=128),
    fa4("head_dim", "head_dim 256", GEFORCE, d=256),
    fa4("head_dim", "head_dim 136", AMPERE, d=136),
    fa4(
        "GQA head_dim",
        "8 query heads on 2 with head_dim (q·k 192, v 128)",
        d=192,
        dv=128,
        hkv=2,
        **TRAINING,
    ),
    fa4(
        "layout",
        "head_dim 256 with inputs that are not contiguous (B, S, H, D)",
        BLACKWELL,
        d=256,
        change=torch.Tensor.contiguous,
    ),
    fa4("deterministic", "a deterministic backward", GEFORCE, deterministic=True, **TRAINING),
    fa4("mask", "attn_mask bfloat16 (2, 8, 128, 128)", bias=FULL, bias_dtype=torch.bfloat16),
    fa4("mask", "attn_mask bool (2, 8, 128, 128)", bias=FULL, formula=SEEN, causal="bottom_right"),
    fa4("mask", "attn_mask bool (2, 8, 128, 128)", BLACKWELL, bias=FULL, formula=SEEN),
    fa4(
        "mask",
        "a deterministic backward with attn_mask bool (2, 8, 128, 128)",
        bias=FULL,
        formula=SEEN,
        deterministic=True,
        **TRAINING,
    ),
    fa4("mask", "attn_mask of a kind unknown", mask="attn_mask of a kind unknown"),
    fa4("dropout", "dropout_p=0.1 > 0", dropout_p=0.1),
    fa4("causal", "is_causal with Sq 100 and Sk 128", sq=100, causal="top_left"),
    fa4("causal", "is_causal with sequence lengths", has_seqlens=True, causal="top_left"),
    fa4("size", "batch 65536", b=65536, hq=1, hkv=1, sq=2, sk=2, d=8),
    fa4("size", "heads 65536", b=1, hq=65536, sq=2, sk=2, d=8),
    fa4("window", "window (-1, 3)", window=(-1, 3)),
    fa4("window", "window (None, -2)", window=(None, -2)),
    fa4(
        "softcap, sink", "softcap 30.0 at head_dim 256", BLACKWELL, d=256, softcap=30.0, **TRAINING
    ),
    fa4("softcap, sink", "a sink at head_dim 256", BLACKWELL, d=256, has_sink=True, **TRAINING),
    fa4("softcap, sink", "softcap 30.0", GEFORCE, softcap=30.0, **TRAINING),
    fa4("softcap, sink", "a sink", GEFORCE, has_sink=True, **TRAINING),
    fa4("scale", "scale -0.25", scale=-0.25),
    fa4("scale", "scale 0.0", scale=0.0),
    fa4("scale", "scale nan", scale=float("nan")),
    fa4("sdpa_kernel", "sdpa_kernel(MATH)", sdp_backends=("MATH",)),
    fa4(
        "sdpa_kernel",
        "sdpa_kernel(CUDNN_ATTENTION, FLASH_ATTENTION)",
        sdp_backends=("CUDNN_ATTENTION", "FLASH_ATTENTION"),
    ),
    fa4("sdpa_kernel", "sdpa_kernel(nothing)", sdp_backends=()),
]

CUDNN_BREAKS = [
    cudnn("device", "device cpu", "cpu"),
    cudnn(
        "frontend",
        "nvidia-cudnn-frontend 1.31.0",
        libraries={"nvidia-cudnn-frontend": "1.31.0"},
    ),
    cudnn(
        "frontend",
        "nvidia-cudnn-frontend is not installed",
        libraries={"nvidia-cudnn-frontend": ""},
    ),
    cudnn("version", "cuDNN 9.12.0", libraries=version("9.12.0")),
    cudnn("version", "this PyTorch has no cuDNN", libraries=version("")),
    cudnn(
        "version",
        "window (16, 16) with cuDNN 9.14.0",
        libraries=version("9.14.0"),
        window=(16, 16),
    ),
    cudnn("version", "Sk 100 with cuDNN 9.15.0", libraries=version("9.15.0"), sk=100, **TRAINING),
    cudnn("version", "Sq 64 with cuDNN 9.19.0", sq=64, **TRAINING),
    cudnn("version", "Sq 192 with cuDNN 9.25.0", libraries=version("9.25.0"), sq=192, **TRAINING),
    cudnn("version", "Sq = 1 with cuDNN 9.25.0", libraries=version("9.25.0"), sq=1, **TRAINING),
    cudnn("version", "Sq = 1 with cuDNN 9.26.1", libraries=version("9.26.1"), sq=1, **TRAINING),
    cudnn("version", "Sq = 1 with cuDNN 9.19.0", BLACKWELL, sq=1),
    cudnn(
        "deterministic",
        "a deterministic backward with cuDNN 9.17.0",
        BLACKWELL,
        version("9.17.0"),
        deterministic=True,
        **TRAINING,
    ),
    cudnn("arch", "sm_75", "sm_75"),
    cudnn("dtype", "dtype float32", dtype=torch.float32),
    cudnn("head_dim", "head_dim 36", d=36),
    cudnn("head_dim", "head_dim 264", d=264),
    cudnn("head_dim", "head_dim (q·k 64, v 4)", d=64, dv=4),
    cudnn("head_dim", "head_dim 136", BLACKWELL, d=136),
    cudnn("head_dim", "head_dim (q·k 192, v 128)", GEFORCE, d=192, dv=128),
    cudnn("head_dim", "head_dim 256", AMPERE, d=256),
    cudnn("length", "Sq = Sk = 1", sq=1, sk=1),
    cudnn("sink", "Sq = 1 with a sink", sq=1, has_sink=True),
    cudnn("lengths", "a sink with sequence lengths", has_sink=True, has_seqlens=True),
    cudnn("causal, window", "Sq 256 > Sk 128", sq=256, causal="bottom_right"),
    cudnn("causal, window", "Sq 256 > Sk 128", sq=256, window=(16, None)),
    cudnn("causal, window", "Sq 256 > Sk 128", sq=256, window=(16, 0), causal="top_left"),
    cudnn(
        "causal, window",
        "bottom-right with Sq 96 and Sk 128",
        sq=96,
        causal="bottom_right",
        bias=(1, 1, 96, 128),
    ),
    cudnn(
        "causal, window",
        "bottom-right with Sq 96 and Sk 128",
        sq=96,
        window=(16, 16),
        dropout_p=0.1,
    ),
    cudnn(
        "causal, window",
        "bottom-right with Sq 128 and Sk 128",
        causal="bottom_right",
        has_seqlens=True,
        dropout_p=0.1,
    ),
    cudnn("window", "window (-1, 3)", window=(-1, 3)),
    cudnn("size", "batch 65536", b=65536, hq=1, hkv=1, sq=2, sk=2, d=8),
    cudnn("size", "heads 65536", b=1, hq=65536, sq=2, sk=2, d=8),
    cudnn(
        "mask",
        "attn_mask float32 (2, 8, 128, 128) beside a bfloat16 query",
        bias=FULL,
        bias_dtype=torch.float32,
    ),
    cudnn("mask", "attn_mask of a kind unknown", mask="attn_mask of a kind unknown"),
    cudnn(
        "mask",
        "attn_mask bool (1, 2, 32768, 32768): 2147483648 elements",
        hq=2,
        hkv=2,
        sq=32768,
        sk=32768,
        d=8,
        b=1,
        bias=HUGE,
    ),
    cudnn(
        "mask",
        "a gradient of the mask",
        bias=FULL,
        bias_dtype=torch.bfloat16,
        bias_needs_grad=True,
        deterministic=True,
        **TRAINING,
    ),
    cudnn("dropout", "dropout_p=1.0", dropout_p=1.0),
    cudnn("softcap", "softcap 30.0", softcap=30.0),
    cudnn("sdpa_kernel", "sdpa_kernel(MATH)", sdp_backends=("MATH",)),
    cudnn(
        "sdpa_kernel",
        "sdpa_kernel(FLASH_ATTENTION, CUDNN_ATTENTION)",
        sdp_backends=("FLASH_ATTENTION", "CUDNN_ATTENTION"),
    ),
]

REFERENCE_BREAKS = [
    reference("dtype", "dtype float8_e4m3fn", "cpu", dtype=torch.float8_e4m3fn),
    reference(
        "mask",
        "attn_mask float32 (2, 8, 128, 128) beside a bfloat16 query",
        "cpu",
        bias=FULL,
        bias_dtype=torch.float32,
    ),
    reference("mask", "attn_mask of a kind unknown", "cpu", mask="attn_mask of a kind unknown"),
    reference(
        "sdpa_kernel",
        "sdpa_kernel(FLASH_ATTENTION)",
        "cpu",
        sdp_backends=("FLASH_ATTENTION",),
    ),
]
BREAKS = [*FA4_BREAKS, *CUDNN_BREAKS, *REFERENCE_BREAKS]
