"""A reduced matrix for compute-sanitizer, which makes every launch many times slower.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py

Both kernels, forward and backward, in the layouts and at the sizes where an access out of bounds
would be: packed views, slices, lengths that fill no tile, one row, head dims that are padded.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fa_inductor import ops
from fa_inductor.spec import AttentionSpec, TensorSpec
from fa_inductor.support import reasons_against
from fa_inductor.target import Target

LENGTHS = ((17, 129), (129, 129), (1, 65), (200, 200))


def _packed(sq: int, sk: int, dim: int) -> tuple[torch.Tensor, ...]:
    length = max(sq, sk)
    packed = torch.randn(2, length, 3, 2, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q[:, :, length - sq :], k[:, :, :sk], v[:, :, :sk]


def _bhsd(sq: int, sk: int, dim: int) -> tuple[torch.Tensor, ...]:
    sizes = (sq, sk, sk)
    q, k, v = (torch.randn(2, 2, n, dim, device="cuda", dtype=torch.bfloat16) for n in sizes)
    return q, k, v


def _spec(tensors: tuple[torch.Tensor, ...], causal: str, **more: Any) -> AttentionSpec:
    q, k, v = map(TensorSpec.of, tensors)
    return AttentionSpec(q, k, v, torch.bfloat16, causal, 0.1, needs_grad=True, **more)


def main() -> None:
    target = Target.of_device(torch.device("cuda"))
    ran = 0
    for kernel, make, (sq, sk), dim, causal in itertools.product(
        ("fa4", "cudnn"), (_packed, _bhsd), LENGTHS, (64, 128), ("none", "bottom_right")
    ):
        tensors = make(sq, sk, dim)
        if reasons_against(kernel, _spec(tensors, causal), target):
            continue
        arguments = (0.1, causal, "BSHD", False, kernel)
        out, lse = ops.attention_forward(*tensors, *arguments)
        grad_out = torch.randn_like(out)
        saved = (grad_out, None, *tensors, out, lse, 0.1, causal, False, kernel)
        for grad in ops.attention_gradients(*saved):
            assert torch.isfinite(grad).all()
        ran += 1
    for sq, sk in LENGTHS[:2]:
        q, k, v = _bhsd(sq, sk, 64)
        bias = torch.randn(1, 2, sq, sk, device="cuda", dtype=torch.bfloat16)
        out, lse = ops.attention_forward(q, k, v, 0.1, "none", "BSHD", False, "cudnn", bias)
        saved = (torch.randn_like(out), None, q, k, v, out, lse, 0.1, "none", False, "cudnn")
        ops.attention_gradients_all(*saved, True, False, bias)
        ran += 1
    torch.cuda.synchronize()
    print(f"{ran} cases ran, forward and backward")


if __name__ == "__main__":
    main()
