"""The demo base with each drafting method: what is exported, and the sizes of drafts that are
measured and compared.

Knows where drafts stand that the training scripts make on demand. For `measure_demo.py` and
`parity_run.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.backends.base import BuildOptions
from edgespec.backends.build import build
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export

ROOT = Path(__file__).resolve().parent.parent
RECIPE, TRAINED = ROOT / "recipes" / "demo", ROOT / "build"
BASE = RECIPE / "base"
Sizes = tuple[int, int, int]  # top-k, step, verify size
DRAFT = WeightFormat(scheme="int8", kernels=NATIVE)  # what `make demo` builds drafts with


@dataclass(frozen=True)
class Pair:
    """How a pair is exported, and the plans that are compared, by a name.

    Each export is a model with its options; `parts` are the components that are built, as
    "number of the export/component". `drafter` is the method where the directory alone does not
    say it.
    """

    exports: tuple[tuple[Path, ExportOptions], ...]
    parts: tuple[str, ...]
    plans: dict[str, Sizes]
    drafter: str | None = None

    def missing(self) -> Path | None:
        """A checkpoint that must be trained first; None where all are there."""
        return next((model for model, _ in self.exports if not model.is_dir()), None)

    def on(self, base: Path) -> Pair:
        """The same drafts on other weights of the demo base, a GGUF file of it."""
        moved = []
        for model, how in self.exports:
            asked = how if how.base_model_dir is None else replace(how, base_model_dir=str(base))
            moved.append((base if model == BASE else model, asked))
        return replace(self, exports=tuple(moved))

    def make(
        self,
        work: Path,
        batch_size: int,
        name: str = "engines",
        options: BuildOptions | None = None,
    ) -> Path:
        """The engines, for `batch_size` sequences, in work/name; exports are made once. Without
        `options` the base is float32 and the draft int8."""
        for number, (model, how) in enumerate(self.exports):
            if not (work / f"onnx{number}").exists():
                export(str(model), work / f"onnx{number}", how)
        limits = Limits(max_batch_size=batch_size, max_kv_cache_capacity=1024)
        for part, of in zip(self.parts, (options, options or DRAFT), strict=False):
            build(work / f"onnx{part}", work / name, limits, options=of)
        return work / name


CHAIN, TREE, LARGE_TREE = (1, 3, 4), (4, 4, 16), (10, 6, 60)
LEVEL_BY_LEVEL = {
    "chain 1/3/4": CHAIN,
    "chain 1/4/5": (1, 4, 5),
    "tree 4/4/16": TREE,
    "tree 10/6/60": LARGE_TREE,
}
OF_BASE = ExportOptions(base_model_dir=str(BASE))
PLAIN = ((BASE, ExportOptions()),)


def trained(method: str, draft: Path, plans: dict[str, Sizes], component: str = "llm") -> Pair:
    """The base with a draft checkpoint of its own."""
    exports = ((BASE, ExportOptions(base_for=method)), (draft, OF_BASE))
    return Pair(exports, ("0/llm", f"1/{component}"), plans)


def block(method: str, draft: Path, plans: dict[str, Sizes]) -> Pair:
    """The base with a block draft."""
    base = ExportOptions(base_for=method, draft_dir=str(draft))
    return Pair(((BASE, base), (draft, OF_BASE)), ("0/llm", f"1/{method}_draft"), plans)


BLOCK = {"block 1/1/8": (1, 1, 8)}
BLOCK_AND_TREES = BLOCK | {"tree 4/1/16": (4, 1, 16), "tree 8/1/32": (8, 1, 32)}

PAIRS = {
    "eagle3": trained("eagle3", RECIPE / "draft", LEVEL_BY_LEVEL),
    "eagle1": trained("eagle1", TRAINED / "demo-eagle1", LEVEL_BY_LEVEL),
    "mtp": Pair(
        ((TRAINED / "demo-mtp" / "model", ExportOptions(base_for="mtp")),),
        ("0/llm", "0/mtp_draft"),
        {"chain 1/3/4": CHAIN, "chain 1/5/6": (1, 5, 6)},
    ),
    "dflash": block("dflash", RECIPE / "dflash_draft", BLOCK_AND_TREES),
    "jetspec": block("jetspec", TRAINED / "demo-jetspec", BLOCK_AND_TREES),
    "dspark": block("dspark", TRAINED / "demo-dspark", BLOCK),
    "medusa": trained(
        "medusa",
        TRAINED / "demo-medusa",
        {"chain 1/4/5": (1, 4, 5), "tree 4/4/16": TREE, "tree 10/4/60": (10, 4, 60)},
        "medusa_draft",
    ),
    "draft_model": Pair(
        (
            *PLAIN,
            (
                TRAINED / "demo-draft-model",
                ExportOptions(as_draft="draft_model", base_model_dir=str(BASE)),
            ),
        ),
        ("0/llm", "1/draft_model"),
        LEVEL_BY_LEVEL,
    ),
    "suffix": Pair(
        PLAIN, ("0/llm",), {"chain 1/8/9": (1, 8, 9), "tree 4/8/16": (4, 8, 16)}, "suffix"
    ),
    "ngram": Pair(PLAIN, ("0/llm",), {"chain 1/3/4": CHAIN}, "ngram"),
}
