"""Plant faults in a copy of the code and see whether the tests find them.

Each fault is a row: a snippet of the package, what stands in its place, and the tests that must
notice. A snippet that is no longer in the package is an error: look for where the code went.

    python scripts/plant_faults.py                 # all faults; minutes
    python scripts/plant_faults.py mask position   # those whose name has one of these words
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("edgespec", "tests", "scripts", "recipes", "pyproject.toml", "Makefile", "docs")
CAUGHT = 1  # pytest's exit status where tests failed; others mean that it could not run them

BASES = "tests/parity/test_bases.py"
DRAFTS = "tests/parity/test_drafts.py"
DFLASH = "tests/parity/test_dflash.py"
HYBRID = "tests/parity/test_hybrid.py"
QUANTIZED = "tests/parity/test_quantised_export.py"
LOSSLESS = "tests/lossless/test_lossless.py"
LOSSLESS_BLOCKS = "tests/lossless/test_dflash.py"
BATCHES = "tests/lossless/test_batches.py"
BAD_INPUT = "tests/e2e/test_bad_input.py"


@dataclass(frozen=True)
class Fault:
    """`old` is replaced by `new` wherever the package has it; `tests` are run one after the other
    until one fails."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    # Masks
    Fault(
        "tree mask without the ancestors between",
        "mask[node] |= mask[self.parents[node]]",
        "mask[node] |= mask[0]",
        (BASES, LOSSLESS),
    ),
    Fault(
        "causal mask one token short",
        "order[:, None] >= order,",
        "order[:, None] >= np.maximum(order, 1),",
        (BASES, LOSSLESS),
    ),
    Fault(
        "sliding window one token too wide",
        "part.positions[:, None] - slots < window",
        "part.positions[:, None] - slots <= window",
        (BASES,),
    ),
    Fault(
        "window of a block one token too wide",
        "distance < spec.window",
        "distance <= spec.window",
        (DFLASH,),
    ),
    Fault(
        "block that should look back only looks both ways",
        "np.tri(count, dtype=bool) if spec.causal else True",
        "True",
        (DFLASH,),
    ),
    # Positions
    Fault(
        "tree nodes stand at positions of their own",
        "depths[node] = depths[self.parents[node]] + 1",
        "depths[node] = node",
        (BASES, LOSSLESS),
    ),
    Fault(
        "beam of the draft one position ahead",
        "length + level - 1)",
        "length + level)",
        (DRAFTS,),
    ),
    Fault(
        "block behind the longest context of a batch",
        "starts[i] + new + np.arange(count)",
        "starts[i] + context + np.arange(count)",
        (DFLASH, LOSSLESS_BLOCKS),
    ),
    # Accepting and sampling
    Fault(
        "acceptance reads the logits of the node before",
        "sampler.pick(logits[node], tokens)",
        "sampler.pick(logits[max(node - 1, 0)], tokens)",
        (LOSSLESS,),
    ),
    Fault(
        "noise that does not depend on the position",
        "gumbel(self.seed, position, ids)",
        "gumbel(self.seed, 0, ids)",
        ("tests/unit/runtime/test_sampling.py",),
    ),
    Fault(
        "repetition penalty forgets the last token",
        "np.fromiter(before, np.int64, len(before))",
        "np.array([*before][:-1], np.int64)",
        ("tests/unit/runtime/test_sampling.py",),
    ),
    Fault(
        "tokens behind a stop id are emitted",
        "if token in self.stop_ids:",
        "if token in self.stop_ids and count == len(output.tokens):",
        (LOSSLESS,),
    ),
    # Drafts
    Fault(
        "vocabulary map of the draft ignored",
        "return ids + self.d2t[ids]",
        "return ids",
        (DRAFTS,),
    ),
    Fault(
        "beam goes on with states of other parents",
        "result.hidden_states[parents]",
        "result.hidden_states[: len(parents)]",
        (DRAFTS,),
    ),
    Fault(
        "aux layers in the wrong order",
        "*(hidden_states[t] for t in graph.aux_layers)",
        "*(hidden_states[t] for t in graph.aux_layers[::-1])",
        (BASES, DRAFTS),
    ),
    Fault(
        "norm_before_residual ignored",
        "state if self.config.norm_before_residual else x",
        "x",
        (DRAFTS,),
    ),
    Fault(
        "norm_output ignored",
        "if self.config.norm_output:",
        "if self.config.norm_output and not self.config.fc_norm:",
        (DRAFTS,),
    ),
    Fault(
        "aux hidden state lost at a chunk's boundary",
        "*seq.prompt[start + 1 : end + 1], *first",
        "*seq.prompt[start : end - len(first)], *first",
        (DRAFTS, "tests/unit/runtime/test_session.py", LOSSLESS),
    ),
    # Caches
    Fault(
        "rows of an accepted path copied from the slot before",
        "rows[:, :, slots[moving]]",
        "rows[:, :, slots[moving] - 1]",
        (BASES, LOSSLESS),
    ),
    Fault(
        "a lane moves without its last row",
        "self.runner.copy_lane(source, target, self.lanes[source].length)",
        "self.runner.copy_lane(source, target, self.lanes[source].length - 1)",
        (BATCHES,),
    ),
    Fault(
        "recurrent state takes in the first rows instead of the accepted ones",
        "self.delta_rows[:, place, path]",
        "self.delta_rows[:, place, : len(path)]",
        (HYBRID, LOSSLESS),
    ),
    # Graphs
    Fault(
        "partial rotary factor ignored",
        '{"rotary_embedding_dim": width}',
        "{}",
        (HYBRID,),
    ),
    Fault(
        "norms of (1 + w) taken for norms of w",
        "    if spec.unit_offset:",
        "    if spec.unit_offset is None:",
        (HYBRID,),
    ),
    Fault(
        "linear RoPE scaling ignored",
        "return plain / np.float32(config.factor)",
        "return plain",
        ("tests/unit/test_rope.py", BASES),
    ),
    # Quantized weights
    Fault(
        "scales of blocks laid out along the wrong axis",
        "np.repeat(per_block, width, axis=1)",
        "np.tile(per_block, (1, width))",
        ("tests/unit/test_quantized.py", QUANTIZED),
    ),
    Fault(
        "smoothing scales divide instead of multiply",
        'builder.op("Mul", x, scale, name=f"{name}/x/smooth")',
        'builder.op("Div", x, scale, name=f"{name}/x/smooth")',
        (QUANTIZED,),
    ),
    Fault(
        "static activations are not rounded",
        'if stored.scheme.activations == "static tensor":',
        'if stored.scheme.activations == "static":',
        (QUANTIZED,),
    ),
    # Refusals
    Fault(
        "hashes of a manifest are not checked",
        'if sha256_file(path) != entry["sha256"]:',
        'if sha256_file(path) == "":',
        ("tests/unit/test_bundle.py", BAD_INPUT),
    ),
    Fault(
        "a draft for another vocabulary is taken",
        "if draft.vocab_size != base.vocab_size:",
        "if draft.vocab_size < 0:",
        (BAD_INPUT,),
    ),
)


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def files_with(tree: Path, snippet: str) -> list[Path]:
    package = (tree / "edgespec").rglob("*.py")
    return [path for path in package if snippet in path.read_text(encoding="utf-8")]


