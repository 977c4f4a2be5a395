"""The tree of errors. Each says what happened, with the value, and how to fix it.

    EdgeSpecError                 exit 1
      CheckpointError             exit 3  a checkpoint is incomplete, damaged or contradicts itself
      UnsupportedModel            exit 3  recognized, and not something this version can do
      PairingError                exit 3  base and draft do not belong together
      OptionError                 exit 2  options of a command that contradict each other
      RequestError                exit 3  input.json or a request in it
      BundleError                 exit 3  an export or engine is damaged, or not what was asked for
      LimitError                  exit 3  a size beyond what was built or can exist
      ContractError               exit 1  a graph does not keep its contract: a fault of ours
      BuildError                  exit 1  an engine was built and is wrong, or could not be built
      EnvironmentProblem          exit 4  this machine cannot do it
        MissingDependency         exit 4  a package of an extra is not installed
        EngineMismatch            exit 4  the engine was built by another runtime or for another CPU
        OutputError               exit 4  a path cannot be written, or the disk is full

Knows nothing else of the project.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class EdgeSpecError(Exception):
    """Base of all errors meant for users: `what` happened, and the `remedy` (where none is given,
    the usual one)."""

    exit_code = 1
    usual_remedy = ""

    def __init__(self, what: str, remedy: str = "") -> None:
        remedy = remedy or self.usual_remedy
        super().__init__(f"{what}\n{remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class CheckpointError(EdgeSpecError):
    exit_code = 3
    usual_remedy = (
        "Check that config.json and weights belong together, or download the checkpoint again."
    )


class UnsupportedModel(EdgeSpecError):
    exit_code = 3
    usual_remedy = "Give another checkpoint; the README lists what this version takes."


class PairingError(EdgeSpecError):
    exit_code = 3


class OptionError(EdgeSpecError):
    exit_code = 2


class RequestError(EdgeSpecError):
    exit_code = 3


class BundleError(EdgeSpecError):
    exit_code = 3


class LimitError(EdgeSpecError):
    exit_code = 3


class ContractError(EdgeSpecError):
    exit_code = 1


class BuildError(EdgeSpecError):
    exit_code = 1


class EnvironmentProblem(EdgeSpecError):
    exit_code = 4


class MissingDependency(EnvironmentProblem):
    pass


class EngineMismatch(EnvironmentProblem):
    pass


class OutputError(EnvironmentProblem):
    pass


@contextmanager
def noted(problems: list[EdgeSpecError]) -> Iterator[None]:
    """Keep an error instead of raising it, where more can be told all the same."""
    try:
        yield
    except EdgeSpecError as error:
        problems.append(error)
