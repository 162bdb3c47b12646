"""Options and registration: what goes into Inductor's configuration comes out again exactly.

Both roads are looked at: `torch.compile(backend="fa_inductor", ...)` with its options, and
`fa_inductor.register()`, which changes `torch._inductor.config` until `unregister()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import fa_inductor
from fa_inductor import backend, inductor_compat
from fa_inductor.errors import FallbackError, OptionError, UnknownKernelError
from helpers import kernels_of, run_reported

OPTIONS = tuple(
    name
    for name in ("pre_grad_custom_pass", "joint_custom_pre_pass", "pre_grad_pass_timing")
    if hasattr(inductor, name)  # the last one is newer than PyTorch 2.11
)
REFERENCE = {"kernels": ("reference",), "on_fallback": "ignore"}


def _attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def _q() -> Tensor:
    return torch.randn(1, 2, 4, 8)


class _UsersPass(CustomGraphPass):
    """Counts the graphs that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += 1

    def uuid(self) -> Any:
        return None


def _settings() -> tuple[Any, ...]:
    return tuple(getattr(inductor, name) for name in OPTIONS)


def _assert_settings(expected: tuple[Any, ...]) -> None:
    """The very objects, not merely equal ones."""
    assert all(now is then for now, then in zip(_settings(), expected, strict=True))


@pytest.fixture(autouse=True)
def untouched_inductor() -> Iterator[None]:
    """A test that fails half-way does not leave its registration to the next one; and no test
    finds the graph of another in a cache, where no pass would see it."""
    before = _settings()
    with fresh_cache():
        yield
    backend._registrations.clear()
    for name, value in zip(OPTIONS, before, strict=True):
        setattr(inductor, name, value)


def _before(kind: str) -> Any:
    if kind == "none":
        return None
    return [_UsersPass(), _UsersPass()] if kind == "list" else _UsersPass()


# A list of passes is something that only newer versions of PyTorch know.
KINDS = ["none", "one pass"] + (["list"] if inductor_compat.pre_grad_takes_list() else [])


# --- register and unregister ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unregister_puts_back_the_very_object(kind: str) -> None:
    inductor.pre_grad_custom_pass = _before(kind)
    inductor.joint_custom_pre_pass = _UsersPass()
    before = _settings()
    users = inductor_compat.custom_passes(before[0])
    fa_inductor.register(**REFERENCE)
    assert inductor.pre_grad_custom_pass is not before[0]
    assert inductor_compat.custom_passes(before[0]) == users  # the user's list was not written to
    fa_inductor.unregister()
    _assert_settings(before)


@pytest.mark.parametrize("kind", KINDS)
def test_users_passes_still_run_beside_ours(kind: str) -> None:
    inductor.pre_grad_custom_pass = _before(kind)
    users = inductor_compat.custom_passes(inductor.pre_grad_custom_pass)
    with fa_inductor.enabled(**REFERENCE):
        _, report = run_reported(torch.compile(_attend), _q())
    assert kernels_of(report) == ["reference"]
    assert [each.seen for each in users] == [1] * len(users)
    torch._dynamo.reset()
    _, report = run_reported(torch.compile(_attend), _q())
    assert report.graphs == []  # ours is gone
    assert [each.seen for each in users] == [2] * len(users)


def test_a_second_register_is_refused_and_changes_nothing() -> None:
    before = _settings()
    fa_inductor.register(**REFERENCE)
    registered = _settings()
    with pytest.raises(OptionError, match="registered already"):
        fa_inductor.register()
    _assert_settings(registered)
    fa_inductor.unregister()
    _assert_settings(before)
    with pytest.raises(OptionError, match="not registered"):
        fa_inductor.unregister()
    fa_inductor.register()
    fa_inductor.unregister()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": ("fa4",)}, OptionError, "Did you mean 'fa.kernels'"),
        ({"on_falback": "warn"}, OptionError, "Did you mean 'fa.on_fallback'"),
        ({"on_fallback": "warning"}, OptionError, "Did you mean 'warn'"),
        ({"kernels": "fa4"}, OptionError, r"\('fa4',\)"),
        ({"kernels": ()}, OptionError, "at least one kernel"),
        ({"kernels": ("refrence",)}, UnknownKernelError, "Did you mean 'reference'"),
        ({"mode": "reduce-overhead"}, OptionError, r"torch.compile\(mode="),
    ],
    ids=str,
)
def test_an_impossible_option_registers_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = _settings()
    for put_in in (fa_inductor.register, lambda **o: fa_inductor.enabled(**o).__enter__()):
        with pytest.raises(error, match=message):
            put_in(**options)
        _assert_settings(before)
    fa_inductor.register()  # nothing is half-registered


