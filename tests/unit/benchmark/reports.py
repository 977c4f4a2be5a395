"""A small report at hand, as `bench --json` writes it, for tests of what reads reports."""

from __future__ import annotations

from typing import Any

from edgespec.benchmark.report import Report
from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.rows import Row
from edgespec.benchmark.statistics import Figure


def figure(*samples: float) -> dict[str, Any]:
    return Figure(samples).to_dict()


def row(mode: str, **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "mode": mode,
        "input_tokens": 128,
        "output_tokens": 64,
        "batch_size": 1,
        "rows": None,
        "plan": None,
        "spec_policy": None,
        "synthetic_acceptance": None,
        "prompt_tokens": 128.0,
        "figures": {},
        "speed_over_plain": None,
        "cost_over_one_row": None,
        "predicted_speed_over_plain": None,
        "speculation": None,
        "answers": 0,
        "answers_equal_to_plain": 0,
        "served": None,
    }
    return usual | values


def drafted(steps: int, rate: float | None, *over: float, kind: str = "chain") -> dict[str, Any]:
    plan = {"kind": kind, "top_k": 1 + (kind == "tree"), "steps": steps, "verify_size": steps + 1}
    return row(
        "speculative",
        plan=plan,
        spec_policy="fixed",
        synthetic_acceptance=None if rate is None else [rate],
        figures={"tokens_per_s": figure(*(20 * value for value in over))},
        speed_over_plain=figure(*over),
        speculation={
            "steps": 9,
            "acceptance_length": None,
            "acceptance_rate": None,
            "per_position_acceptance": [0.7**depth for depth in range(1, steps + 1)],
            "conditional_acceptance": [],
            "drafted_per_step": None,
            "levels_per_step": None,
            "steps_without_drafts": 0,
        },
    )


def passes(rows: int, *seconds: float) -> dict[str, Any]:
    over = figure(*(value / 0.01 for value in seconds))
    return row("verify", rows=rows, output_tokens=0, figures={"pass_s": figure(*seconds)}) | {
        "cost_over_one_row": over
    }


def typed(one: dict[str, Any]) -> Row:
    return Row.read(ReportFields(one, "a row"))


def report(*rows: dict[str, Any], **environment: Any) -> Report:
    return read(document(*rows, **environment))


def read(value: dict[str, Any]) -> Report:
    return Report.read(ReportFields(value, "a report"))


def document(*rows: dict[str, Any], **environment: Any) -> dict[str, Any]:
    usual = {"device": "a board", "threads": 2, "cores": 2, "versions": {"numpy": "2", "x": None}}
    engine = {"sha256": "aa", "backend": "ort", "device": {"machine": "m"}, "weights": "int4"}
    return {
        "format": 1,
        "kind": "benchmark",
        "complete": True,
        "failed": None,
        "began": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T00:01:00+00:00",
        "command": ["edgespec", "bench"],
        "environment": usual | environment,
        "state": {"before": {"load_average": [0.1, 0, 0]}, "after": {}},
        "engine": {"directory": "engines", "method": "eagle3", "engines": {"base": engine}},
        "settings": {"prompts": {"source": "random"}, "sampling": {"seed": 0}, "warmup": 1},
        "costs_known": False,
        "notes": [],
        "peak_memory_bytes": 10**8,
        "crossover": None,
        "rows": [*rows],
    }


PLAIN = row("decode", figures={"tokens_per_s": figure(20.0, 20.5, 19.5, 20.2)})
