"""`edgespec train`: parses the flags, runs `edgespec.training`, and prints what it came to.

Knows flags and words. Knows nothing of losses.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from edgespec.artifacts.json_files import read_json
from edgespec.cli.exit_codes import FAILED
from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY, FILE, MODEL
from edgespec.cli.progress import Steps
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import harmless, json_text, say
from edgespec.errors import MissingDependency, RequestError
from edgespec.errors import command as shell
from edgespec.methods import METHODS
from edgespec.pipeline.recipe import overridden, read_config
from edgespec.pipeline.training_curve import NAME as PICTURE
from edgespec.pipeline.training_curve import draw_curve
from edgespec.quantize.table import QUANTIZABLE
from edgespec.training.recipe import REPORT, TrainRecipe, read_recipe
from edgespec.training.table import TRAINABLE

if TYPE_CHECKING:
    from edgespec.training.train import Sizes, Trained

FLAG_KEYS = {
    "base_model": ("model", "model_name_or_path"),
    "data": ("data", "data_path"),
    "output_dir": ("training", "output_dir"),
    "minutes": ("training", "minutes"),
}


@click.command("train", cls=EdgeCommand)
@click.argument("what", metavar="METHOD|RECIPE.yaml")
@click.argument("key_values", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--base-model", type=MODEL, metavar="DIR", help="The base that the draft is for.")
@click.option("--data", type=FILE, help='JSONL with "messages", whose answers are the base\'s own.')
@click.option("--output-dir", type=DIRECTORY, metavar="DIR", help="Where the draft goes.")
@click.option("--init", type=MODEL, metavar="DRAFT", help="A draft of this base to go on from.")
@click.option(
    "--minutes",
    type=click.FloatRange(0.01),
    help="The longest it may train; the learning rate goes down with the time.",
)
@click.option(
    "--ar-lower-bound",
    type=click.FloatRange(1),
    metavar="LENGTH",
    help="Exit with 1 where the draft's acceptance length is lower.",
)
@click.option("--dry-run", is_flag=True, help="Say what it would take, from ten real steps.")
@click.option(
    "--print-launch", is_flag=True, help="Print the line that starts a process for each GPU here."
)
@click.option(
    "--engine-dir",
    type=DIRECTORY,
    help="Engines of the finished draft: compare what they accept with torch, and train nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    what: str,
    key_values: tuple[str, ...],
    init: str | None,
    ar_lower_bound: float | None,
    dry_run: bool,
    print_launch: bool,
    engine_dir: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train a draft: METHOD is eagle1, eagle3, dspark, jetspec, dflash, medusa or mtp.

    A recipe is YAML in sections, as NVIDIA ModelOpt's are, and key=value overrides one of its keys;
    docs/training.md lists them. Sizes that it does not give are those of the base.

    A twentieth of the conversations is held out: how many drafts the base accepts is measured on
    its own answers to their prompts, and the draft with the most is kept. Ctrl-C or SIGTERM saves
    and leaves; the same command goes on.

    \b
    edgespec train eagle3 --base-model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir draft
    edgespec train eagle3.yaml training.training_seq_len=1024 --output-dir draft
    """
    recipe = recipe_of(what, key_values, flags)
    check_installed()
    if print_launch:
        given = {name: value for name, value in (*flags.items(), ("init", init)) if value}
        click.echo(harmless(launch_line(shell("train", what, *map(quote, key_values), **given))))
        return
    if engine_dir is not None:
        show_engine(recipe, engine_dir)
        return
    from edgespec.training.ranks import joined

    with joined() as ranks, Steps(quiet=not ranks.first) as steps:
        steps.step("read")
        from edgespec.training.job import open_job
        from edgespec.training.train import measured_steps, train

        job = ranks.agreed(lambda: open_job(recipe, init, steps, steps.note))
        steps.step("try" if dry_run else "train")
        if dry_run:
            sizes = measured_steps(job)
        else:
            result, number = stoppable(job, train, ranks)
    if dry_run:
        if ranks.first:
            show_sizes(sizes, as_json)
    elif result.acceptance is None:
        if ranks.first:
            say(f"stopped: step {result.steps} is kept in {result.directory}: the same command goes"
                " on from there", err=True)  # fmt: skip
        raise click.exceptions.Exit(exit_code(number or signal.SIGTERM))
    elif ranks.first:
        show_result(recipe, result, as_json)
        if ar_lower_bound is not None and result.acceptance.length < ar_lower_bound:
            say(f"the acceptance length {result.acceptance.length:.3f} is below"
                f" --ar-lower-bound {ar_lower_bound:g}", err=True)  # fmt: skip
            raise click.exceptions.Exit(FAILED)


def show_engine(recipe: TrainRecipe, engine_dir: Path) -> None:
    """Prints what torch and engines accept, and what is wrong where they differ."""
    from edgespec.pipeline.engine_acceptance import accepted_lengths
    from edgespec.training.doctor import Facts, findings

    lengths = accepted_lengths(recipe, engine_dir)
    say("acceptance length  {:.3f} in torch, {:.3f} of the engine".format(*lengths))
    for finding in findings(Facts(engine=lengths)):
        say(str(finding), err=True)


