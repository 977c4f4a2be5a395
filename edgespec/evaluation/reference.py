"""The same prompts through transformers, one after the other: what an engine is compared with.

Knows torch and transformers. Code of a checkpoint is not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import CheckpointError, EnvironmentProblem, MissingDependency
from edgespec.progress import Progress


@dataclass(frozen=True)
class Reference:
    """The answers of transformers by the place of their prompt, and the seconds that they took."""

    wall_s: float
    token_ids: dict[int, list[int]] = field(default_factory=dict)


def load(path: Path) -> Any:
    """A checkpoint as a transformers model in float32. Raises CheckpointError, EnvironmentProblem
    and MissingDependency."""
    try:
        import torch
        from transformers import AutoConfig
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependency(
            "`hf_model_dir` needs torch and transformers, which are not installed.",
            "pip install edgespec[convert,torch]",
        ) from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        known: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        config = AutoConfig.from_pretrained(str(path), **known)
        model = class_of(config).from_pretrained(str(path), dtype=torch.float32, **known)
    except MemoryError as error:
        raise EnvironmentProblem(
            f"no memory for {path} in float32", "Leave `hf_model_dir` out."
        ) from error
    except Exception as error:  # whatever the library raises for a checkpoint that it cannot read
        message = f"transformers cannot load {path}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(
            message, "Give the checkpoint that the engines were made from."
        ) from error
    model.eval()
    return model


def class_of(config: Any) -> Any:
    """The class that makes a model of a configuration: of text alone, or with images."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    of_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if of_text else AutoModelForImageTextToText


def answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    output_len: int,
    stop_ids: Collection[int],
    stopping: Callable[[], bool],
    progress: Progress,
) -> Reference:
    """The greedy answers, up to `output_len` tokens or the first of `stop_ids`, which is part of
    them. Ends early once `stopping` says so."""
    import torch
    from transformers import GenerationConfig

    stops = sorted(stop_ids)
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        max_new_tokens=output_len,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
    )
    model.generation_config = config  # else its own defaults fill what this one leaves open
    answers: dict[int, list[int]] = {}
    began = time.perf_counter()
    for place, ids in enumerate(prompts):
        if stopping():
            break
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=torch.ones_like(given), generation_config=config
            )
        answers[place] = out[0, len(ids) :].tolist()
        progress.advance(1)
    return Reference(time.perf_counter() - began, answers)
