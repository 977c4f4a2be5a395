"""Draws the pictures of the documentation as SVG.

python scripts/make_pictures.py           # writes docs/images/*.svg
python scripts/make_pictures.py --check   # fails where a file is not what would be written
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from peers.table import bars

DOCS = Path(__file__).parents[1] / "docs"
IMAGES, FIGURES = DOCS / "images", DOCS / "performance.json"

PAPER, INK, QUIET = "#ffffff", "#1f2328", "#656d76"
BASE, DRAFT, GOOD, BAD = "#0969da", "#bf8700", "#1a7f37", "#cf222e"
OTHERS = "#afb8c1"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"

WIDTH, HEIGHT = 860, 392
LEFT, BOX, GAP, TALL = 40, 96, 12, 34
BAR, LABELS, VALUES, CUT = 22, 290, 90, 1.25


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


def picture(parts: Iterable[str], title: str, height: int = HEIGHT) -> str:
    """Returns the SVG file with these parts on white paper."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="{escape(FONT)}" role="img">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", paper, *parts, "</svg>", ""])


PICTURES = {"speculative_decoding.svg": speculative_decoding, "performance.svg": performance}


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