def test_unregister_refuses_to_throw_away_a_later_change() -> None:
    fa_inductor.register(**REFERENCE)
    registered = inductor.pre_grad_custom_pass
    inductor.pre_grad_custom_pass = theirs = _UsersPass()
    with pytest.raises(OptionError, match="pre_grad_custom_pass was changed"):
        fa_inductor.unregister()
    assert inductor.pre_grad_custom_pass is theirs
    inductor.pre_grad_custom_pass = registered
    fa_inductor.unregister()


def test_unregister_refuses_before_it_undoes_anything() -> None:
    """Either both of Inductor's options are put back or neither is."""
    fa_inductor.register(**REFERENCE)
    registered = _settings()
    inductor.joint_custom_pre_pass = _UsersPass()
    with pytest.raises(OptionError, match="joint_custom_pre_pass was changed"):
        fa_inductor.unregister()
    assert inductor.pre_grad_custom_pass is registered[0]


# --- enabled --------------------------------------------------------------------------------------


def _kernels_in_force() -> list[str | None]:
    torch._dynamo.reset()
    _, report = run_reported(torch.compile(_attend), _q())
    return kernels_of(report)


def test_enabled_ends_with_its_block_also_by_an_exception() -> None:
    before = _settings()
    with pytest.raises(ZeroDivisionError), fa_inductor.enabled(**REFERENCE):
        raise ZeroDivisionError
    _assert_settings(before)


def test_nested_enabled_gives_the_outer_one_back() -> None:
    before = _settings()
    with fa_inductor.enabled(**REFERENCE):
        outer = _settings()
        with fa_inductor.enabled(kernels=("fa4",), on_fallback="ignore"):
            assert _kernels_in_force() == [None]  # FA4 has no kernel for the CPU
        assert _kernels_in_force() == ["reference"]
        _assert_settings(outer)
    _assert_settings(before)


def test_enabled_inside_register_gives_the_registration_back() -> None:
    before = _settings()
    fa_inductor.register(**REFERENCE)
    registered = _settings()
    with fa_inductor.enabled(kernels=("fa4",), on_fallback="ignore"):
        pass
    _assert_settings(registered)
    fa_inductor.unregister()
    _assert_settings(before)


def test_an_impossible_inner_option_leaves_the_outer_one_in_force() -> None:
    before = _settings()
    with fa_inductor.enabled(**REFERENCE):
        outer = _settings()
        with pytest.raises(UnknownKernelError), fa_inductor.enabled(kernels=("refrence",)):
            pass
        _assert_settings(outer)
    _assert_settings(before)


