"""The pass: find attention in a Dynamo graph, understand it, choose a kernel, replace it.

Built on Inductor's pattern matcher. Runs before autograd, so training, checkpointing and
exact strides follow from what AOTAutograd does with any op.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from . import kernels, layout, symbolic
from .config import Config
from .dynamo_compat import users_function
from .patterns import FAMILIES
from .patterns.family import Family, NotUnderstood, Scope, Site, source_of
from .scopes import program_order, scopes
from .select import choose
from .spec import AttentionSpec
from .target import Target
from .times import CORE
from .user_code import StackFrame
from .watch import Watch, plain_name, site_name, watched_name

_SEEN = "fa_inductor_seen"


@dataclass(frozen=True)
class SiteRecord:
    """What happened to one site.

    source: `file:line` of the user's call. module: path of the nn.Module around it.
    stack: the user's frames, outermost first.
    spec: None when the call was not understood. kernel: None for a fallback, "core" where
        PyTorch's own attention is kept because it was measured to be faster.
    reasons: why each other kernel was not taken; key "all" for reasons that hold for all.
    copied: inputs that the kernel copies on every call, with the reason.
    notes: what else is worth knowing.
    """

    family: str
    source: str
    module: str
    spec: AttentionSpec | None
    kernel: str | None
    reasons: Mapping[str, tuple[str, ...]]
    copied: Mapping[str, str]
    notes: tuple[str, ...] = ()
    stack: tuple[StackFrame, ...] = ()

    @property
    def objections(self) -> tuple[str, ...]:
        """What speaks against the kernel itself, when the user's own code has named it."""
        return self.reasons.get(self.kernel, ()) if self.kernel else ()

    @property
    def reason_texts(self) -> list[str]:
        """`fa4: dropout_p=0.1 > 0 (...)`, one for each kernel and reason."""
        return [f"{name}: {text}" for name, texts in self.reasons.items() for text in texts]


def rewrite(
    root: fx.GraphModule, config: Config, target: Target | None = None, *, apply: bool = True
) -> list[SiteRecord]:
    """Plan every site of `root` and its sub-graphs; with `apply`, replace those with a kernel.

    target: what to plan for; None means the device that each site's tensors are on.
    Returns the sites in program order. A graph that was seen before yields nothing new.
    """
    decisions: dict[fx.Node, _Decision] = {}
    scoped = scopes(root, config.assume_mask)
    for module, scope in scoped:
        _find(module, scope, config, target, decisions)
    records = [decisions[node].record for node in program_order(root) if node in decisions]
    if apply:
        for module, _ in scoped:
            _replace(module, decisions, config)
    return records


@dataclass(frozen=True)
class _Decision:
    record: SiteRecord
    family: Family
    site: Site | None


def _replace(
    module: fx.GraphModule, decisions: Mapping[fx.Node, _Decision], config: Config
) -> None:
    changed = False
    # Last first: what a later site has noted about its operands then still exists.
    for node in reversed(list(module.graph.nodes)):
        decision = decisions.get(node)
        if decision is None:
            continue
        node.meta[_SEEN] = True
        record, site = decision.record, decision.site
        if site is None or record.kernel in (None, CORE):
            continue
        assert record.kernel is not None
        kernel = _watched(record, config)
        if kernel != site.fixed_kernel:
            decision.family.rewrite(site, kernel)
            changed = True
    if changed:
        module.graph.lint()
        module.recompile()


def _watched(record: SiteRecord, config: Config) -> str:
    """The name of the record's kernel, under the watch that the options ask for."""
    assert record.kernel is not None
    if config.guard == "off":
        return record.kernel
    site = site_name(record.module or record.family, record.source)
    return watched_name(
        record.kernel, Watch(config.guard, config.on_guard, config.guard_every, site)
    )


