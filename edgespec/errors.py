"""The tree of errors. Each says what happened, with the value, and how to fix it.

    EdgeSpecError                 exit 1
      CheckpointError             exit 3  a checkpoint is incomplete, damaged or inconsistent
      UnsupportedModel            exit 3  a known format that this version does not support
      PairingError                exit 3  base and draft do not belong together
      OptionError                 exit 2  options of a command that contradict each other
      RequestError                exit 3  input.json or a request in it
      BundleError                 exit 3  an export or engine is damaged, or not the requested one
      OverwriteError              exit 3  output would go over what is read, or into a model
      LimitError                  exit 3  a size beyond the limits of the engine or the model
      ContractError               exit 1  a graph breaks its contract: a bug in edgespec
      BuildError                  exit 1  an engine could not be built, or is wrong
        GoldenMismatch            exit 3  graph, weights and golden outputs do not belong together
      EngineClosed                exit 1  the engine was closed before or while it was asked
      QueueFull                   exit 1  as many requests wait for the engine as may
      InternalError               exit 1  a bug in edgespec
      EnvironmentProblem          exit 4  this machine cannot do it
        MissingDependency         exit 4  a package of an extra is not installed
        EngineMismatch            exit 4  the engine was built by another runtime or for another CPU
        OutputError               exit 4  a path cannot be written, or the disk is full

A message names a parameter in backticks, by its neutral name: `max_kv_cache_capacity`. Each surface
has a table of how its users type it: the command line, a file, Python, a chat.

Knows nothing else of the project.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARAM = re.compile(r"`([a-z][A-Za-z0-9_]*)((?:\[[0-9]+\])?)`((?: to)? [0-9]+)?")
# By parameter: its other name, or what makes one of it and of the number behind it, as in " to 4"
Spellings = Mapping[str, str | Callable[[str], str]]


class EdgeSpecError(Exception):
    """The base of all errors for users: `what` happened, and the `remedy`.

    `param` is the parameter at fault: as given, else the first that `what` names. Without a remedy
    the class's `usual_remedy` is used.
    """

    exit_code = 1
    usual_remedy = ""

    def __init__(self, what: str, remedy: str = "", param: str | None = None) -> None:
        remedy = remedy or self.usual_remedy
        super().__init__(f"{what}\n{remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy
        named = PARAM.search(what)
        self.param = param or (named[1] if named else None)

    def __reduce__(self) -> tuple[Callable[..., EdgeSpecError], tuple[str, str, str | None]]:
        """What `pickle` and `copy` make it anew from: its parts and not the whole text."""
        return type(self), (self.what, self.remedy, self.param)

    def spelled(self, spellings: Spellings) -> EdgeSpecError:
        """The error with parameters as users of a surface know them."""
        what, remedy = spelled(self.what, spellings), spelled(self.remedy, spellings)
        return type(self)(what, remedy, self.param)


class CheckpointError(EdgeSpecError):
    """A checkpoint is incomplete, damaged or inconsistent."""

    exit_code = 3
    usual_remedy = (
        "Check that config.json and weights belong together, or download the checkpoint again."
    )


class UnsupportedModel(EdgeSpecError):
    """A checkpoint or option has a known format that this version does not support."""

    exit_code = 3
    usual_remedy = "Give another checkpoint; the README lists the supported models."


class PairingError(EdgeSpecError):
    """A base and a draft do not belong together."""

    exit_code = 3


class OptionError(EdgeSpecError):
    """Flags that contradict each other or name a wrong value."""

    exit_code = 2


class RequestError(EdgeSpecError):
    """An input file or a request in it is invalid."""

    exit_code = 3


class BundleError(EdgeSpecError):
    """An export or engine directory is damaged, or not the requested one."""

    exit_code = 3


class OverwriteError(EdgeSpecError):
    """Output would go over what is read, or into the directory of a model."""

    exit_code = 3


class LimitError(EdgeSpecError):
    """A size is beyond the limits of the engine or the model."""

    exit_code = 3


class ContractError(EdgeSpecError):
    """A graph breaks its contract: a bug in edgespec."""

    exit_code = 1


class BuildError(EdgeSpecError):
    """An engine or a quantized checkpoint could not be built, or is wrong."""

    exit_code = 1


class GoldenMismatch(BuildError):
    """An engine does not reproduce the golden outputs of its export."""

    exit_code = 3


class EngineClosed(EdgeSpecError):
    """A request to an engine that is closed, or that was closed before the request ended."""

    exit_code = 1
    usual_remedy = "Open it again with edgespec.load, and keep it open while requests run."


class QueueFull(EdgeSpecError):
    """As many requests wait for an engine as may."""

    exit_code = 1
    usual_remedy = "Ask again once others have ended, or open it with a larger `max_queue`."


class InternalError(EdgeSpecError):
    """A bug in edgespec; `__cause__` is the error as it was raised."""

    exit_code = 1
    usual_remedy = "This is a bug in edgespec: please report it with the traceback."


class EnvironmentProblem(EdgeSpecError):
    """This machine cannot run the command."""

    exit_code = 4


class MissingDependency(EnvironmentProblem):
    """A package of an extra is not installed."""


class EngineMismatch(EnvironmentProblem):
    """The engine was built by another runtime or for another CPU."""


class OutputError(EnvironmentProblem):
    """A path cannot be written, or the disk is full."""


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: 1 layer, 2 layers; `plural` is what several add."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def spelled(text: str, spellings: Spellings) -> str:
    """A text with the parameters of a table spelled as it says; others stay as they are."""

    def one(match: re.Match[str]) -> str:
        spelling, index, number = spellings.get(match[1]), match[2], match[3] or ""
        if spelling is None:
            return match[0]
        return spelling + index + number if isinstance(spelling, str) else spelling(number)

    return PARAM.sub(one, text)


@contextmanager
def in_terms_of(spellings: Spellings) -> Iterator[None]:
    """Spells the parameters that an error of the block names."""
    try:
        yield
    except EdgeSpecError as error:
        raise error.spelled(spellings) from error


def flag_of(param: str) -> str:
    """A parameter as a flag of the command line."""
    return f"--{param.replace('_', '-')}"


def command(*words: object, **params: object) -> str:
    """A command of the shell, for remedies: its words, then flags with values; True is a switch."""
    values = {key: "" if value is True else f" {value}" for key, value in params.items()}
    flags = [flag_of(key) + value for key, value in values.items()]
    return " ".join(["edgespec", *map(str, words), *flags])


@contextmanager
def noted(problems: list[EdgeSpecError]) -> Iterator[None]:
    """Appends an error of the block to `problems` instead of raising it."""
    try:
        yield
    except EdgeSpecError as error:
        problems.append(error)