def find_all(faults: list[Fault]) -> None:
    """Ends the program where a snippet or a test file is gone."""
    gone = [f"{fault.name}: {fault.old}" for fault in faults if not files_with(ROOT, fault.old)]
    gone += [test for fault in faults for test in fault.tests if not (ROOT / test).is_file()]
    if gone:
        sys.exit(
            "no longer there; say in scripts/plant_faults.py where it went:\n" + "\n".join(gone)
        )


def caught_by(tree: Path, fault: Fault) -> str | None:
    """The first test that fails with the fault planted; None where all of them pass. Ends the
    program where that test fails without the fault, too."""
    found = first_failure_with(tree, fault)
    if found is not None and first_failure(tree, found) is not None:
        sys.exit(f"{found} fails without any fault: repair that first")
    return found


def first_failure_with(tree: Path, fault: Fault) -> str | None:
    before = {path: path.read_text(encoding="utf-8") for path in files_with(tree, fault.old)}
    for path, text in before.items():
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        for test in fault.tests:
            if failure := first_failure(tree, test):
                return failure
        return None
    finally:
        for path, text in before.items():
            path.write_text(text, encoding="utf-8")


def first_failure(tree: Path, test: str) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", test]
    environ = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode not in (0, CAUGHT):
        sys.exit(f"{test} could not be run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split()[1] if done.returncode == CAUGHT else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="faults whose name has one of these words")
    parser.add_argument("--list", action="store_true", help="only look whether all are there")
    words = (args := parser.parse_args()).words
    faults = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    find_all(faults)
    if args.list:
        return
    survived = 0
    with tempfile.TemporaryDirectory(prefix="edgespec-faults-") as directory:
        copy_tree(Path(directory))
        for fault in faults:
            began = time.monotonic()
            found = caught_by(Path(directory), fault)
            survived += found is None
            took = f"{time.monotonic() - began:4.0f} s"
            print(f"{'SURVIVED' if found is None else 'caught  '} {took}  {fault.name}", flush=True)
            if found is not None:
                print(f"{'':18}{found}", flush=True)
    print(f"{len(faults) - survived} of {len(faults)} faults are caught")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
