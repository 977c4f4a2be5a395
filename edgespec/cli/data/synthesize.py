"""`edgespec data synthesize`: strings into values; `edgespec.data.synthesize` does the work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import environment
from edgespec.cli.exit_codes import SOME_FAILED
from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import json_text, say
from edgespec.errors import counted

if TYPE_CHECKING:
    from edgespec.data.answerers import EngineAnswerer, ServerAnswerer
    from edgespec.data.synthesize import Synthesis


@click.command("synthesize", cls=EdgeCommand)
@click.argument("source", type=FILE, metavar="FILE")
@click.option(
    "--output-file", type=FILE, required=True, help="JSONL; what is there is gone on with."
)
@click.option(
    "--engine-dir",
    type=DIRECTORY,
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="What edgespec build made of the base.",
)
@click.option("--url", help="Instead: a server that runs, such as http://127.0.0.1:8000.")
@click.option("--model", help="The base's name there; with --url it is needed.")
@click.option("--api-key-file", type=FILE, help="A file with the key that the server wants.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=16,
    help="Conversations that the server is asked at a time. Engines use all that they were built for.",
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Each conversation draws its own.")
@click.option(
    "--max-generate-length",
    type=click.IntRange(1),
    default=2048,
    help="Tokens per answer, at most.",
)
@click.option(
    "--drop-truncated",
    is_flag=True,
    help="Leave out conversations with an answer of that length. Else they are kept, and marked.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    source: Path,
    output_file: Path,
    engine_dir: Path | None,
    url: str | None,
    model: str | None,
    as_json: bool,
    drop_truncated: bool,
    **values: Any,
) -> int:
    """Let a base answer the conversations of FILE, turn by turn: a draft learns what its own base says.

    FILE is JSONL with "messages", of which answers are left out, or "turns". A line is written as
    each conversation ends, so that the same command goes on behind Ctrl-C or a kill. What could not
    be answered is listed in NAME.failures.jsonl (exit 5), and asked again by the next run; how
    answers were made is kept in NAME.settings.json.

    \b
    edgespec data synthesize prompts.jsonl --engine-dir engines --output-file chats.jsonl
    edgespec data synthesize prompts.jsonl --url http://127.0.0.1:8000 --model M --output-file chats.jsonl
    """
    if url is not None and click.get_current_context().get_parameter_source("engine_dir") != (
        click.core.ParameterSource.COMMANDLINE
    ):
        engine_dir = None  # of the environment
    refuse(
        {
            "give `engine_dir`, or `url` and `model`": (engine_dir is None) == (url is None)
            or (url is not None and not model),
        }
    )
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.cli.progress import Bars
    from edgespec.data.synthesize import failures_path, read_asked, synthesize

    refuse_overwriting(output_file, (source, engine_dir))
    asked = read_asked(source)
    with ExitStack() as stack:
        if engine_dir is not None:
            answerer: Any = engines(engine_dir, values)
            stack.enter_context(answerer.engine)
            made_by = {"base": answerer.engine.config.component.identity}
        else:
            answerer = server(str(url), str(model), values)
            made_by = {"model": str(model)}
        stopper = stack.enter_context(Stopper())
        sampling = {key: values[key] for key in ("temperature", "seed", "max_generate_length")}
        result = synthesize(
            asked,
            output_file,
            answerer,
            {**made_by, **sampling, "drop_truncated": drop_truncated},
            stopping=stopper,
            progress=stack.enter_context(Bars()),
        )
    show(result, output_file, as_json)
    if stopper.number is not None:
        say("stopped: the same command goes on from there", err=True)
        return exit_code(stopper.number)
    if result.failed:
        say(
            f"{counted(result.failed, 'conversation')} failed: {failures_path(output_file)}",
            err=True,
        )
    return SOME_FAILED if result.failed else 0


def engines(engine_dir: Path, values: dict[str, Any]) -> EngineAnswerer:
    """Engines, open, with their draft where they have one."""
    import edgespec
    from edgespec.data.answerers import EngineAnswerer

    engine = edgespec.load(engine_dir)
    for note in engine.notes:
        say(note, err=True)
    return EngineAnswerer(engine, values["temperature"], values["max_generate_length"])


def server(url: str, model: str, values: dict[str, Any]) -> ServerAnswerer:
    """A server that serves the model. Raises RequestError for another."""
    from edgespec.benchmark.serving.client import ChatClient
    from edgespec.data.answerers import ServerAnswerer
    from edgespec.serve.security import is_loopback, read_keys

    key_file = values["api_key_file"]
    client = ChatClient(url, None if key_file is None else read_keys(key_file)[0])
    if not is_loopback(client.host):
        say(f"warning: prompts are sent to {client.host}, not to this machine", err=True)
    found = ServerAnswerer(
        client,
        model,
        values["temperature"],
        values["max_generate_length"],
        values["concurrency"],
    )
    found.check()
    return found


def show(result: Synthesis, out: Path, as_json: bool) -> None:
    """Prints what came of it."""
    from dataclasses import asdict

    if as_json:
        click.echo(json_text(asdict(result)))
        return
    say(f"{out}: {counted(result.written, 'conversation')} answered")
    for count, what in (
        (result.kept, "were there before"),
        (result.cut, "have an answer of the longest length, and are marked"),
        (result.dropped, "are left out: an answer was of the longest length"),
        (result.repeated, "ask what another asks, and were answered once"),
    ):
        if count:
            say(f"  {count} {what}")
