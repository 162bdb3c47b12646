"""Every private PyTorch interface that torch_compat adapts: a release that moves one fails here."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor import dynamo_compat, inductor_compat, torch_compat
from fa_inductor.errors import AdapterError


def test_a_missing_interface_is_named() -> None:
    with pytest.raises(AdapterError, match="_no_such_thing"):
        torch_compat.adapted(torch, "_no_such_thing")


def test_sdp_backends_of_a_fresh_process_are_the_default() -> None:
    assert torch_compat.sdp_priority() == torch_compat.default_sdp_priority()
    assert torch_compat.sdp_backends() == torch_compat.default_sdp_priority()


def test_sdp_backends_follow_sdpa_kernel() -> None:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        assert torch_compat.sdp_backends() == ("FLASH_ATTENTION", "MATH")
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert torch_compat.sdp_backends() == ("MATH", "FLASH_ATTENTION")
    assert torch_compat.sdp_backends() == torch_compat.default_sdp_priority()


def test_pytorchs_own_order_on_hopper_is_no_wish_of_the_user() -> None:
    """With cuDNN preferred, as PyTorch sets it by itself after the first attention on a GPU."""
    before = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
        assert torch_compat.sdp_backends() == torch_compat.default_sdp_priority()
    finally:
        torch._C._set_sdp_priority_order(before)


def test_sdpa_kernel_leaves_the_known_calls_in_a_graph() -> None:
    seen: list[object] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        seen.extend(node.target for node in gm.graph.nodes)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return x + 1

    torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2))
    for target in torch_compat.sdpa_kernel_targets():
        assert target in seen


def test_sub_graphs_are_told_from_the_root() -> None:
    from torch.utils.checkpoint import checkpoint

    roots: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        roots.append(dynamo_compat.is_sub_graph(gm.graph))
        bodies = [m for m in gm.children() if isinstance(m, torch.fx.GraphModule)]
        roots.extend(dynamo_compat.is_sub_graph(body.graph) for body in bodies)
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False)

    torch.compile(f, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True))
    assert roots == [False, True]


def test_passes_pickle_and_keep_their_keys() -> None:
    keyed = inductor_compat.cache_key_pass("ours")
    assert pickle.loads(pickle.dumps(keyed)).uuid() == keyed.uuid() == ("ours",)
    assert inductor_compat.cache_key_pass("ours", keyed).uuid() == ("ours", ("ours",))
    assert inductor_compat.cache_key_pass("ours", lambda graph: None).uuid() is None


def test_inductor_is_where_it_was() -> None:
    compiler = inductor_compat.inductor_compiler("reduce-overhead", {"max_autotune": True})
    assert compiler.config["triton.cudagraphs"] is True
    assert "max_autotune" in inductor_compat.inductor_option_names()
    assert inductor_compat.cpp_compiler()


def test_tangents_are_seen() -> None:
    from torch.autograd import forward_ad

    x = torch.ones(2)
    assert not torch_compat.has_tangent([x])
    with forward_ad.dual_level():
        assert torch_compat.has_tangent([forward_ad.make_dual(x, x)])
        assert not torch_compat.has_tangent([x])


# --- What reports are made of ---------------------------------------------------------------------


def test_dynamos_registry_of_graph_breaks_is_where_it_was() -> None:
    ids = dynamo_compat.graph_break_ids()
    assert ids["Data-dependent branching"] == "GB0170"
    assert ids["Call to `torch._dynamo.graph_break()`"] == "GB0025"
    assert len(ids) > 100


def test_the_message_of_a_branch_is_the_known_word() -> None:
    """`graph_breaks` translates it; and the stack is the user's."""
    seen: list[dynamo_compat.Break | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        seen.append(dynamo_compat.graph_break_reason(gm))
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sin().sum() > 0 else x

    torch.compile(f, backend=backend)(torch.ones(2))
    assert seen[0] is not None
    message, stack = seen[0]
    assert message.split(" ")[0] == "generic_jump"
    assert (stack[-1].filename, stack[-1].name) == (__file__, "f")
    assert seen[1] is None


def test_dynamo_records_its_frames() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    attempts: list[dynamo_compat.Attempt | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        attempts.append(dynamo_compat.attempt())
        return gm.forward

    assert dynamo_compat.attempt() is None
    watch = dynamo_compat.DynamoWatch()
    torch.compile(f, backend=backend, dynamic=False)(torch.ones(2))
    torch.compile(f, backend=backend, dynamic=False)(torch.ones(3))
    first, second = watch.new_frames()
    line = f.__code__.co_firstlineno
    assert (first.function, first.source) == ("f", f"{__file__}:{line}")
    assert (first.recompile_reason, first.failure) == (None, None)
    assert "expected 2, actual 3" in (second.recompile_reason or "")
    assert watch.new_frames() == []
    assert [a and (a.compile_id, a.number) for a in attempts] == [("0/0", 0), ("0/1", 0)]


def test_dynamo_records_why_it_left_a_frame() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x

    watch = dynamo_compat.DynamoWatch()
    torch.compile(f, backend="eager")(torch.ones(2))
    frame = watch.new_frames()[0]
    assert frame.failure == "Unsupported"
    assert "graph break in loop" in frame.message
    assert frame.failed_at == f"{__file__}:{f.__code__.co_firstlineno + 2}"


def test_names_of_functions_that_go_on_after_a_break() -> None:
    assert dynamo_compat.users_function("torch_dynamo_resume_in_forward_at_19") == "forward"
    assert dynamo_compat.users_function("forward_at_19") == "forward_at_19"


def test_tensors_are_found_with_their_place() -> None:
    one = torch.ones(1)
    found = torch_compat.tensors_in({"a": [one, 3], "b": (torch.ones(1, dtype=torch.int), one)})
    assert [(path, tensor is one) for path, tensor in found] == [
        ("['a'][0]", True),
        ("['b'][1]", True),
    ]


def test_real_tensors_while_tracing() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        with torch_compat.without_fake_tensors():
            assert not isinstance(torch.ones(2), FakeTensor)
        assert isinstance(torch.ones(2), FakeTensor)
