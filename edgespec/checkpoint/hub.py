"""Downloads from the Hugging Face hub into its own cache, which keeps each file that is complete.

Knows names, errors and progress of downloads. Knows nothing of what is in a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from edgespec.checkpoint.gguf.repository import (
    BEGINNING_BYTES,
    choices,
    chosen,
    encoder_of,
    form_of_beginning,
    models_of,
)
from edgespec.checkpoint.source import reading
from edgespec.errors import CheckpointError, OutputError
from edgespec.families.base import GgufForm
from edgespec.progress import Progress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\w[\w./ -]*)?")  # with a model in GGUF
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
PICKLE_PATTERNS = ("*.bin", "*_lm_head.pt")  # heads over a hidden state: no optimizer states
POLL_S = 0.1
STOP_S = 5.0  # how long an interrupted download may take to end
KEPT = "Files that are complete are kept."
NO_DIRECTORY = "If this is a directory, it does not exist."


def is_repo_id(name: str) -> bool:
    """Whether a text can be the name of a hub repository: `name` or `owner/name`, with `:Q4_K_M` or
    `:file.gguf` for one of its models in GGUF."""
    return REPO_ID.fullmatch(name) is not None


def download(name: str, *, allow_pickle: bool = False, progress: Progress | None = None) -> Path:
    """Returns the local directory of a repository's newest commit, or of a name such as
    `owner/repo:Q4_K_M` the GGUF file, of several the first; only what is missing is fetched.

    With a `progress` the bytes are reported to it, and the room on the disk is checked first. The
    hub's cache is used as it is where the hub cannot be reached. Raises CheckpointError for a name
    that is not there, gated or not to be reached, OutputError for a full disk, and before the
    weights are fetched UnsupportedModel for a GGUF file of another architecture.
    """
    if not is_repo_id(name):
        raise CheckpointError(
            f"there is no directory {name!r}.", "Pass a directory or a Hugging Face repository."
        )
    logger.info("no directory %s: asking the Hugging Face hub", name)
    repo_id, _, wanted = name.partition(":")
    try:
        if wanted:
            there = list_files(repo_id)
            files = chosen(repo_id, there, wanted)
            form, encoder = look_at_header(repo_id, files[0]), encoder_of(there, files[0])
            if encoder and form.encoder:
                return fetch(repo_id, (*files, encoder), progress) / files[0]
            if encoder:
                logger.warning(
                    "%s: the text part alone runs: this version reads no image encoder (%s) of the"
                    " architecture %s",
                    *(name, encoder, form.architecture),
                )
            return fetch(repo_id, files, progress) / files[0]
        directory = fetch(
            repo_id, (*PATTERNS, *(PICKLE_PATTERNS if allow_pickle else ())), progress
        )
        weights = (directory.glob(pattern) for pattern in ("*.safetensors", *PICKLE_PATTERNS))
        if not any(map(any, weights)) and (models := models_of(list_files(repo_id))):
            raise CheckpointError(
                f"{repo_id} has its weights in GGUF files.", choices(repo_id, models)
            )
    except download_errors() as error:
        raise explained(repo_id, error) from error
    return directory


def fetch(repo_id: str, patterns: Iterable[str], progress: Progress | None) -> Path:
    """The directory of a repository's files of these names. Raises what the library raises."""
    from huggingface_hub import snapshot_download

    wanted = list(patterns)
    if progress is None:
        return Path(snapshot_download(repo_id, allow_patterns=wanted))
    check_room(repo_id, missing_bytes(repo_id, wanted))
    stop = threading.Event()
    bars = reporting_bars(progress, stop)
    return Path(
        interruptible(
            lambda: snapshot_download(repo_id, allow_patterns=wanted, tqdm_class=bars), stop
        )
    )


# Models in GGUF


def list_files(repo_id: str) -> list[str]:
    """The names of a repository's files; those in the cache where the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        files = HfApi().list_repo_files(repo_id)
    except download_errors() as error:
        if isinstance(error, RepositoryNotFoundError):
            raise
        cache = Path(snapshot_download(repo_id, local_files_only=True))
        files = [path.relative_to(cache).as_posix() for path in cache.rglob("*")]
    return files


def look_at_header(repo_id: str, file: str) -> GgufForm:
    """How the model in a file is written, by its first bytes, before the rest is fetched. Raises
    UnsupportedModel or CheckpointError where they are those of a model that cannot be read."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    if isinstance(here := try_to_load_from_cache(repo_id, file), str):
        with reading(Path(here)), Path(here).open("rb") as stored:
            return form_of_beginning(stored.read(BEGINNING_BYTES), f"{repo_id}/{file}")
    utils = hub_utils()
    headers = utils.build_hf_headers() | {"range": f"bytes=0-{BEGINNING_BYTES - 1}"}
    stream = getattr(utils, "http_stream_backoff", None)  # from 1.0 on; before, requests streams
    ask = stream or partial(utils.http_backoff, stream=True)
    data = bytearray()
    with ask("GET", hf_hub_url(repo_id, file), headers=headers) as answer:
        utils.hf_raise_for_status(answer)
        # A mirror may know no ranges, and send the whole file
        for chunk in answer.iter_bytes() if stream else answer.iter_content(2**16):
            data += chunk
            if len(data) >= BEGINNING_BYTES:
                break
    return form_of_beginning(bytes(data[:BEGINNING_BYTES]), f"{repo_id}/{file}")


