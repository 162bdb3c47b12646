"""`torch.compile(model, backend="fa_inductor")`, and the same pass for plain Inductor users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from . import (
    compile_pass,
    dynamo_compat,
    inductor_compat,
    jit_monitor,
    kernels,
    numerics,
    torch_compat,
)
from .config import PREFIX, Config, option_names, split_options
from .errors import OptionError, nearest
from .fingerprint import fingerprint
from .ranges import in_range
from .report import timed_pass

# The Inductor option that carries our cache key through a pass that changes nothing.
_KEY_CARRIER = "joint_custom_pre_pass"


def fa_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Dynamo backend: rewrite attention, then compile with Inductor.

    mode, options: as for `backend="inductor"`; options may also hold `fa.` keys, see `Config`.
    Raises `OptionError` for an unknown or impossible option, naming the nearest known one, and
    `FallbackError` when `fa.on_fallback="error"` and a site is left to PyTorch.
    """
    with timed_pass():
        config, compiler = _parse(mode, options)
        jit_monitor.on_jit(config.on_jit)
        # Read before the rewrite, under the flags that the rewrite decides by.
        patches = _with_cache_key(compiler.config, fingerprint(config))
        only = compile_pass.rewritten_only.get()
        sites = compile_pass.run(gm, config, only.target if only else None)
    if only is not None:
        only.graphs += 1
        return gm.forward
    compiled = in_range(inductor_compat.inductor_compiler(None, patches)(gm, example_inputs), sites)
    return compiled if config.guard == "off" else _polling(compiled)


def _polling(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, telling first what its guard has seen: in a CUDA graph no op runs that would."""

    def polling(*args: Any) -> Any:
        numerics.poll()
        return compiled(*args)

    return torch_compat.standing_in(polling, compiled)


def _reset() -> None:
    """What `torch._dynamo.reset()` does for Inductor's CUDA graphs, whichever mode made them."""
    inductor_compat.inductor_compiler(None, {"triton.cudagraphs": True}).reset()


fa_inductor.reset = _reset  # type: ignore[attr-defined]


def _parse(mode: str | None, options: Mapping[str, Any] | None) -> tuple[Config, Any]:
    config, inductor_options = split_options(options)
    for name in config.kernels:
        kernels.check_known(name)
    if mode and config.mode:
        raise OptionError(f"mode={mode!r} and fa.mode={config.mode!r}: give one of them.")
    known = inductor_compat.inductor_option_names()
    for key in inductor_options:
        if key.replace("-", "_") not in known:
            raise OptionError(
                f"Unknown option {key!r}: neither one of Inductor's nor one of fa_inductor's."
                + nearest(key, [*known, *option_names()])
            )
    mode = mode or config.mode
    _check_mode(mode)
    return config, inductor_compat.inductor_compiler(mode, inductor_options)


def _check_mode(mode: str | None) -> None:
    from torch._inductor import list_mode_options

    known = tuple(dict.fromkeys(("default", *list_mode_options())))
    if mode is not None and mode not in known:
        raise OptionError(
            f"Unknown mode {mode!r}; Inductor knows {', '.join(known)}." + nearest(mode, known)
        )


def _with_cache_key(patches: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Inductor's key follows the rewritten graph, but not the sources of our op: add ours."""
    from torch._inductor import config as inductor_config

    theirs = patches.get(_KEY_CARRIER, getattr(inductor_config, _KEY_CARRIER))
    return {**patches, _KEY_CARRIER: inductor_compat.cache_key_pass(key, theirs)}


# --- Plain `backend="inductor"` -------------------------------------------------------------------


class _Registration:
    """Our pass in `torch._inductor.config`, with what was there before.

    The pass runs before Inductor looks into its caches ("early" where torch has the choice), so
    that a cached graph is reported and guarded like a fresh one; the key carrier keeps what the
    cache holds true to our sources and options.
    """

    def __init__(self, config: Config) -> None:
        from torch._inductor import config as inductor

        before = inductor.pre_grad_custom_pass
        carrier = inductor_compat.cache_key_pass(
            fingerprint(config), getattr(inductor, _KEY_CARRIER)
        )
        ours = inductor_compat.graph_pass(_RunPass(config), _Key(config))
        self.after: dict[str, Any] = {_KEY_CARRIER: carrier}
        if inductor_compat.pre_grad_takes_list():
            self.after["pre_grad_custom_pass"] = [*inductor_compat.custom_passes(before), ours]
            self.after["pre_grad_pass_timing"] = "early"
        else:
            self.after["pre_grad_custom_pass"] = _Chain((before, ours))
        self.before = {option: getattr(inductor, option) for option in self.after}

    def install(self) -> None:
        self._change(self.before, self.after)

    def remove(self) -> None:
        self._change(self.after, self.before)

    @staticmethod
    def _change(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        from torch._inductor import config as inductor

        for option, value in present.items():
            if getattr(inductor, option) is not value:
                raise OptionError(
                    f"torch._inductor.config.{option} was changed after fa_inductor.register(); "
                    "undo that change first, then unregister()."
                )
        for option, value in wanted.items():
            setattr(inductor, option, value)


class _RunPass:
    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, graph: fx.Graph) -> None:
        # Sub-graphs come first and alone; their surroundings are known once the root comes.
        if not dynamo_compat.is_sub_graph(graph):
            assert graph.owning_module is not None
            with timed_pass():
                compile_pass.run(graph.owning_module, self.config)


class _Key:
    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self) -> str:
        return fingerprint(self.config)


class _Chain:
    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = tuple(p for p in passes if p is not None)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)


_registrations: list[_Registration] = []


def register(**options: Any) -> None:
    """Put the pass into `torch._inductor.config`, for plain `torch.compile(model)`.

    options: fields of `Config` (`kernels=("fa4",)`, `on_fallback="error"`).
    Raises `OptionError` when registered already or for an impossible option.
    """
    config = _config(options)
    if _registrations:
        raise OptionError("fa_inductor is registered already; call unregister() first.")
    jit_monitor.on_jit(config.on_jit)
    registration = _Registration(config)
    registration.install()
    _registrations.append(registration)


def unregister() -> None:
    """Undo `register` exactly. Raises `OptionError` when there is nothing to undo."""
    if not _registrations:
        raise OptionError("fa_inductor is not registered.")
    _registrations[-1].remove()
    _registrations.pop()


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    """`register` for the duration of a `with` block; may be nested, the innermost counts."""
    config = _config(options)
    outer = _registrations.copy()
    for registration in outer:
        registration.remove()
    _registrations.clear()
    try:
        inner = _Registration(config)
        inner.install()
        _registrations.append(inner)
        try:
            yield
        finally:
            unregister()
    finally:
        for registration in outer:
            registration.install()
        _registrations[:] = outer


def _config(options: Mapping[str, Any]) -> Config:
    config, _ = split_options({PREFIX + key: value for key, value in options.items()})
    if config.mode is not None:
        raise OptionError("mode belongs to torch.compile(mode=...) when the pass is registered.")
    for name in config.kernels:
        kernels.check_known(name)
    return config
