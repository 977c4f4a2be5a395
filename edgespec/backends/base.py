"""What a backend is, and what a runner of its engines offers.

Knows the contract, the options of a build, and what a build may ask of an engine. Knows no engine
library: each backend is a folder of its own and a row of `registry.BACKENDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from numpy.typing import NDArray

from edgespec.backends.call import Call, Floats, Ids, Result
from edgespec.backends.engine_config import EngineConfig, EngineWeights
from edgespec.backends.engine_dir import STEMS, variant_name
from edgespec.backends.findings import Finding, not_run
from edgespec.backends.machine import machine_bytes
from edgespec.backends.onnx_dir import AnyOnnxDir, OnnxDir
from edgespec.config import VisionConfig
from edgespec.contract import DECODERS, GraphContract, Limits, Role
from edgespec.vision.grid import Arrays

# ---- what runs an engine


class Table(Protocol):
    """An embedding: the rows of tokens."""

    def rows(self, tokens: Ids) -> Floats:
        """[S] or [B, S] ids -> [..., H]."""


class LaneRows(ABC):
    """A copy of what a lane holds of a sequence's first tokens, as the backend keeps it.

    Opaque to everybody else: it may live on a device. `len` counts its tokens.
    """

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""

    @property
    @abstractmethod
    def can_crop(self) -> bool:
        """Whether it has shorter prefixes: keys and values have, a recurrent state has none."""

    @abstractmethod
    def prefix(self, count: int) -> LaneRows:
        """The rows of the first `count` tokens; of all tokens, unless it can be cropped."""


class Runner(Protocol):
    """An open engine with its own zero-filled KV cache."""

    contract: GraphContract
    capacity: int  # slots of a lane
    lanes: int  # sequences that it can hold
    prefill_chunk: int  # rows of a prompt, or of a block's context, that one call reads at most
    max_rows: int  # rows of a call that asks for the logits of all of them, at most
    table: Table | None  # the embedding, where the engine's lm_head is it
    engine_s: float  # seconds spent inside the engine so far, by the backend's own clock

    def run(self, call: Call) -> list[Result]:
        """Run one call, a result for each lane; its KV rows are in the cache afterwards.
        EnvironmentProblem where the engine fails."""

    def keep_rows(self, lane: int, slots: Ids, start: int) -> None:
        """Commit rows that stand behind the first `start` ones: copy the KV rows of `slots`
        (ascending, each >= its target) to start, start+1, ... in every layer. Where layers are
        recurrent, the rows are one path of the last call's, and each call but the first continues
        what was committed.
        """

    def read_rows(self, lane: int, count: int) -> LaneRows:
        """A copy of the first `count` rows of a lane; of recurrent layers, of all that it has
        committed."""

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with such a copy, of a runner of this engine; other rows are dropped."""

    def free(self, lane: int) -> None:
        """Drop all rows of a lane: what a lane holds, all lanes pay for."""

    def zero(self, lane: int) -> None:
        """Drop all rows of a lane and make them zeros: they may hold NaN or Inf, and kernels may
        multiply before they mask."""

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` KV rows of one lane to the first of another, whose other rows are
        dropped."""

    def close(self) -> None:
        """Release the engine; closing twice is harmless."""


class SeveralCapacities(ABC):
    """A runner of the engines of one role for several capacities, in tokens of a sequence: none
    below `least` tokens is chosen."""

    capacities: tuple[int, ...]
    least: int

    @abstractmethod
    def reserve(self, lane: int, tokens: int) -> None:
        """A lane will come to so many tokens, or to the largest capacity. EnvironmentProblem where
        the engine for it cannot be opened."""


class Interrupted(Exception):
    """A call was ended before its end: see `Interruptible`."""


class Interruptible(ABC):
    """A runner whose calls another thread can end."""

    @abstractmethod
    def interruptible(self) -> AbstractContextManager[Callable[[], None]]:
        """Inside, what it gives ends the call under way and those that follow, which raise
        Interrupted: rows that they wrote are behind the committed ones. Outside it does nothing."""


class PacksRows(ABC):
    """A runner whose copies of a lane's rows can be kept in a file."""

    @abstractmethod
    def pack(self, rows: LaneRows) -> dict[str, NDArray[Any]]:
        """The arrays of such a copy, by name."""

    @abstractmethod
    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> LaneRows:
        """The copy that `pack` of a runner of this engine took apart."""


class EncoderRunner(Protocol):
    """An open image encoder."""

    def run(self, feeds: Arrays) -> Arrays:
        """The outputs of `vision_contract` by name for its inputs by name, those of one image.
        EnvironmentProblem where the engine fails."""

    def close(self) -> None:
        """Release the engine; closing twice is harmless."""


class PairDevice:
    """What the engines of a pair share where they run: on a GPU its stream, and the memory in which
    they work one after the other. A backend that has such a thing subclasses it.

    An open runner keeps it alive.
    """

    def close(self) -> None:
        """Say that no further engine will be opened with it; closing twice is harmless."""


# ---- what a build may ask of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingMargin:
    """How the margin is measured within which one row and many rows may choose another token.

    The golden prompt is run at once and row by row, with embeddings moved by `noise` (relative, a
    standard deviation). The largest difference of two logits, `times` over, is the margin, in nats
    and at least `min_nats`. `unmeasured_nats` is taken where there are no golden outputs.
    """

    times: float
    min_nats: float
    noise: float
    unmeasured_nats: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySpec:
    """What may be asked of an engine's outputs, by the weights and kernels that it has.

    `tolerance` is the largest difference from the golden outputs, relative to their largest value.
    With `min_cosine` the direction of each golden output is compared instead, and `tolerance` holds
    between a batch and a sequence alone; with `max_scale` its size too: how far that may be from
    the golden one, which no direction shows. `margin` None: rows do not depend on one another.
    `bitwise`: a row should have the same bits in every call; where that is proven there is no
    margin.
    """

    tolerance: float
    min_cosine: float | None = None
    max_scale: float | None = None
    margin: RoundingMargin | None = None
    bitwise: bool = False


# ---- a backend


OptionValue = str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOption:
    """An option of `edgespec build` that is a backend's own.

    `name` is its key in `Backend.parse_options`, such as weight_block. One with a default of True
    or False is a switch with a --no- form; all others take a text, one of `choices` where there are
    any.
    """

    name: str
    help: str
    choices: tuple[str, ...] = ()
    default: OptionValue = None
    metavar: str | None = None  # what a text is, in --help


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a backend makes of its options; it subclasses this."""


NO_OPTIONS = BuildOptions()


def noop(*values: object) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Listeners to a build: `start` gets the bytes of the engine, or the steps of its build,
    `prove` the number of passes by which it is then compared with the golden outputs, and `advance`
    each part of either. `warn` gets what the user should know before the work begins."""

    start: Callable[[int], None] = noop
    advance: Callable[[int], None] = noop
    prove: Callable[[int], None] = noop
    warn: Callable[[str], None] = noop


SILENT = Listeners()


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An engine whose files stand in the staging directory; its first file is `engine`.

    `weights` lack the rounding margin, which is measured. Where they have an `embedding`, the
    engine needs no embedding file beside it. `contract` is a decoder's; an encoder's follows from
    its config. `settings` is what the backend itself has to know of it later, as JSON.
    `fingerprint`: what it is bound to, where that is not this machine. `unproven` says why it
    cannot be run here: it is then kept without a proof.
    """

    engine: Path
    weights: EngineWeights
    accuracy: AccuracySpec
    contract: GraphContract | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] | None = None
    unproven: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """A lowered graph that was written for another tool: what to do with it, a line each, and what
    is known of its engine before there is one, as in `Staged`."""

    lines: tuple[str, ...]
    weights: EngineWeights
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What a user of the backend can do about an engine that is not what was exported.

    `mismatch` ends "Allowed is 1e-04."; `too_coarse` follows on the cosine that was asked for.
    """

    mismatch: str
    too_coarse: str


DEFAULT_ROW_COST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHints:
    """How much to draft on the backend's devices where the user gives no sizes.

    `steps` tokens in a chain of single drafts; `block_nodes` nodes of a block draft's chain, which
    costs one draft pass however long it is.
    """

    steps: int
    block_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes that a sequence takes beside the weights: per token, and whatever its length."""

    kv_bytes_per_token: int
    state_bytes: int = 0


class Backend(ABC):
    """Builds and runs engines with one engine library.

    `name` stands in manifests and after --backend, `title` in texts. `suffixes` end the names of
    the engine's files, the one that is opened first. `float32_tolerance` is how far its kernels may
    compute from one another where nothing is rounded on purpose, relative to the largest value.
    `roles` are those that it builds and runs engines of.
    `several_capacities`: a step costs by the capacity of its engine, so that there may be an engine
    for each of several; their files may be renamed.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    remedies: ClassVar[Remedies]
    plan_hints: ClassVar[PlanHints]
    float32_tolerance: ClassVar[float]
    roles: ClassVar[tuple[Role, ...]] = DECODERS
    several_capacities: ClassVar[bool] = False
    options: ClassVar[tuple[BuildOption, ...]] = ()

    def parse_options(self, values: Mapping[str, OptionValue]) -> BuildOptions:
        """The options of a build, by `BuildOption.name`; those that are missing have their
        defaults. OptionError, with the remedy, where they contradict each other."""
        assert not values
        return NO_OPTIONS

    @abstractmethod
    def stage(
        self,
        onnx: AnyOnnxDir,
        limits: Limits,
        options: BuildOptions,
        staging: Path,
        progress: Listeners,
    ) -> Staged:
        """Write the engine's own files to `staging`. BuildError where it cannot be built."""

    def check(self, onnx: OnnxDir, limits: Limits, options: BuildOptions) -> tuple[str, ...]:
        """Warnings about what `stage` would make for each capacity, before its work begins; raises
        what can be known then, such as memory that does not do."""
        del onnx, limits, options
        return ()

    def plan(self, onnx: AnyOnnxDir, limits: Limits, options: BuildOptions) -> tuple[str, ...]:
        """What `stage` would make for each capacity, a line each, without making it; raises what it
        would raise before its work begins."""
        del onnx, limits, options
        return ()

    def emit_dir(self, options: BuildOptions) -> Path | None:
        """Where the options want the lowered graph instead of an engine; None: they do not."""
        del options
        return None

    def emit(
        self, onnx: OnnxDir, limits: Limits, options: BuildOptions, directory: Path
    ) -> Emission:
        """Write the lowered graph with its weights to `directory`, and the script `emitted.SCRIPT`
        that builds it. Asked where `emit_dir` names one."""
        raise NotImplementedError

    def imported(self, engine: Path, config: EngineConfig) -> Staged:
        """An engine file that another tool built from what `emit` wrote, as one of this machine;
        `config` is what was known before. EnvironmentProblem where it cannot be opened here."""
        raise NotImplementedError

    @abstractmethod
    def open_staged(self, staged: Staged, capacity: int, lanes: int) -> Runner:
        """A runner of a staged engine with room for so many tokens and sequences."""

    def open_device(self) -> PairDevice:
        """What the engines that are opened with it will share. EnvironmentProblem where they cannot
        run."""
        return PairDevice()

    @abstractmethod
    def open(self, engine_dir: Path, config: EngineConfig, device: PairDevice) -> Runner:
        """A runner of a finished engine whose fingerprint was checked, on a device that
        `open_device` gave; `config` is that of one capacity. EnvironmentProblem where it cannot be
        opened."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What an engine is bound to on this machine, as JSON."""

    @abstractmethod
    def check_fingerprint(self, stored: Mapping[str, Any], name: str) -> None:
        """EngineMismatch where an engine, called `name` in errors, was built for another machine.
        Needs no engine library."""

    @abstractmethod
    def memory(self, config: EngineConfig) -> EngineMemory:
        """The bytes that a sequence takes beside the weights. Needs no engine library."""

    def total_memory_bytes(self) -> int | None:
        """The memory that engines and their caches share; None where nobody knows. This machine's,
        unless the backend runs elsewhere."""
        return machine_bytes()

    def row_cost(self, config: EngineConfig) -> float:
        """What each row of a base pass takes beside the first one, in passes of one row: by how
        much drafts must gain. About what it is on the backend's devices; never measured here, so
        that the same request gives the same drafts."""
        del config
        return DEFAULT_ROW_COST

    def engine_path(self, directory: Path, role: Role, variant: int | None = None) -> Path:
        """The path of the file by which an engine is opened; of that of a smaller capacity where
        `variant` names one."""
        name = f"{STEMS[role]}{self.suffixes[0]}"
        return directory / (name if variant is None else variant_name(name, variant))

    def open_capacities(
        self,
        engine_dir: Path,
        config: EngineConfig,
        device: PairDevice,
        closing: Callable[[], None],
    ) -> Runner:
        """A runner of engines for several capacities, also a `SeveralCapacities`, which calls
        `closing` at its end; asked of a backend with `several_capacities` alone."""
        raise NotImplementedError

    def notes(self, config: EngineConfig) -> tuple[str, ...]:
        """What the user who builds this engine should know of its memory and its kernels."""
        del config
        return ()

    def better_weights(self, weights: EngineWeights) -> str | None:
        """The options of a build whose weights are next closer to the model; None where it has
        none."""
        del weights
        return None

    def open_encoder(
        self, path: Path, config: VisionConfig, settings: Mapping[str, Any]
    ) -> EncoderRunner:
        """A runner of the engine `path` of an image encoder. EnvironmentProblem where it cannot be
        opened."""
        raise NotImplementedError

    # ---- what `edgespec verify` asks of a finished engine

    def accuracy(self, config: EngineConfig) -> AccuracySpec | None:
        """What may be asked of the outputs of a finished engine; None where the backend does not
        say it of weights that are rounded."""
        if config.weights.is_quantized:
            return None
        return AccuracySpec(tolerance=self.float32_tolerance)

    def self_test(self, runner: Runner) -> list[Finding]:
        """Checks of an open engine's memory that only the backend can make, such as where its calls
        write. What the lanes held is lost."""
        del runner
        return [not_run("cache", f"{self.title} has no check of it")]

    def kernels(self, engine_dir: Path, config: EngineConfig, runner: Runner) -> dict[str, int]:
        """What an open engine runs, by name, and how often in a call; empty where nobody knows."""
        del engine_dir, config, runner
        return {}

    def device(self) -> dict[str, Any]:
        """The device and the libraries on this machine, as JSON."""
        return self.fingerprint()

    def device_memory(self, runner: Runner) -> dict[str, int]:
        """Bytes that an open engine takes where it runs, by what they are for; empty where nobody
        knows."""
        del runner
        return {}