def download_errors() -> tuple[type[Exception], ...]:
    """What a download raises: errors of files and names, and those of the library's HTTP client.
    Each major version has another client, and derives its own error from that client's."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__))


# What went wrong


def explained(repo_id: str, error: Exception) -> CheckpointError | OutputError:
    """The error of a failed download, with the remedy that its cause asks for."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    failed = f"could not download {repo_id!r} from the Hugging Face hub"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{failed}: {error.strerror}",
            f"Free some space in {constants.HF_HUB_CACHE}, or set HF_HOME to another disk. {KEPT}",
        )
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError as well
        return CheckpointError(
            f"{failed}: the repository is gated",
            f"Accept its terms at {constants.ENDPOINT}/{repo_id}, then log in with `hf auth login`"
            " or set HF_TOKEN.",
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{failed}: there is no such repository, or it is private",
            f"{NO_DIRECTORY} Otherwise check the name, or log in with `hf auth login`.",
        )
    if isinstance(error, OfflineModeIsEnabled) or (
        isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE
    ):
        return CheckpointError(
            f"{failed}: HF_HUB_OFFLINE is set, and the hub's cache does not hold all of it",
            f"{NO_DIRECTORY} Otherwise unset HF_HUB_OFFLINE and run again.",
        )
    if isinstance(error, LocalEntryNotFoundError):
        return CheckpointError(
            f"{failed}: the hub cannot be reached ({reason(error.__cause__ or error)})",
            f"{NO_DIRECTORY} Otherwise check the network and run again. {KEPT}",
        )
    return CheckpointError(
        f"{failed}: {reason(error)}",
        f"{NO_DIRECTORY} Otherwise check the name, the network and, for a gated repository, `hf"
        " auth login`.",
    )


def reason(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# Progress


def missing_bytes(repo_id: str, patterns: Iterable[str]) -> int:
    """The bytes of a repository's files that the hub's cache lacks; 0 where the hub does not
    answer, which the download itself will report."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        info = HfApi().model_info(repo_id, files_metadata=True)
    except download_errors() as error:
        logger.info("%s: sizes are not known (%s)", repo_id, error)
        return 0
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = hub_utils().filter_repo_objects(sizes, allow_patterns=list(patterns))
    return sum(
        sizes[name]
        for name in wanted
        if not isinstance(try_to_load_from_cache(repo_id, name, revision=info.sha), str)
    )


def check_room(repo_id: str, size_bytes: int) -> None:
    """Raises OutputError where the disk of the hub's cache has less room than a download takes."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < size_bytes:
        raise OutputError(
            f"{repo_id} takes {size_bytes / 1e6:.1f} MB, and {there} has {free / 1e6:.1f} MB free",
            f"Free some space in {cache}, or set HF_HOME to another disk.",
        )


def hub_utils() -> Any:
    """The library's module of helpers, whose names carry no types."""
    return import_module("huggingface_hub.utils")


class DownloadStopped(Exception):
    """Raised in the threads of a download that was interrupted."""


def reporting_bars(progress: Progress, stop: threading.Event) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes to `progress`. Its bars raise Stopped once
    `stop` is set, which is how the threads of a download end."""
    tqdm: Any = hub_utils().tqdm
    lock = threading.Lock()
    bars: list[Any] = []
    reported = {"total": 0, "done": 0}

    class Reporting(tqdm):  # type: ignore[misc]
        """A bar of the library; those of bytes are reported, the one that is furthest."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **(kwargs | {"disable": True}))
            if self.counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise DownloadStopped
            self.n += n or 0
            with lock:
                report()

    def report() -> None:
        """Reports the bytes of the library's bars, of which one may count what the other does."""
        total = max((int(bar.total or 0) for bar in bars), default=0)
        done = max((int(bar.n) for bar in bars), default=0)
        if total != reported["total"]:
            progress.start("download", total)
            reported.update(total=total, done=0)
        if done > reported["done"]:
            progress.advance(done - reported["done"])
            reported["done"] = done

    return Reporting


def interruptible(call: Callable[[], Result], stop: threading.Event) -> Result:
    """Returns what `call` returns, from a thread of its own, so that an interrupt is not kept
    waiting for files under way. Raises what `call` raises."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=work, name="download", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_S)
    except BaseException:
        stop.set()
        abort_transfers()
        thread.join(STOP_S)
        raise
    if errors:
        raise errors[0]
    return results[0]


def abort_transfers() -> None:
    """Ends transfers in the library's native code, which reports no bytes for a while; versions
    without such code have nothing to end."""
    with suppress(ImportError):
        native = import_module("huggingface_hub.utils._xet")
        getattr(native, "abort_xet_session", lambda: None)()
