"""How dear a pattern is before anything compiles it: llguidance bounds its own work by fuel, and
counted repetitions within each other slip through (`(a{1000}){1000}` costs seconds a token).

Knows the text of a pattern. Knows no grammar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A group, the end of one, a repetition, a class, or one letter
PART = re.compile(
    r"(?P<open>\()|(?P<close>\))|(?P<count>\{\d*,?\d*\}|~\s*\d+(?:\.\.\d+)?)"
    r"|\[(?:\\.|[^\]\\])*\]|\\.|.",
    re.DOTALL,
)


@dataclass
class Weight:
    """Of a pattern: its letters once all repetitions are written out, and the largest product of
    counts within each other."""

    size: int = 0
    times: int = 1


def weight(pattern: str) -> Weight:
    """The weight of a regular expression, or of one line of a grammar."""
    groups, last = [Weight()], Weight()
    for part in PART.finditer(pattern):
        if part["open"]:
            groups.append(Weight())
            continue
        if part["close"]:
            last = groups.pop() if len(groups) > 1 else Weight()
        elif part["count"]:
            most = max(1, *(int(count[:9]) for count in re.findall(r"\d+", part["count"]) or "1"))
            more = Weight(last.size * (most - 1), last.times * most)
            last = Weight(last.size * most, more.times)
            groups[-1].size += more.size
            groups[-1].times = max(groups[-1].times, more.times)
            continue
        else:
            last = Weight(1)
        groups[-1].size += last.size
        groups[-1].times = max(groups[-1].times, last.times)
    return Weight(sum(group.size for group in groups), max(group.times for group in groups))
