"""What `flash_attn_func` takes and our op does not: the graph breaks, with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import Recorder, dense_inputs, run
from flash_attn.cute import interface
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported

from fa_inductor import substitutes

flash_attn_func = flash_attn.cute.flash_attn_func


_USED: dict[str, Any] = {
    "qv": torch.zeros(2, 5, 4, 8),
    "gather_kv_indices": torch.zeros(2, 5, 4, dtype=torch.int32),
    "num_splits": 2,
    "pack_gqa": True,
    "score_mod": lambda *arguments: arguments[0],
    "score_mod_bwd": lambda *arguments: arguments[0],
    "mask_mod": lambda *arguments: True,
    "aux_tensors": [torch.zeros(3)],
    "aux_scalars": (1.0,),
    "block_sparse_tensors": SimpleNamespace(),
    "block_sparse_tensors_bwd": SimpleNamespace(),
    "gather_bwd_recompute_p": True,
    "gather_bwd_token_chunk": 128,
}


def test_every_argument_of_fa4_is_carried_or_listed() -> None:
    carried = {"q", "k", "v", "softmax_scale", "causal", "deterministic", "return_lse"}
    carried |= {"window_size", "softcap", "learnable_sink"}
    parameters = inspect.signature(flash_attn_func).parameters
    assert set(parameters) == carried | set(substitutes.NOT_CARRIED)
    assert set(_USED) == set(substitutes.NOT_CARRIED)
    for name, unused in substitutes.NOT_CARRIED.items():
        assert parameters[name].default == unused


@pytest.mark.parametrize("name", _USED)
def test_uncarried_argument_raises_under_fullgraph(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"flash_attn_func\({name}=\.\.\.\)"):
        run(lambda q, k, v: flash_attn_func(q, k, v, **{name: _USED[name]}), *dense_inputs())


@pytest.mark.parametrize("window", [(-1, None), (None, -1), (-1, 0), (3, -1), (-2, 1)], ids=str)
def test_one_negative_bound_is_never_reinterpreted(window: Any) -> None:
    """PM-09: FA4 takes two negative bounds for no window, and one for a bound that hides keys."""
    with pytest.raises(Unsupported, match="window_size with one negative bound"):
        run(lambda q, k, v: flash_attn_func(q, k, v, window_size=window), *dense_inputs())


def test_a_negative_left_bound_hides_keys_under_causal_too() -> None:
    with pytest.raises(Unsupported, match="window_size with one negative bound"):
        run(lambda *x: flash_attn_func(*x, window_size=(-1, 5), causal=True), *dense_inputs())


@pytest.mark.parametrize("softcap", [None, -5.0, (1.0,)], ids=str)
def test_softcap_that_is_none_of_the_op_s(softcap: Any) -> None:
    with pytest.raises(Unsupported, match="softcap that is not a number from 0 on"):
        run(lambda q, k, v: flash_attn_func(q, k, v, softcap=softcap), *dense_inputs())


def test_autocast_to_another_dtype() -> None:
    """The op would cast as PyTorch's attention does; FA4 computes in the dtype it is given."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn_func(q, k, v)[0]

    with pytest.raises(Unsupported, match="under autocast to another dtype"):
        run(attend, *dense_inputs(dtype=torch.float16))
    out, recorder = run(attend, *dense_inputs(dtype=torch.bfloat16))
    assert (out.dtype, len(recorder.calls)) == (torch.bfloat16, 1)


def test_shared_keys_of_head_dim_512_are_another_problem() -> None:
    """FA4 computes multi-head latent attention when k is v and D is 512."""
    q, kv = torch.randn(1, 3, 1, 512), torch.randn(1, 3, 1, 512)
    with pytest.raises(Unsupported, match="k is v, head_dim 512"):
        run(lambda q, kv: flash_attn_func(q, kv, kv), q, kv)
    _, recorder = run(lambda q, kv: flash_attn_func(q, kv, kv), q[..., :64], kv[..., :64])
    assert len(recorder.calls) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: interface.FlashAttnFunc.apply(q, k, v),
        lambda q, k, v: interface.FlashAttnVarlenFunc.apply(q, k, v),
        lambda q, k, v: interface._flash_attn_fwd(q, k, v),
    ],
    ids=["FlashAttnFunc.apply", "FlashAttnVarlenFunc.apply", "_flash_attn_fwd"],
)
def test_other_entries_break_the_graph_instead_of_being_traced(call: Callable[..., Any]) -> None:
    """GB-04: traced into, FA4 gives a graph that allocates an output and launches nothing."""
    recorder = Recorder()
    with pytest.raises(Unsupported):
        torch.compile(call, backend=recorder, fullgraph=True)(*dense_inputs(dtype=torch.bfloat16))
    assert recorder.calls == []


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = {"window_size": (3, None), "softcap": 20.0}
    out, _ = flash_attn_func(q * 2, k, v, softmax_scale=0.3, pack_gqa=True, causal=True, **window)
    return out * 3


def test_without_fullgraph_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """... with all arguments as given, between two graphs; CPU code stands in for the kernel."""
    seen: list[dict[str, Any]] = []
    names = list(inspect.signature(flash_attn_func).parameters)

    @torch._dynamo.disable
    def stand_in(*arguments: Any) -> tuple[Tensor, None]:
        assert flash_attn_func.__code__ in [caller.frame.f_code for caller in inspect.stack(0)]
        seen.append(dict(zip(names, arguments, strict=True)))
        return arguments[0] + 1, None

    monkeypatch.setattr(interface.FlashAttnFunc, "apply", stand_in)
    q, k, v = dense_inputs()
    result, recorder = run(_packed, q, k, v, fullgraph=False)
    torch.testing.assert_close(result, (q * 2 + 1) * 3)
    assert recorder.calls == []
    (given,) = seen
    used = {"softmax_scale": 0.3, "window_size": (3, None), "softcap": 20.0, "causal": True}
    unused = {**substitutes.NOT_CARRIED, "return_lse": False, "learnable_sink": None}
    expected = {**unused, **used, "pack_gqa": True}
    assert {name: given[name] for name in expected} == expected


def test_without_fullgraph_nothing_below_the_original_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What FA4 calls outside its own folder (CUTLASS, QuACK, TVM-FFI) is no food for Dynamo."""
    monkeypatch.setattr(interface, "_flash_attn_fwd", lambda q, *_, **__: (q + 1, *(None,) * 4))
    codes: list[str] = []

    def recording(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        codes.append(gm.code)
        return gm.forward

    torch.compile(_packed, backend=recording)(*dense_inputs())
    assert [any(sign in code for sign in ("* 2", "* 3")) for code in codes] == [True, True]
