"""`edgespec bench serve`: strings into values; `edgespec.benchmark.serving` measures."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from edgespec.benchmark.modes import SERVED
from edgespec.cli.bench.asked import sampling_of
from edgespec.cli.bench.kept import (
    JSON,
    PICTURE,
    REPEATS,
    WARMUP,
    check_pictures,
    finish,
    recorded,
)
from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Counts, Names
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import say
from edgespec.compat.bench_tools import SERVE_NAMES

PREFIX = "serve_"
MODES = tuple(name.removeprefix(PREFIX) for name in SERVED)
MOST_CLIENTS = 1024


@click.command("serve", cls=EdgeCommand, aliases=SERVE_NAMES)
@click.argument("engine_dir", type=DIRECTORY, required=False)
@click.option("--url", help="A server that runs, such as http://127.0.0.1:8000.")
@click.option("--model", help="Its name there; with --url it is needed.")
@click.option("--api-key-file", type=FILE, help="A file with the key that the server wants.")
@click.option(
    "--prompts", type=FILE, required=True, help="Conversations, as JSONL with turns (MT-Bench)."
)
@click.option(
    "--mode",
    "modes",
    type=Names(MODES),
    metavar="LIST",
    default=",".join(MODES),
    help="Plain decoding asks for disable_spec_decode; speculative is the server as it is.",
)
@click.option(
    "--concurrency",
    type=Counts(),
    metavar="LIST",
    default="1,4,8,16,64",
    help="Clients at a time.",
)
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="Conversations of a run.  [default: one a client, at least 8]",
)
@click.option(
    "--output-tokens", type=click.IntRange(2), default=128, help="Tokens of an answer, at most."
)
@WARMUP
@REPEATS
@JSON
@PICTURE
def command(
    engine_dir: Path | None,
    url: str | None,
    model: str | None,
    api_key_file: Path | None,
    prompts: Path,
    modes: tuple[str, ...],
    concurrency: tuple[int, ...],
    num_prompts: int | None,
    json_file: Path | None,
    picture: Path | None,
    **sizes: Any,
) -> int:
    """Load an OpenAI-compatible server with clients, plain and with drafts.

    The server is edgespec serve of ENGINE_DIR, started here on a free port, or the one at --url. Each
    client asks again as soon as it is answered. Runs of plain and speculative decoding are next to
    each other, with the same conversations; figures have the names of aiperf.

    Ctrl-C ends it: the runs that are done are shown and written (exit 130).

    \b
    edgespec bench serve engines --prompts mt_bench.jsonl --json load.json --picture load.svg
    edgespec bench serve --url http://127.0.0.1:8000 --model M --prompts mt_bench.jsonl
    edgespec bench serve --url http://127.0.0.1:8080 --model M --prompts mt_bench.jsonl --mode speculative
    """
    refuse(
        {
            "give an ENGINE_DIR, or `url` and `model`": (engine_dir is None) == (url is None)
            or (url is not None and not model),
            "`num_prompts` is at least one for each of `concurrency` clients": num_prompts
            and num_prompts < max(concurrency),
            f"`concurrency` is at most {MOST_CLIENTS}": max(concurrency) > MOST_CLIENTS,
        }
    )
    inputs = (engine_dir, prompts, api_key_file)
    check_outputs(inputs, json_file, picture)
    check_pictures(inputs, picture, None)
    from edgespec.benchmark.environment import served_engines
    from edgespec.benchmark.prompts import PromptSource
    from edgespec.benchmark.report import Recorder, settings
    from edgespec.benchmark.serving.client import ChatClient
    from edgespec.benchmark.serving.measure import ServeBenchmark, ServePlan
    from edgespec.benchmark.serving.process import serving
    from edgespec.cli.progress import Bars
    from edgespec.prompts import read_prompt_set
    from edgespec.serve.security import is_loopback, read_keys

    requests = read_prompt_set(prompts, temperature=0.0)
    source = PromptSource(requests, sampling_of(0.0, seed=0), num_prompts=num_prompts)
    key = None if api_key_file is None else read_keys(api_key_file)[0]
    name = model or ("" if engine_dir is None else engine_dir.resolve().name)
    plan = ServePlan(
        model=name,
        modes=[PREFIX + mode for mode in modes],
        source=source,
        concurrency=concurrency,
        **sizes,
    )
    engines = {} if engine_dir is None else served_engines(engine_dir)
    with ExitStack() as stack:
        started = None if engine_dir is None else stack.enter_context(serving(engine_dir))
        stopper = stack.enter_context(Stopper(lambda: "" if started is None else started.kill()))
        place = url if started is None else started.url(stopper)
        if place is None:  # stopped before it served
            return exit_code(stopper.number or 0)
        client = ChatClient(place, key)
        if not is_loopback(client.host):
            say(f"warning: prompts are sent to {client.host}, not to this machine", err=True)
        bars = stack.enter_context(Bars())
        bench = ServeBenchmark(client, plan, bars, stopper)
        recorder = Recorder(
            {"url": url, "model": name, "engines": engines},
            {**settings(plan), "acceptance": None},  # the server's own, which it does not tell
            notes=bench.notes,
        )
        report, failed = recorded(bench, recorder)
    return finish(report, failed, stopper, json_file, picture)
