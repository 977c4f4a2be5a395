"""Finds a user's drafter by its name, `package.module:Class`, and puts it behind its guard.

Knows the three forms that such a drafter may have. What each of them does stands in `user`,
`trtllm` and `guarded`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import cast

from edgespec.backends.base import PlanHints
from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import OptionError
from edgespec.runtime.drafters.attributes import CODE_FAILED, flag, limit, method
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.guard import TIME_BUDGET_S, Guard, said_of
from edgespec.runtime.drafters.guarded import GuardedDrafter
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.drafters.trtllm import PreparesDraftTokens, TrtLlmDrafter
from edgespec.runtime.drafters.user import ProposingDrafter, UserDrafter
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.text.tokenizer import Tokenizer

FORMS = (
    "Give it a method propose(context) that returns token ids (docs/own_drafter.md), TensorRT-LLM's"
    " prepare_draft_tokens(scheduled_requests, resource_manager), or all methods of"
    " edgespec.runtime.drafters.base.Drafter."
)
WHOLE = ("begin", "propose", "observe", "reset", "move", "snapshot", "restore", "close")


def is_own_drafter(name: str) -> bool:
    """Whether a name is that of a class in a module, and not of a method."""
    return ":" in name


def load_drafter(name: str) -> object:
    """An instance of `package.module:Class`, or the object of that name.

    The working directory is where modules are looked for first. Raises OptionError where there is
    no such module or class, or where it cannot be made.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        message = f"the drafter {name!r} is not written as package.module:Class"
        raise OptionError(message, "Write the module, a colon and the class in it.")
    module = imported(module_name)
    drafter: object = module
    try:
        for part in path.split("."):
            drafter = getattr(drafter, part)
    except AttributeError as error:
        message = f"the module {module_name} has no {path}"
        where = getattr(module, "__file__", None) or "memory"
        raise OptionError(message, f"It is read from {where}.") from error
    except CODE_FAILED as error:
        raise failed(module_name, error) from error
    if not isinstance(drafter, type):
        return drafter
    try:
        return drafter()
    except CODE_FAILED as error:
        message = f"{name} could not be made: {said_of(error)}"
        shown = f"python -c 'import {module_name}; {module_name}.{path}()'"
        remedy = f"It is made without arguments: mend the class; {shown} shows where it is raised."
        raise OptionError(message, remedy) from error


def imported(name: str) -> object:
    """A module by its name. Raises OptionError where it is not there or fails."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.split(".")[0] == error.name.split(".")[0]:
            message = f"there is no module {error.name}"
            remedy = f"Run it where the module is ({here} was looked at), or set PYTHONPATH."
            if name.endswith(".py"):
                remedy = f"Write the module without .py: {name.removesuffix('.py')}:Class."
            raise OptionError(message, remedy) from error
        raise failed(name, error) from error
    except CODE_FAILED as error:
        raise failed(name, error) from error


def failed(name: str, error: BaseException) -> OptionError:
    """The error for a module that cannot be imported."""
    message = f"the module {name} could not be imported: {said_of(error)}"
    return OptionError(message, "Mend it; python -c 'import MODULE' shows where it is raised.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions(DrafterOptions):
    """What is asked of the calls of a drafter of your own."""

    time_budget_ms: float | None = option(
        1000 * TIME_BUDGET_S,
        "Milliseconds that a call may take; beyond it the drafts of that step are lost, and the"
        " drafter pauses. Without it the request waits as long as the call takes.",
        low=0.1,
    )

    @property
    def time_budget_s(self) -> float | None:
        """The same in seconds."""
        return None if self.time_budget_ms is None else self.time_budget_ms / 1000


def needs_hidden_states(drafter: object) -> bool:
    """Whether a user's drafter asks for the base's aux hidden states. Raises OptionError."""
    return flag(drafter, "needs_hidden_states")


def guarded(
    drafter: object, base: EngineConfig, engine_dir: Path, time_budget_s: float | None
) -> tuple[Drafter, Guard, int | None]:
    """A user's drafter, of one of three forms, behind its guard, and the chain that it says it
    makes, None where it says nothing. Raises OptionError for an object of none of them."""
    if isinstance(drafter, type):
        message = f"the drafter is the class {drafter.__name__}, not an object of it"
        raise OptionError(message, f"Give {drafter.__name__}().")
    config, guard = base.component, Guard(type(drafter).__name__, time_budget_s)
    own: Drafter
    if all(method(drafter, name) for name in WHOLE):
        own = GuardedDrafter(cast(Drafter, drafter), guard, config.vocab_size)
    elif method(drafter, "prepare_draft_tokens"):
        end = next(iter(config.eos_token_ids), None)
        own = TrtLlmDrafter(cast(PreparesDraftTokens, drafter), guard, config.vocab_size, end)
    elif method(drafter, "propose"):
        open_tokenizer = cache(partial(Tokenizer.open, engine_dir))
        user = cast(UserDrafter, drafter)
        own = ProposingDrafter(user, guard, config.vocab_size, open_tokenizer)
    else:
        raise OptionError(f"a {type(drafter).__name__} is no drafter", FORMS)
    return own, guard, limit(drafter, "max_draft_len")


@dataclass(frozen=True, slots=True)
class UserLimits(TreeLimits):
    """Those of a user's drafter; `draft_len` is the chain that it says it makes."""

    draft_len: int | None = None

    def chosen_steps(self, top_k: int, verify_size: int | None, hints: PlanHints) -> int:
        """The drafter's own length where it names one and no size was given."""
        if self.draft_len is None or top_k != 1 or verify_size is not None:
            return TreeLimits.chosen_steps(self, top_k, verify_size, hints)
        return max(1, min(self.draft_len, self.max_verify_tree_size - 1))