# --- Options of the backend -----------------------------------------------------------------------


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The Inductor configuration of each compile, without the option that carries our key."""
    seen: list[dict[str, Any]] = []
    original = inductor_compat.inductor_compiler

    def recorded(mode: str | None, options: dict[str, Any]) -> Any:
        compiler = original(mode, options)
        if backend._KEY_CARRIER in compiler.config:
            seen.append({k: v for k, v in compiler.config.items() if k != backend._KEY_CARRIER})
        return compiler

    monkeypatch.setattr(inductor_compat, "inductor_compiler", recorded)
    return seen


MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("spelling", ["mode", "fa.mode"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_means_what_it_means_to_inductor(
    mode: str, spelling: str, patches: list[dict[str, Any]]
) -> None:
    expected = inductor_compat.inductor_compiler(mode, {}).config
    chosen = {"mode": mode} if spelling == "mode" else {"options": {"fa.mode": mode}}
    q = _q()
    result = torch.compile(_attend, backend="fa_inductor", **chosen)(q)
    assert patches == [expected]
    torch.testing.assert_close(result, _attend(q))


def test_inductors_own_options_are_kept_beside_a_mode(patches: list[dict[str, Any]]) -> None:
    options = {"fa.mode": "max-autotune", "epilogue_fusion": False, "max-autotune-pointwise": True}
    torch.compile(_attend, backend="fa_inductor", options=options)(_q())
    expected = dict(inductor_compat.inductor_compiler("max-autotune", {}).config)
    expected |= {"epilogue_fusion": False, "max_autotune_pointwise": True}
    assert patches == [expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"fa.kernel": ("fa4",)}}, "Did you mean 'fa.kernels'"),
        ({"options": {"fa.kernels": ("fa5",)}}, "Did you mean 'fa4'"),
        ({"options": {"max_autotun": True}}, "Did you mean 'max_autotune'"),
        ({"options": {"kernels": ("fa4",)}}, "Did you mean 'fa.kernels'"),
        ({"options": {"fa.on_fallback": "errors"}}, "Did you mean 'error'"),
        ({"options": {"fa.mode": "reduce-overhed"}}, "Did you mean 'reduce-overhead'"),
        ({"options": {"fa.mode": 3}}, "fa.mode=3"),
        ({"mode": "max-autotun"}, "Did you mean 'max-autotune'"),
        ({"mode": "default", "options": {"fa.mode": "max-autotune"}}, "give one of them"),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error_that_helps(arguments: dict[str, Any], message: str) -> None:
    """... whoever calls: PyTorch hands on what a backend raises, with its text."""
    graph = fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(OptionError, match=message):
        backend.fa_inductor(graph, [torch.ones(1)], **arguments)
    if len(arguments) == 1:  # torch.compile refuses mode beside options before asking us
        with pytest.raises(BackendCompilerFailed, match=message):
            torch.compile(_attend, backend="fa_inductor", **arguments)(_q())


# --- fa.on_fallback -------------------------------------------------------------------------------


def _three_fallbacks(q: Tensor, mask: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(q, q, q, mask)
    second = F.scaled_dot_product_attention(first, q, q, mask)
    return _attend(F.scaled_dot_product_attention(second, q, q, mask[None, None]))


def _with_backend(policy: str | None) -> Any:
    options: dict[str, Any] = {"fa.kernels": ("reference",)}
    options |= {} if policy is None else {"fa.on_fallback": policy}
    return torch.compile(_three_fallbacks, backend="fa_inductor", options=options)


def _with_register(policy: str | None) -> Any:
    fa_inductor.register(kernels=("reference",), **({"on_fallback": policy} if policy else {}))
    return torch.compile(_three_fallbacks)


ROUTES: dict[str, Callable[[str | None], Any]] = {
    "backend": _with_backend,
    "register": _with_register,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("policy", ["warn", None, "ignore", "error"])
def test_policy_for_fallbacks(
    route: str, policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a compile with each reason once is "warn", and what one gets unasked."""
    # What no kernel takes: a mask of another dtype than the query.
    q, mask = _q().bfloat16(), torch.randn(4, 4)
    with caplog.at_level("WARNING", logger="fa_inductor"):
        compiled = ROUTES[route](policy)
        if policy == "error":
            with pytest.raises(BackendCompilerFailed, match="3 of 4") as failed:
                compiled(q, mask)
            assert isinstance(failed.value.inner_exception, FallbackError)
        else:
            for _ in range(2):
                torch.testing.assert_close(compiled(q, mask), _three_fallbacks(q, mask))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("fa_inductor")]
    if policy in ("ignore", "error"):
        assert lines == []
        return
    (line,) = lines
    assert "3 of 4 attention sites left to PyTorch" in line
    assert f"first at {__file__}:" in line
    for mask_text in ("float32 (4, 4)", "float32 (1, 1, 4, 4)"):
        assert line.count(f"attn_mask {mask_text} beside a bfloat16 query") == 1
    assert caplog.records[-1].levelno == logging.WARNING
