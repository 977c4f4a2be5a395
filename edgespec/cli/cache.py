"""`edgespec cache`: shows and removes what `edgespec run` keeps. Knows no engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from edgespec.artifacts import atomic
from edgespec.cli.flags import EdgeCommand, EdgeGroup, refuse
from edgespec.cli.tables import columns, print_table
from edgespec.cli.terminal import harmless, json_text, say
from edgespec.pipeline.cache import GGUF, GPTQ, Cache, Entry, size_text

ROUNDED = "layers that a build by GPTQ has rounded, which the same build goes on from"
UNFINISHED = "unfinished, of a run that was killed or is not over"


@click.group("cache", cls=EdgeGroup)
def command() -> None:
    """List or remove the engines that edgespec run keeps, the tokenizers and configurations of GGUF
    files, and what builds by GPTQ that were stopped have rounded.

    They are in EDGESPEC_CACHE, XDG_CACHE_HOME/edgespec or ~/.cache/edgespec. Downloaded checkpoints
    are in the hub's own cache (hf cache).
    """


@command.command("list", cls=EdgeCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def list_entries(as_json: bool) -> None:
    """Show each entry: size, days since its last use, and what it is; the last used first."""
    cache, now_s = opened(), time.time()
    entries = cache.entries()
    if as_json:
        shown = {"root": str(cache.root), "entries": [as_dict(e, now_s) for e in entries]}
        click.echo(json_text(shown))
        return
    total = sum(entry.size_bytes for entry in entries)
    say(f"{cache.root}: {size_text(total)} in {count_text(entries)}")
    if entries:
        print_table(table(entries, now_s))


@command.command("prune", cls=EdgeCommand)
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    metavar="DAYS",
    help="Remove entries that were not used for so many days.",
)
@click.option(
    "--all", "remove_all", is_flag=True, help="Remove all entries, and the digests of checkpoints."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def prune(
    ctx: click.Context, older_than: float | None, remove_all: bool, dry_run: bool, yes: bool
) -> None:
    """Remove entries, and what killed runs left.

    Without --older-than or --all only the latter goes, and entries that this version of edgespec
    cannot use on this machine. Entries in use stay.
    """
    refuse({"--all and --older-than exclude each other": remove_all and older_than is not None})
    cache, now_s = opened(), time.time()
    chosen = [
        entry for entry in cache.entries() if is_chosen(cache, entry, now_s, older_than, remove_all)
    ]
    if not chosen:
        say("nothing to remove")
        return
    for entry in chosen:
        say(f"{size_text(entry.size_bytes):>10}  {days_text(entry, now_s)}  {title(entry)}")
    total = size_text(sum(entry.size_bytes for entry in chosen))
    if dry_run:
        say(f"would remove {total} in {count_text(chosen)}")
        return
    if not yes and not confirmed(ctx, f"Remove {total} in {count_text(chosen)}?"):
        say("nothing was removed")
        return
    if remove_all:
        cache.forget_digests()
    kept = [entry for entry in chosen if not cache.prune(entry)]
    removed = [entry for entry in chosen if entry not in kept]
    for entry in kept:
        say(f"in use, kept: {title(entry)}", err=True)
    freed = size_text(sum(entry.size_bytes for entry in removed))
    say(f"removed {freed} in {count_text(removed)}")


def opened() -> Cache:
    """The cache of this user."""
    return Cache(atomic.user_cache())


def is_chosen(
    cache: Cache, entry: Entry, now_s: float, older_than: float | None, remove_all: bool
) -> bool:
    """Whether an entry is to be removed."""
    if remove_all or not entry.is_finished:
        return True
    if older_than is not None:
        return entry.age_days(now_s) > older_than
    if entry.kind == GPTQ:  # a build goes on from there
        return False
    from edgespec.checkpoint.gguf.source import is_outdated
    from edgespec.pipeline.prepare import is_of_no_use

    if entry.kind == GGUF:
        return is_outdated(entry.path)

    return is_of_no_use(cache, entry.key)


def confirmed(ctx: click.Context, question: str) -> bool:
    """What the user answers. Raises click.UsageError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise click.UsageError("stdin is not a terminal, so nobody can be asked: pass --yes", ctx)
    return click.confirm(question)


# ---- how it is shown


def table(entries: Sequence[Entry], now_s: float) -> Table:
    """A row per entry."""
    out = columns("size", "last used", "what", "weights", "entry", left=5)
    for entry in entries:
        out.add_row(
            size_text(entry.size_bytes),
            days_text(entry, now_s),
            title(entry),
            weights_text(entry),
            entry.path.name[:12],
        )
    return out


def title(entry: Entry) -> str:
    """The model and its draft."""
    if not entry.is_finished:
        return UNFINISHED
    if entry.kind == GPTQ:
        return ROUNDED
    target, draft = (short(entry.about.get(name)) for name in ("target", "draft"))
    if entry.kind == GGUF:
        return harmless(f"what is read of {target}")
    return harmless(f"{target} with {draft}" if draft else target or "?")


def short(name: Any) -> str:
    """A hub name as it is; of a path below the home directory, the part below it."""
    if not isinstance(name, str):
        return ""
    home = str(Path("~").expanduser())
    return f"~{name.removeprefix(home)}" if name.startswith(f"{home}/") else name


def weights_text(entry: Entry) -> str:
    """What the engine's weights were made, as far as the entry says it."""
    made_of = entry.about.get("made_of")
    options = made_of.get("options") if isinstance(made_of, dict) else None
    scheme = options.get("scheme") if isinstance(options, dict) else None
    return harmless(str(scheme)) if scheme else ""


def as_dict(entry: Entry, now_s: float) -> dict[str, Any]:
    """An entry for --json."""
    return {
        "key": entry.key,
        "path": str(entry.path),
        "bytes": entry.size_bytes,
        "days_since_use": round(entry.age_days(now_s), 3),
        "finished": entry.is_finished,
        **entry.about,
    }


def days_text(entry: Entry, now_s: float) -> str:
    """The time since the last use."""
    days = entry.age_days(now_s)
    return "today" if days < 1 else f"{days:.0f} day{'s' if days >= 1.5 else ''} ago"


def count_text(entries: Sequence[Entry]) -> str:
    """How many entries, in words."""
    return f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}"
