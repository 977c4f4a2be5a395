"""Draws the pictures of the documentation as SVG.

python scripts/make_pictures.py           # writes docs/images/*.svg
python scripts/make_pictures.py --check   # fails where a file is not what would be written
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from peers.table import bars

DOCS = Path(__file__).parents[1] / "docs"
IMAGES, FIGURES = DOCS / "images", DOCS / "performance.json"
FORMATS = DOCS / "frontier.json"

PAPER, INK, QUIET = "#ffffff", "#1f2328", "#656d76"
BASE, DRAFT, GOOD, BAD = "#0969da", "#bf8700", "#1a7f37", "#cf222e"
OTHERS = "#afb8c1"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"

WIDTH, HEIGHT = 860, 392
LEFT, BOX, GAP, TALL = 40, 96, 12, 34
BAR, LABELS, VALUES, CUT = 22, 290, 90, 1.25
PANEL, MARGIN, MOST_BITS = 370, 50, 6.3
LETTER, LINE = 6.2, 11  # how much room a label takes


def text(x: float, y: float, words: str, *, color: str = INK, size: int = 14, **more: str) -> str:
    """Returns a line of text; `more` are further attributes, with _ for -."""
    rest = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}"{rest}>{escape(words)}</text>'
    )


def token(column: float, y: float, word: str, color: str, *, fill: str = PAPER) -> str:
    """Returns a box with a token, `column` boxes from the left."""
    x = LEFT + column * (BOX + GAP)
    label = text(x + BOX / 2, y + 22, word, color=INK, text_anchor="middle")
    frame = f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{TALL}" rx="6"'
    return f'{frame} fill="{fill}" stroke="{color}" stroke-width="2"/>{label}'


def one_pass(first: float, count: int, y: float, words: str, color: str) -> str:
    """Returns a bar below `count` boxes that stands for one pass of a model."""
    x, width = LEFT + first * (BOX + GAP), count * BOX + (count - 1) * GAP
    label = text(x + width / 2, y + 17, words, color=PAPER, size=13, text_anchor="middle")
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="24" rx="4" fill="{color}"/>{label}'


def speculative_decoding() -> str:
    """Returns the picture of plain decoding beside one speculative step."""
    note = LEFT + 4 * (BOX + GAP)
    parts = [text(LEFT, 34, "Plain decoding: one base pass per token", font_weight="600")]
    for i, word in enumerate(["sky", "is", "blue", "because"]):
        parts += [token(i, 50, word, BASE), one_pass(i, 1, 92, "base", BASE)]
    parts.append(text(note, 108, "4 tokens, 4 base passes", color=QUIET))

    parts.append(text(LEFT, 166, "Speculative decoding: one step", font_weight="600"))
    for i, word in enumerate(["sky", "is", "red"]):
        parts += [token(i, 182, word, DRAFT), one_pass(i, 1, 224, "draft", DRAFT)]
    parts.append(text(note, 204, "1. The draft proposes tokens.", color=QUIET))
    parts.append(one_pass(0, 4, 258, "base, once, over all of them", BASE))
    parts.append(text(note, 275, "2. The base verifies them in one pass.", color=QUIET))
    for i, word in enumerate(["sky", "is"]):
        parts.append(token(i, 300, word, GOOD, fill="#dafbe1"))
    parts.append(token(2, 300, "red", BAD, fill="#ffebe9"))
    strike = f"M{LEFT + 2 * (BOX + GAP) + 30} 317h{BOX - 60}"
    parts.append(f'<path d="{strike}" stroke="{BAD}" stroke-width="2" fill="none"/>')
    parts.append(token(3, 300, "blue", BASE))
    parts.append(text(note, 314, "3. It keeps those that it would have", color=QUIET))
    parts.append(text(note, 332, "chosen itself, and adds its own next token.", color=QUIET))
    summary = "3 tokens, 1 base pass, and the same text as plain decoding."
    parts.append(text(LEFT, 372, summary, color=QUIET))
    return picture(parts, "Speculative decoding: a draft proposes, the base verifies in one pass")


def performance() -> str:
    """Returns the picture of a token's time in each engine: a panel for each context, a bar for
    each row of the first shape in docs/performance.json."""
    shape, result = next(iter(json.loads(FIGURES.read_text()).items()))
    clock = "processor time of one thread" if result["threads"] == 1 else "time"
    title = f"Plain decoding of Qwen3-{shape}'s shape: ms a token, {clock}"
    parts, y = [text(LEFT, 34, title, font_weight="600")], 64
    for context, rows in bars(result).items():
        parts.append(text(LEFT, y, f"behind a prompt of {context} tokens", color=QUIET))
        # A bar that is far longer than all others is cut, so that the others can be told apart
        *_, second, longest = sorted(value for _, _, value in rows)
        longest = min(longest, CUT * second)
        for name, label, value in rows:
            y += BAR
            color = BASE if name.startswith("edgespec") else OTHERS
            width = (WIDTH - LEFT - LABELS - VALUES) * min(1, value / longest)
            parts.append(text(LEFT, y + 12, label, size=13))
            bar = f'<rect x="{LEFT + LABELS}" y="{y}" width="{width:.1f}" height="16" rx="3"'
            parts.append(f'{bar} fill="{color}"/>')
            if value > longest:
                cut = f"M{LEFT + LABELS + width - 30:.1f} {y + 20}l8 -24"
                parts.append(f'<path d="{cut}" stroke="{PAPER}" stroke-width="6"/>')
            parts.append(text(LEFT + LABELS + width + 8, y + 13, f"{value:.1f}", size=13))
        y += BAR + 26
    return picture(parts, title, y - BAR)


def room_beside(
    x: float, y: float, width: float, taken: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Returns where a label of a dot begins: right or left of it, as near as others (left, height,
    right) let it be."""
    for away in range(0, 200, 3):
        for at in (y + away, y - away):
            for begin in (x + 8, x - 8 - width):
                if begin > LEFT + MARGIN and all(
                    abs(at - height) >= LINE or begin > right or begin + width < left
                    for left, height, right in taken
                ):
                    return begin, at
    return x + 8, y


