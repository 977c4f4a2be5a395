"""What measured costs mean, in plain sentences: for `bench --explain`, `inspect`, `infer` and
`build`.

Knows the cost model and English. Knows no engine.
"""

from __future__ import annotations

from edgespec.runtime.cost_model import CostModel
from edgespec.runtime.cost_profile import CostProfile
from edgespec.runtime.speedup import ms


def built_line(profile: CostProfile, seconds: float) -> str:
    """What a build says of its measurement."""
    first = min((t.context, t.batch) for t in profile.base)[0]
    costs = CostModel(profile).at(first)
    parts = [f"a plain step {ms(costs.plain)}"]
    sizes = sorted({t.rows for t in profile.base} & {4, 8})
    parts += [f"{rows} rows {costs.passes[rows] / costs.plain:.2f} times that" for rows in sizes]
    if profile.propose:
        levels = max(t.levels for t in profile.propose if t.top_k == 1)
        parts.append(f"{levels} drafts {ms(costs.propose[levels] + costs.observe[1])}")
    return f"costs, behind {first} tokens: {', '.join(parts)} (measured in {seconds:.1f} s)"
