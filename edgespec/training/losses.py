"""What a step minimizes, token by token. Knows logits and weights, and no drafts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def token_losses(kind: str, logits: Tensor, base_logits: Tensor, tokens: Tensor) -> Tensor:
    """The loss [N] of draft logits [N, V] against the base's [N, V] over the same vocabulary, or
    against the text's own tokens [N].

    kl: the cross-entropy with the base's distribution, whose gradient is that of the divergence.
    ce: that with the text. lk: minus the log of the probability that a draft is accepted, the sum
    of min(p, q) (arXiv 2602.23881).
    """
    if kind == "ce":
        return F.cross_entropy(logits, tokens, reduction="none")
    theirs = base_logits.softmax(-1)
    if kind == "kl":
        return -(theirs * logits.log_softmax(-1)).sum(-1)
    accepted = torch.minimum(theirs, logits.softmax(-1)).sum(-1)
    return -accepted.clamp_min(torch.finfo(accepted.dtype).tiny).log()


def dpace_weights(likelihoods: Tensor, alpha: float, counted: Tensor) -> Tensor:
    """D-PACE's weight of each slot [..., D] (arXiv 2605.18810, eq. 7 to 9): the sum, over the slots
    from it on, of the chance that all up to there are accepted.

    `likelihoods` are what the draft gives the text's tokens, smoothed towards 1 by `alpha`; slots
    that are not `counted` neither stop a block nor add to it.
    """
    smoothed = (alpha + (1 - alpha) * likelihoods.detach()).masked_fill(~counted, 1.0)
    reached = smoothed.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1)