def _find(
    module: fx.GraphModule,
    scope: Scope,
    config: Config,
    target: Target | None,
    decisions: dict[fx.Node, _Decision],
) -> None:
    """Run the families' anchors through the pattern matcher, recording every match."""
    from torch._inductor.pattern_matcher import (
        CallFunctionVarArgs,
        CallMethodVarArgs,
        Match,
        PatternMatcherPass,
        register_graph_pattern,
    )

    matcher = PatternMatcherPass(pass_name="fa_inductor")

    def register(family: Family) -> None:
        def record(match: Match, *args: Any, **kwargs: Any) -> None:
            node = match.nodes[-1]
            if node.meta.get(_SEEN) or node in decisions:
                return
            result = family.match(node, scope)
            if isinstance(result, Site):
                decided = _decide(family, result, scope, config, target)
                decisions[node] = _Decision(decided, family, result)
            elif isinstance(result, NotUnderstood):
                left = _not_understood(family, node, result.reason)
                decisions[node] = _Decision(left, family, None)

        methods = [anchor for anchor in family.ANCHORS if isinstance(anchor, str)]
        functions = [anchor for anchor in family.ANCHORS if not isinstance(anchor, str)]
        register_graph_pattern(CallFunctionVarArgs(functions), pass_dict=matcher)(record)
        if methods:
            register_graph_pattern(CallMethodVarArgs(methods), pass_dict=matcher)(record)

    for family in FAMILIES:
        register(family)
    matcher.apply(module)


def _decide(
    family: Family, site: Site, scope: Scope, config: Config, target: Target | None
) -> SiteRecord:
    spec = site.spec
    target = target or Target.of_device(spec.q.device)
    if site.fixed_kernel:
        kernels.check_known(site.fixed_kernel)
        kernel = plain_name(site.fixed_kernel)
        against = choose(spec, Config(kernels=(kernel,)), target).reasons
        return _record(family, site.node, spec, kernel, against)
    if scope.blocked:
        return _record(family, site.node, spec, None, {"all": (scope.blocked,)})
    choice = choose(spec, config, target, has_core=site.is_core)
    return _record(family, site.node, spec, choice.kernel, choice.reasons)


def _not_understood(family: Family, node: fx.Node, reason: str) -> SiteRecord:
    return _record(family, node, None, None, {"all": (reason,)})


def _record(
    family: Family,
    node: fx.Node,
    spec: AttentionSpec | None,
    kernel: str | None,
    reasons: Mapping[str, tuple[str, ...]],
) -> SiteRecord:
    return SiteRecord(
        family.NAME,
        source_of(node),
        _module_path(node),
        spec,
        kernel,
        reasons,
        copied=layout.copies(spec, kernel) if spec else {},
        notes=_notes(spec, kernel) if spec else (),
        stack=_stack(node),
    )


def _stack(node: fx.Node) -> tuple[StackFrame, ...]:
    """The user's frames in which Dynamo met the call; the last is where `source_of` says."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    return tuple(StackFrame(f"{path}:{line}", users_function(name)) for path, line, name in frames)


def _notes(spec: AttentionSpec, kernel: str | None) -> tuple[str, ...]:
    notes = (spec.proven,) if spec.proven else ()
    sizes = [size for size in (*spec.q.shape, *spec.k.shape) if not symbolic.is_static(size)]
    if kernel != "cudnn" or not sizes:
        return notes
    names = ", ".join(dict.fromkeys(map(symbolic.text, sizes)))
    return (*notes, f"cuDNN builds a plan, about 60 ms, for each new value of {names}")


def _module_path(node: fx.Node) -> str:
    """`model.layers.0.attn` from Dynamo's module stack, empty outside a module."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^[LG]\['([^']+)'\]", r"\1", path)
    path = re.sub(r"\._modules\b", "", path)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", path)
    # The variable that holds the model: the user's `self`, or the one in Dynamo's own wrapper.
    return re.sub(r"^(self|fn)\.", "", path)
