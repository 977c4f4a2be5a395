"""What ModelOpt makes for tests, all in one process: `python -m tests.modelopt_made BASE OUT`.

Importing ModelOpt takes longer than what is done with it here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import modelopt_drafts, modelopt_engine, modelopt_exports, modelopt_training


def main(base: Path, out: Path) -> None:
    modelopt_exports.main(out / "exports")
    modelopt_drafts.main(base, out / "drafts")
    modelopt_training.main(base, out / "drafts")
    modelopt_engine.main(out / "engine")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
