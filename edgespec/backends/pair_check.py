"""Refuses a base and a draft that do not belong together, with what their user can do about it.

Knows which of two engines is being built. The rules themselves stand in `edgespec.methods`.
"""

from __future__ import annotations

from collections.abc import Collection

from edgespec.artifacts.component import ComponentConfig
from edgespec.contract import Role
from edgespec.errors import PairingError, command
from edgespec.methods import METHODS, Method, Mismatch, mismatches

ELSEWHERE = "use another engine directory"
OTHER_DRAFT = f"Take a draft that was trained for this base, or {ELSEWHERE}."
UNFIT = ("vocabulary", "hidden size", "embedding", "head", "depth")  # no export can fix it


def check_pairing(base: ComponentConfig, draft: ComponentConfig, built: Role | None = None) -> None:
    """PairingError where a base and a draft do not belong together. `built` is the one that is
    being built beside the other; None where both are there."""
    for mismatch in mismatches(base.as_base(), draft.as_draft()):
        assert draft.method is not None
        raise PairingError(*explained(mismatch, METHODS[draft.method], built))


def explained(mismatch: Mismatch, method: Method, built: Role | None) -> tuple[str, str]:
    """The message of a mismatch and its remedy; each names another engine directory."""
    if mismatch.topic == "identity":
        return another_base(method, built)
    if mismatch.topic == "method":
        return mismatch.what, another_method(method, built)
    if mismatch.topic in UNFIT or mismatch.remedy is None:
        return mismatch.what, OTHER_DRAFT
    return mismatch.what, f"{mismatch.remedy}, or {ELSEWHERE}."


def target_of(there: Collection[Role], draft: ComponentConfig) -> Role | None:
    """Which of a directory's engines a draft is for: the base, or first the plain one where the
    draft reads nothing of its base. None where neither is there."""
    plain = not draft.reads_base and Role.LLM in there
    return Role.LLM if plain else Role.BASE if Role.BASE in there else None


def check_not_plain(there: Collection[Role], draft: ComponentConfig, built: Role | None) -> None:
    """PairingError where a draft stands beside a plain engine and no base: a plain one emits no
    hidden states. `there` are all engines, the one that is being built included."""
    assert draft.method is not None
    method = METHODS[draft.method]
    if Role.BASE in there or Role.LLM not in there or not method.reads_base:
        return
    export = command("export MODEL OUT", **method.export_params)
    if built is Role.LLM:
        message = f"this is a plain decoder, and {method.draft_title} is in the engine directory"
    else:
        message = f"{method.draft_title} has no base in this engine directory, only a plain decoder"
    remedy = f"Export the base with `{method.export_param}` ({export}) and build it here first"
    raise PairingError(f"{message}: it emits no hidden states", f"{remedy}, or {ELSEWHERE}.")


def another_base(method: Method, built: Role | None) -> tuple[str, str]:
    """The message and the remedy where the draft was exported for other weights.

    Each engine keeps the other one out, so it can be fixed here only where the base is to stay and
    the draft can be exported anew.
    """
    if method.weights_in == "base_checkpoint":
        name = method.draft_title.split(maxsplit=1)[-1]
        message = f"the {name} and the base were exported from different checkpoints"
        both = command("export MODEL OUT", **method.export_params)
        return message, f"Export both at once ({both}), and {ELSEWHERE}."
    if built in (Role.BASE, Role.LLM):
        message = (
            "the draft in this engine directory was exported for another base checkpoint than"
            " this one"
        )
        return message, f"{ELSEWHERE.capitalize()} for this base and a draft of its own."
    message = (
        "the draft was exported for another base checkpoint than the one in this engine directory"
    )
    return message, f"Export the draft again with `base_model_dir` naming the base, or {ELSEWHERE}."


def another_method(method: Method, built: Role | None) -> str:
    """The remedy where the base emits what another kind of draft reads."""
    export = command("export MODEL OUT", **method.export_params)
    again = f"xport the base again for that draft: {export}"
    if built is Role.BASE:
        elsewhere = ELSEWHERE.capitalize()
        return f"{elsewhere} for this base and its own draft, or e{again}."
    return f"E{again}, or {ELSEWHERE}."
