"""A minimal loop of draft, verify and commit on torch modules, to measure a newly trained draft.

Knows only this loop. It has no cache, each pass reads the complete sequence: it is slow, but
independent of the engines whose acceptance it predicts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

# ids -> aux hidden states [1, n, F], logits [n, vocab]
States = Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]]
# aux hidden states of ids, ids, pending token -> drafted tokens
Drafts = Callable[[torch.Tensor, list[int], int], list[int]]


@torch.no_grad()
def decode(
    states: States, drafts: Drafts, prompt: list[int], stop: list[int], new: int
) -> tuple[list[int], list[int]]:
    """Generates greedily with drafts, up to `new` tokens or a stop token.

    Returns the generated ids and the number of accepted drafts in each step.
    """
    ids, accepted = list(prompt), []
    features, logits = states(ids)
    pending = int(logits[-1].argmax())
    while pending not in stop and len(ids) + 1 - len(prompt) < new:
        drafted = drafts(features, ids, pending)
        features, logits = states([*ids, pending, *drafted])
        says = logits[len(ids) :].argmax(-1).tolist()
        right = next((i for i, token in enumerate(drafted) if token != says[i]), len(drafted))
        last = next((i for i in range(right) if says[i] in stop), right)
        accepted.append(min(right, last + 1))
        ids += [pending, *says[:last]]
        pending, features = says[last], features[:, : len(ids)]
    return [*ids[len(prompt) :], pending], accepted


def measure(
    base: PreTrainedModel, states: States, drafts: Drafts, prompts: list[list[int]], new: int
) -> dict:
    """Returns acceptance statistics pooled over prompts.

    Each output is compared with the base's own greedy output.
    """
    end, counts, tokens, differing = base.generation_config.eos_token_id, [], 0, 0
    for prompt in prompts:
        answer, accepted = decode(
            states, drafts, prompt, [end] if isinstance(end, int) else end, new
        )
        plain = base.generate(torch.tensor([prompt]), max_new_tokens=len(answer), do_sample=False)[
            0
        ].tolist()
        differing += plain[len(prompt) :] != answer
        counts += accepted
        tokens += len(answer) - 1  # the first one is the prefill's
    taken = np.array(counts)
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "steps": len(counts),
        "acceptance_length": round(tokens / len(counts), 3) if counts else None,
        "per_position": [
            round(float((taken >= k).mean()), 3) for k in range(1, max(counts, default=0) + 1)
        ],
        "answers_that_differ": differing,
    }