def frontier() -> str:
    """Returns the picture of weight formats: a panel for each model of docs/frontier.json, with bits
    a weight to the right and the divergence upward, in powers of two."""
    title = "What weight formats cost: KL from float32, nats a token, by bits a weight"
    parts, top = [text(LEFT, 34, title, font_weight="600")], 60
    for name, model in json.loads(FORMATS.read_text()).items():
        rows = [row for row in model["rows"] if "kl" in row and row["bits"] <= MOST_BITS]
        low, high = (f(row["bits"] for row in rows) for f in (min, max))
        least, most = (math.log2(f(row["kl"] for row in rows)) for f in (min, max))
        parts.append(text(LEFT, top, name, color=QUIET))
        left, wide, tall = LEFT + MARGIN, WIDTH - 2 * LEFT - MARGIN - 150, PANEL - 90
        for power in range(math.ceil(least), math.floor(most) + 1):
            y = top + 24 + tall * (most - power) / (most - least)
            line = f'<path d="M{left} {y:.1f}h{wide + 140}" stroke="#d0d7de"/>'
            parts += [line, text(LEFT, y + 4, f"{2.0**power:.3g}", color=QUIET, size=11)]
        for half in range(math.ceil(2 * low), math.floor(2 * high) + 1):
            x = left + wide * (half / 2 - low) / (high - low)
            parts.append(text(x - 8, top + tall + 48, f"{half / 2:g}", color=QUIET, size=11))
        dots = [
            (
                left + wide * (row["bits"] - low) / (high - low),
                top + 24 + tall * (most - math.log2(row["kl"])) / (most - least),
            )
            for row in rows
        ]
        taken = [(x - 4, y, x + 4) for x, y in dots]
        for row, (x, y) in zip(rows, dots, strict=True):
            color = BASE if row["engine"] == "edgespec" else DRAFT
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
            words = row["format"]
            if "ms_per_token" in row:
                words += f", {1000 / row['ms_per_token']:.0f}/s"
            place = room_beside(x, y, LETTER * len(words), taken)
            width = LETTER * len(words)
            taken.append((place[0], place[1], place[0] + width))
            end = place[0] if place[0] > x else place[0] + width
            lead = f'<path d="M{x:.1f} {y:.1f}L{end:.1f} {place[1]:.1f}" stroke="{color}"'
            parts.append(f'{lead} stroke-width="0.6"/>')
            parts.append(text(place[0], place[1] + 4, words, color=color, size=11))
        top += PANEL
    parts.append(text(LEFT, top, "edgespec", color=BASE, size=13))
    parts.append(text(LEFT + 80, top, "llama.cpp", color=DRAFT, size=13))
    note = "as they run; tokens a second of one thread behind 128 tokens where measured"
    parts.append(text(LEFT + 160, top, note, color=QUIET, size=13))
    return picture(parts, title, top + 20)


def picture(parts: Iterable[str], title: str, height: int = HEIGHT) -> str:
    """Returns the SVG file with these parts on white paper."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="{escape(FONT)}" role="img">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


PICTURES = {
    "speculative_decoding.svg": speculative_decoding,
    "performance.svg": performance,
    "frontier.svg": frontier,
}


def main() -> None:
    """Writes the pictures, or compares them with --check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, draw in PICTURES.items():
        path = IMAGES / name
        if check:
            if not path.is_file() or path.read_text() != draw():
                sys.exit(f"{path} is not what {Path(__file__).name} draws. Run it again.")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw())


if __name__ == "__main__":
    main()
