"""The table of rules in docs/tensorrt.md, from the table in the package.

Knows the page's marks. Knows nothing of what the rules look at.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.tensorrt.parser_operators import FIRST
from edgespec.backends.tensorrt.rules import LAST, RULES, Level, ParserRule, Rtx

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tensorrt.md"
BEGIN = "<!-- rules: written by scripts/rules_page.py from backends/tensorrt/rules.py; run `make docs` -->"
END = "<!-- /rules -->"
HEAD = (
    "| rule | a graph keeps it where | releases | TensorRT-RTX | source |\n|---|---|---|---|---|\n"
)
SAID = {
    Rtx.PARSER: "its parser refuses",
    Rtx.BUILDER: "its builder refuses",
    Rtx.NOBODY: "takes it",
    Rtx.NOT_TRIED: "not tried",
}


def render() -> str:
    """The page, with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} has not both marks: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{HEAD}{rows()}\n{END}{after}"


def rows() -> str:
    """One row a rule, in the order of the table."""
    return "".join(row(name, rule) for name, rule in RULES.items())


def row(name: str, rule: ParserRule) -> str:
    """The row of a rule."""
    title = f"`{name}`" if rule.level is Level.REFUSED else f"`{name}` (warning)"
    cells = (title, rule.text, releases(rule), SAID[rule.rtx], rule.source)
    return f"| {' | '.join(cells)} |\n"


def releases(rule: ParserRule) -> str:
    """The releases in which a rule holds."""
    since = "all" if rule.since == FIRST else f"from {rule.since[0]}.{rule.since[1]}"
    return since if rule.until == LAST else f"{since} to {rule.until[0]}.{rule.until[1]}"
