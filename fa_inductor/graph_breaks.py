"""Graph breaks in words: what Dynamo's message says, where, and under which id it is explained."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .dynamo_compat import users_function
from .user_code import StackFrame

# What Dynamo says of a break that it found without an exception: no more than a word.
_TERSE = {"generic_jump": "Data-dependent branching"}
_EXPLAINED = {
    "Data-dependent branching": "The way that the code takes depends on the values in a tensor.",
    "step_unsupported": "A graph break inside try, with or a loop: what follows is left to Python.",
}
_ANOTHER = "*** While handling this graph break, another graph break occurred: ***"


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph, and where.

    source: `file:line` of the user's innermost frame; stack: all of them, outermost first.
    gb_id: Dynamo's own id of this kind of break, `GB0170`, empty where it has none.
    skipped: Dynamo did not go on behind the break: it left the whole frame to Python.
    """

    reason: str
    source: str
    explanation: str = ""
    hints: tuple[str, ...] = ()
    gb_id: str = ""
    stack: tuple[StackFrame, ...] = ()
    skipped: bool = False


def understand(
    message: str,
    stack: Sequence[traceback.FrameSummary],
    ids: Mapping[str, str],
    skipped_at: str | None = None,
) -> GraphBreak:
    """The graph break that Dynamo's `message` tells of.

    ids: Dynamo's ids by the first line of its messages. skipped_at: `file:line` of the user's code
        in a frame that was left to Python, None where Dynamo went on behind the break.
    """
    first, _, second = message.partition(_ANOTHER)
    reason, _, rest = first.strip().partition("\n")
    reason = _TERSE.get(reason.split(" ")[0], reason)
    explanations = [*_paragraphs("Explanation", rest), *_paragraphs("Explanation", second)]
    frames = tuple(StackFrame(f"{f.filename}:{f.lineno}", users_function(f.name)) for f in stack)
    return GraphBreak(
        reason,
        frames[-1].source if frames else skipped_at or "",
        " ".join(explanations) or _EXPLAINED.get(reason, ""),
        tuple(_paragraphs("Hint", rest)),
        ids.get(reason, ""),
        frames,
        skipped_at is not None,
    )


def _paragraphs(heading: str, text: str) -> list[str]:
    """What stands behind "Explanation:" or "Hint:", which may go on over indented lines."""
    found = re.findall(rf"^  {heading}: (.*(?:\n    .*)*)", text, re.M)
    return [text for each in found if (text := " ".join(each.split()))]