def launch_line(line: str) -> str:
    """The command that runs a line in a process for each GPU, or in two that share the cores."""
    import torch

    from edgespec.backends.machine import cores as usable_cores

    gpus, cores = torch.cuda.device_count(), usable_cores()
    count = gpus or min(2, cores)
    return (
        f"OMP_NUM_THREADS={max(1, cores // count)} torchrun --standalone --nproc-per-node {count}"
        f" -m {line}"
    )


def recipe_of(what: str, key_values: tuple[str, ...], flags: dict[str, Any]) -> TrainRecipe:
    """The recipe of a method's name or a file, with overrides and flags."""
    if what in TRAINABLE:
        source, method = "command line", what
        values = overridden({"metadata": {"recipe_type": TRAINABLE[what].recipe_type}}, key_values)
    elif Path(what).suffix in (".yaml", ".yml"):
        source, method = what, None
        values = read_config(Path(what), key_values)
    else:
        raise RequestError(
            f"{what!r} is neither a method that is trained here nor a recipe in YAML.",
            f"Methods: {', '.join(TRAINABLE)}.",
        )
    for name, (section, key) in FLAG_KEYS.items():
        if flags[name] is not None:
            inner = values.get(section)
            given = flags[name] if name == "minutes" else str(flags[name])
            values[section] = {**(inner if isinstance(inner, dict) else {}), key: given}
    return read_recipe(values, source, method)


def check_installed() -> None:
    """Raises MissingDependency where a package of the extra is not there."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"train needs the packages {', '.join(missing)}, which are not installed.",
            "pip install 'edgespec[train]'",
        )


def stoppable(job: Any, train: Any, ranks: Any) -> tuple[Trained, int | None]:
    """Trains; a signal stops it behind its step. The result, and the signal's number."""
    numbers: list[int] = []

    @contextmanager
    def stopping() -> Iterator[Any]:
        with Stopper() as stopper:
            yield stopper
            if stopper.number is not None:
                numbers.append(stopper.number)

    return train(job, stopping, ranks), numbers[0] if numbers else None


def show_sizes(sizes: Sizes, as_json: bool) -> None:
    """Prints what a training would take."""
    from dataclasses import asdict

    if as_json:
        click.echo(json_text(asdict(sizes)))
        return
    per_step = f"{sizes.seconds_per_step:.2f} s a step, {sizes.tokens_per_second:.0f} tokens/s"
    steps = "as many as time allows" if sizes.steps is None else f"{sizes.steps}"
    assert sizes.seconds is not None
    for name, text in (
        ("draft", f"{sizes.draft_weights / 1e6:.2f} M weights"),
        ("data", f"{sizes.num_conversations} conversations, {sizes.num_tokens} tokens an epoch"),
        ("steps", f"{steps}; {per_step}"),
        ("time", f"{sizes.seconds / 60:.1f} minutes, measuring not counted"),
        ("memory", f"{sizes.memory_bytes / 1e9:.2f} GB"),
        ("disk", f"{sizes.disk_bytes / 1e9:.2f} GB while it trains"),
    ):
        say(f"{name:<8}{text}")


def show_result(recipe: TrainRecipe, result: Trained, as_json: bool) -> None:
    """Prints what was measured, and what comes next."""
    found, report = result.acceptance, read_json(result.directory / REPORT)
    assert found is not None
    with suppress(MissingDependency):  # without matplotlib the curve stands in the report
        draw_curve(report, result.directory / PICTURE)
    if as_json:
        click.echo(json_text(report))
        return
    method, out, base = METHODS[recipe.method], result.directory, recipe["model.model_name_or_path"]
    shares = " ".join(f"{share:.2f}" for share in found.per_position)
    say(f"{method.title} draft: {out}, {result.steps} steps in {result.seconds / 60:.1f} minutes")
    say(f"  acceptance  {found.length:.3f} tokens a verify step over {found.num_steps} steps;"
        f" by position {shares}")  # fmt: skip
    say("next:")
    for line in next_commands(recipe.method, str(base), out, images=result.images):
        say(f"  {line}")


def next_commands(method: str, base: str, draft: Path, *, images: bool = False) -> list[str]:
    """The commands that make engines of a base and its new draft."""
    exports, apart = TRAINABLE[method].exports(base, draft), draft_is_apart(method)
    built = [path for _, path in exports]
    if images:
        built.append(str(Path(built[0]).with_name("visual")))
    pair = {"base_model_dir": base, "draft_model_dir": draft}
    smaller = {"quantization": "int4_awq", "output_dir": f"{draft}-int4"}
    quantize = (
        [shell("quantize draft", **pair, **smaller)] if apart and method in QUANTIZABLE else []
    )
    return [
        shell("check", *([base] if apart else []), draft, probe=True),
        *dict.fromkeys(line for line, _ in exports),
        *(shell("build", onnx_dir=path, engine_dir="engines") for path in built),
        *quantize,
    ]


def draft_is_apart(method: str) -> bool:
    """Whether a draft has a directory of its own beside its base's."""
    return METHODS[method].weights_in != "base_checkpoint"
