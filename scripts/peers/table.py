"""What a comparison says: ratios run by run, the tables of docs/performance.md, its picture's bars.

    python scripts/peers/table.py docs/performance.json docs/performance.md   # write the tables anew

Knows the JSON that compare.py writes; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Runs = dict[str, list[dict[str, Any]]]
NOTHING = "-"
END = "<!-- end -->"
PREFILL = 512


def begin(shape: str) -> str:
    """Returns the line before the tables of a shape."""
    return f"<!-- {shape}: made by scripts/peers -->"


# ---- figures


def clock_of(result: dict[str, Any]) -> str:
    """Returns which time counts: of one thread that of the processor, as others use it as well."""
    return "cpu_s" if result["threads"] == 1 else "wall_s"


def length_of(rate: float, chain: int) -> float:
    """Returns how many tokens a step makes on average where each draft of a chain is right at a
    rate, if those before it are: the accepted ones, and one of the base's own."""
    return float(sum(rate**i for i in range(chain + 1)))


def values_of(
    result: dict[str, Any], name: str, run: dict[str, Any], read: float
) -> dict[str, float]:
    """Returns every figure of one run by a name that says its unit; `read` is how many GB a second
    the core read in this round."""
    row, clock = result["rows"][name], clock_of(result)
    found = {key: float(value) for key, value in run["memory"].items()}
    found |= {f"{key}_s": float(run[key][clock]) for key in ("load", "start")}
    for rows, decode in run.get("verify", {}).items():
        found[f"verify_{rows}_ms"] = 1000 * float(decode[clock]) / decode["steps"]
    for context, parts in run["contexts"].items():
        decode = parts["decode"]
        step = 1000 * float(decode[clock]) / decode["steps"]
        found[f"prefill_{context}_s"] = float(parts["prefill"][clock])
        if row["plain"] is None:
            found[f"token_{context}_ms"] = step
            if row["read_mb"] and result["threads"] == 1:  # the speed is that of one core
                bytes_read = bytes_of(result, row, int(context))
                found[f"share_{context}"] = bytes_read / 1e6 / step / read
        else:
            found[f"step_{context}_ms"] = step
            found[f"length_{context}"] = decode["tokens"] / decode["steps"]
            found[f"token_{context}_ms"] = step / length_of(result["rate"], row["chain"])
    return found


def bytes_of(result: dict[str, Any], row: dict[str, Any], context: int) -> float:
    """Returns how many bytes a token reads: the weights, and the cache halfway through an answer."""
    positions = context + int(result["tokens"]) / 2
    cache = float(result["position_numbers"]) * int(row["cache_bytes"])
    return float(row["read_mb"]) * 1e6 + positions * cache


def summary(result: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns of each engine and figure the median, least and most, and the median of its ratio run
    by run to the row beside it; above 1 the engine needs more. A row with drafts also has
    `speedup_CONTEXT`, how many times as fast as its plain row it is."""
    speeds = result["machine"]["read_gb_s"]
    values = {
        name: [values_of(result, name, run, read) for run, read in zip(runs, speeds, strict=True)]
        for name, runs in result["runs"].items()
    }
    found = {}
    for name, runs in values.items():
        row = result["rows"][name]
        beside = values.get(row["beside"])
        found[name] = {key: figures(runs, beside, key) for key in runs[0]}
        plain = values.get(row["plain"])
        if plain is None:
            continue
        for context in result["contexts"]:
            key = f"token_{context}_ms"
            found[name][f"speedup_{context}"] = spread(ratios(plain, runs, key))
    return found


def figures(
    runs: list[dict[str, float]], beside: list[dict[str, float]] | None, key: str
) -> dict[str, float]:
    """Returns the spread of a figure, and its ratio to the row beside where that has it."""
    found = spread([run[key] for run in runs])
    if beside and all(run.get(key) for run in beside):
        found["ratio"] = middle(ratios(runs, beside, key))
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, least and most of a figure."""
    return {"median": middle(values), "least": round(min(values), 4), "most": round(max(values), 4)}


def ratios(
    these: Sequence[dict[str, float]], those: Sequence[dict[str, float]], key: str
) -> list[float]:
    """Returns a figure of these over that of those, run by run."""
    return [a[key] / b[key] for a, b in zip(these, those, strict=True)]


def middle(values: Sequence[float]) -> float:
    """Returns the rounded median."""
    return round(statistics.median(values), 4)


# ---- tables


def cell(found: dict[str, float] | None, *, with_ratio: bool = True, percent: bool = False) -> str:
    """Returns a median with three digits, and in brackets its ratio where there is one."""
    if found is None:
        return NOTHING
    value = found["median"] * (100 if percent else 1)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.0f} %" if percent else f"{value:.{digits}f}"
    return f"{text} ({found['ratio']:.2f})" if with_ratio and "ratio" in found else text


def quality(cost: dict[str, float] | None) -> str:
    """Returns the perplexity of an engine's weights, and by how much it rose, where it was
    measured."""
    if cost is None:
        return NOTHING
    rise = cost["perplexity"] / cost["exported_perplexity"] - 1
    return f"{cost['perplexity']:.4g} ({100 * rise:+.1f} %)"


