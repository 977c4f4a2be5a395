"""The kinds of text that the demo base is trained on and that its drafts are measured with, made of
the standard library's modules and nothing else.

Knows modules, and conversations as pairs of a user's message and an answer. Knows nothing of
tokens, training or engines.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from train_demo_model import functions_in, read_source

Message = tuple[str, str]  # what a user asks, and the answer

WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
NAME = re.compile(r"\b[A-Za-z][A-Za-z_]{3,19}\b")
QUESTIONS = (
    "What does {name} do?",
    "What is {name} in {module}?",
    "How does {name} work?",
    "Explain {name}.",
    "When should I use {name}?",
    "Can you tell me what {module}.{name} is for?",
)
SHORTEST, LONGEST = 24, 120  # words of a paragraph
ROWS = 12  # lines of an answer that repeats itself


def functions(path: Path) -> list[Message]:
    """Signature and docstring of each function, answered with its body."""
    return functions_in(path)


def prose(path: Path) -> list[Message]:
    """The first half of each paragraph of docstrings and comments, answered with the second."""
    found = []
    for paragraph in paragraphs(read_source(path)):
        words = paragraph.split(" ")
        half = len(words) // 2
        found.append(
            (f"Continue the text:\n{' '.join(words[:half])}", " ".join(words[half:])),
        )
    return found


def repetitive(path: Path) -> list[Message]:
    """Tables, lists and lines of a module's own names, answered with more of the same."""
    names = sorted(set(NAME.findall(read_source(path))))
    if len(names) < ROWS:
        return []
    rng = np.random.default_rng(number_of(path))
    makers = (constants, mapping, turns, copy)
    count = min(32, len(names) // 6)
    return [makers[i % len(makers)](names, rng) for i in range(count)]


def chat(path: Path) -> list[Message]:
    """Short questions about functions and classes, answered with their docstrings' beginnings."""
    found = []
    for i, (name, text) in enumerate(docstrings(read_source(path))):
        first = text.split("\n\n")[0]
        if name is None or name.startswith("_") or not 4 <= len(WORD.findall(first)) <= 60:
            continue
        question = QUESTIONS[(i + number_of(path)) % len(QUESTIONS)]
        found.append((question.format(name=name, module=path.stem), first))
    return found


def random_words(path: Path) -> list[Message]:
    """Words of a module in random order, which have no answer."""
    words = WORD.findall(read_source(path))
    if len(words) < ROWS:
        return []
    rng = np.random.default_rng(number_of(path))
    sizes = rng.integers(8, 40, min(8, len(words) // ROWS))
    return [(" ".join(words[i] for i in rng.integers(len(words), size=n)), "") for n in sizes]


KINDS: dict[str, Callable[[Path], list[Message]]] = {
    "functions": functions,
    "prose": prose,
    "random": random_words,
    "repetitive": repetitive,
    "chat": chat,
}


def messages(kind: str, files: list[Path], count: int | None = None, seed: int = 0) -> list[str]:
    """`count` different messages of a kind as users would send them, in random but fixed order."""
    asked = list(dict.fromkeys(ask for path in files for ask, _ in KINDS[kind](path)))
    order = np.random.default_rng(seed).permutation(len(asked))
    return [asked[i] for i in order[:count]]


# ---- what a module has


def docstrings(source: str) -> Iterator[tuple[str | None, str]]:
    """The docstrings of a module, each with the name of what it describes: None for the module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", None), text


def paragraphs(source: str) -> Iterator[str]:
    """The paragraphs of docstrings and comments that are prose, each in one line."""
    blocks = [text for _, text in docstrings(source)]
    blocks += [re.sub(r"(?m)^ *#+ ?", "", c) for c in re.findall(r"(?m)(?:^ *# .*\n){3,}", source)]
    for block in blocks:
        for part in re.split(r"\n\s*\n", inspect.cleandoc(block)):
            line = " ".join(part.split())
            words = line.split(" ")
            plain = sum(bool(WORD.fullmatch(word.strip(".,;:()'\"`"))) for word in words)
            if SHORTEST <= len(words) <= LONGEST and plain >= 0.8 * len(words):
                yield line


def number_of(path: Path) -> int:
    """A number that belongs to a module's name."""
    return int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:4], "big")


# ---- text that repeats itself


def split(lines: list[str], rng: np.random.Generator) -> tuple[str, str]:
    """The first lines, and those after them."""
    given = int(rng.integers(4, 8))
    return "\n".join(lines[:given]), "\n".join(lines[given : given + ROWS])


def constants(names: list[str], rng: np.random.Generator) -> Message:
    """A table of numbered constants."""
    prefix, start = str(rng.choice(names)).upper(), int(rng.integers(0, 30))
    head, rest = split([f"{prefix}_{i} = {i}" for i in range(start, start + 2 * ROWS)], rng)
    return f"Continue the table:\n{head}", rest


def mapping(names: list[str], rng: np.random.Generator) -> Message:
    """A mapping of names to themselves."""
    some = rng.choice(names, 3, replace=False)
    rows = [f"    '{name}': {name}.{name}," for name in islice(cycle(map(str, some)), 2 * ROWS)]
    head, rest = split(rows, rng)
    return f"Continue the mapping:\n{head}", rest


def turns(names: list[str], rng: np.random.Generator) -> Message:
    """A list whose items come again in turn."""
    some = rng.choice(names, int(rng.integers(2, 5)), replace=False)
    head, rest = split([f"- {name}" for name in islice(cycle(map(str, some)), 2 * ROWS)], rng)
    return f"Continue the list:\n{head}", rest


def copy(names: list[str], rng: np.random.Generator) -> Message:
    """Calls that are to be written once more."""
    text = "\n".join(f"{a}({b}, {c})" for a, b, c in rng.choice(names, (5, 3)))
    return f"Copy the lines:\n{text}", text