def lines(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a table in Markdown; the first column has no heading."""
    body = [["", *heads], ["---"] * (len(heads) + 1), *rows]
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in body)


def plain_table(result: dict[str, Any]) -> str:
    """Returns the table of plain decoding; the ratio of an edgespec row to itself is left out."""
    contexts = [c for c in result["contexts"] if c != PREFILL]
    keys = [f"token_{c}_ms" for c in contexts]
    heads = [f"a token at {c}, ms" for c in contexts]
    first = next(iter(result["summary"].values()))
    verified = [key for key in first if key.startswith("verify_")]
    keys += verified
    heads += [f"{key.split('_')[1]} rows, ms" for key in verified]
    if PREFILL in result["contexts"]:
        keys, heads = [*keys, f"prefill_{PREFILL}_s"], [*heads, f"prefill of {PREFILL}, s"]
    known = any(f"share_{c}" in found for c in contexts for found in result["summary"].values())
    heads += [f"bandwidth at {c}" for c in contexts if known]
    measured = any(row.get("divergence") for row in result["rows"].values())
    heads += ["perplexity, over float32's"] if measured else []
    heads += ["load, s", "start, s", "peak memory, MB", "proportional", "not of files", "disk"]
    rows = []
    for name, row in result["rows"].items():
        found = result["summary"][name]
        if row["plain"] is not None:
            continue
        with_ratio = row["beside"] != name
        cells = [cell(found[key], with_ratio=with_ratio) for key in keys]
        shares = [found.get(f"share_{c}") for c in contexts if known]
        cells += [cell(share, with_ratio=False, percent=True) for share in shares]
        cells += [quality(row.get("divergence"))] if measured else []
        cells += [cell(found[key], with_ratio=False) for key in ("load_s", "start_s")]
        memory = ("rss_mb", "pss_mb", "anonymous_mb")
        cells += [cell(found[key], with_ratio=False) for key in memory]
        rows.append([row["label"], *cells, f"{row['disk_mb']:.0f}"])
    return lines(heads, rows)


def draft_table(result: dict[str, Any]) -> str:
    """Returns the table of speculation; empty without a row that drafts."""
    names = [name for name, row in result["rows"].items() if row["plain"] is not None]
    contexts = [c for c in result["contexts"] if c != PREFILL]
    heads, rows = [f"drafts, tokens a step at {result['rate']}"], []
    for context in contexts:
        heads += [f"a step at {context}, ms", "tokens that came"]
        heads += ["a token, ms", "times its plain"]
    for name in names:
        found, row = result["summary"][name], result["rows"][name]
        cells = [f"{row['chain']}, {length_of(result['rate'], row['chain']):.2f}"]
        for c in contexts:
            cells.append(cell(found[f"step_{c}_ms"], with_ratio=False))
            cells.append(f"{found[f'length_{c}']['median']:.2f}")
            cells.append(cell(found[f"token_{c}_ms"], with_ratio=row["beside"] != name))
            cells.append(cell(found.get(f"speedup_{c}"), with_ratio=False))
        rows.append([row["label"], *cells])
    return lines(heads, rows) if rows else ""


def markdown(result: dict[str, Any]) -> str:
    """Returns the tables of a shape, and below them how they were made."""
    machine = result["machine"]
    clock = "Processor time of one thread" if result["threads"] == 1 else "Wall time"
    if result["threads"] > 1:
        clock += f", {result['threads']} threads"
    versions = ", ".join(f"{name} {found}" for name, found in sorted(result["versions"].items()))
    low, high = machine["load"]
    busy = high > result["threads"] + 0.5
    others = "so other work was on the machine" if busy else "so nothing else was on the machine"
    parts = [plain_table(result)]
    drafts = draft_table(result)
    if drafts:
        how = "a token's time is a step's over the tokens that a step makes at that rate"
        where = f"each right at {result['rate']} where those before it are"
        parts += [f"With drafts, {where}; {how}:", drafts]
    parts.append(
        f"{clock}; medians of {result['runs_each']} alternating {'run' if result['runs_each'] == 1 else 'runs'} of "
        f"{result['tokens']} tokens behind each prompt; in brackets the time over that of edgespec with equal blocks and the "
        f"cache next to it, run by run. {machine['cpu']}, {machine['cpus']} cores, "
        f"{statistics.median(machine['read_gb_s']):.1f} GB/s read by one core; load {low} to "
        f"{high}, {others}. {machine['system']}; {versions}."
    )
    return "\n\n".join([*parts, f"    {result['command']}\n"])


def write_page(results: Path, page: Path) -> None:
    """Writes the tables of all shapes of a JSON file into a page, each between its marks."""
    text = page.read_text()
    for shape, result in json.loads(results.read_text()).items():
        text = replaced(text, shape, markdown(result))
    page.write_text(text)


def replaced(page: str, shape: str, tables: str) -> str:
    """Returns a page with what is between the marks of a shape replaced."""
    between = re.compile(f"{re.escape(begin(shape))}.*?{re.escape(END)}", re.DOTALL)
    if not between.search(page):
        raise SystemExit(f"The page has no place for these tables: {begin(shape)} and {END}.")
    return between.sub(lambda _: f"{begin(shape)}\n\n{tables}\n{END}", page)


def bars(result: dict[str, Any]) -> dict[int, list[tuple[str, str, float]]]:
    """Returns what the picture shows: by context (name, label, ms of a token) of plain rows."""
    return {
        context: [
            (name, row["label"], result["summary"][name][f"token_{context}_ms"]["median"])
            for name, row in result["rows"].items()
            if row["plain"] is None
        ]
        for context in result["contexts"]
        if context != PREFILL
    }


def main() -> None:
    """Writes the tables of a JSON file into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    write_page(args.json, args.page)


if __name__ == "__main__":
    main()
