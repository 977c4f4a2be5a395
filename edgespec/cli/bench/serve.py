"""`edgespec bench serve`: strings into values; `edgespec.benchmark.serving` measures."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from edgespec.benchmark.modes import SERVED
from edgespec.cli.bench.asked import sampling_of
from edgespec.cli.bench.kept import check_pictures, keep, to_stdout
from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Counts, Names
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import report as tell
from edgespec.cli.terminal import say
from edgespec.compat.bench_tools import SERVE_NAMES
from edgespec.errors import EdgeSpecError, noted

PREFIX = "serve_"
MODES = tuple(name.removeprefix(PREFIX) for name in SERVED)
MOST_CLIENTS, MOST_REQUESTS = 1024, 100_000


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
    "--num-requests",
    type=click.IntRange(1, MOST_REQUESTS),
    help="Requests of a run.  [default: 2 a client, at least 8]",
)
@click.option(
    "--output-tokens", type=click.IntRange(2), default=128, help="Tokens of an answer, at most."
)
@click.option("--repeats", type=click.IntRange(1), default=3, help="Runs of each, in turn.")
@click.option("--warmup", type=click.IntRange(0), default=1, help="Unmeasured runs of each.")
@click.option(
    "--json",
    "json_file",
    type=FILE,
    help="Write the report (docs/benchmark.md); - is stdout, and the tables go to stderr.",
)
@click.option("--picture", type=FILE, help="Draw all panels into a .png or .svg.")
def command(
    engine_dir: Path | None,
    url: str | None,
    model: str | None,
    api_key_file: Path | None,
    prompts: Path,
    modes: tuple[str, ...],
    concurrency: tuple[int, ...],
    num_requests: int | None,
    output_tokens: int,
    repeats: int,
    warmup: int,
    json_file: Path | None,
    picture: Path | None,
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
            "`num_requests` is at least one for each of `concurrency` clients": num_requests
            and num_requests < max(concurrency),
            f"`concurrency` is at most {MOST_CLIENTS}": max(concurrency) > MOST_CLIENTS,
        }
    )
    inputs = (engine_dir, prompts, api_key_file)
    check_outputs(inputs, json_file, picture)
    check_pictures(inputs, picture, None)
    from edgespec.benchmark.prompts import PromptSource
    from edgespec.benchmark.report import Recorder
    from edgespec.benchmark.serving.client import ChatClient, Server
    from edgespec.benchmark.serving.measure import ServeBenchmark, ServePlan
    from edgespec.benchmark.serving.process import serving
    from edgespec.cli.bench import tables
    from edgespec.cli.progress import Bars
    from edgespec.prompts import read_prompt_set
    from edgespec.serve.security import read_keys

    requests, sampling = read_prompt_set(prompts, temperature=0.0), sampling_of(0.0, seed=0)
    keys = (None,) if api_key_file is None else read_keys(api_key_file)
    name = model or ("" if engine_dir is None else engine_dir.resolve().name)
    problems: list[EdgeSpecError] = []
    with ExitStack() as stack:
        started = None if engine_dir is None else stack.enter_context(serving(engine_dir))
        stopper = stack.enter_context(Stopper(lambda: "" if started is None else started.kill()))
        if started is not None:
            started.wait(stopper)
        server = Server.of(url or (started.url if started is not None else ""), keys[0])
        if not server.is_loopback:
            say(f"warning: prompts are sent to {server.host}, not to this machine", err=True)
        plan = ServePlan(
            model=name,
            modes=[PREFIX + mode for mode in modes],
            source=PromptSource(requests, sampling, num_prompts=num_requests),
            concurrency=concurrency,
            output_tokens=output_tokens,
            repeats=repeats,
            warmup=warmup,
        )
        bars = stack.enter_context(Bars())
        bench = ServeBenchmark(ChatClient(server), plan, bars, stopper)
        engine = {"url": url, "model": name, "engines": started.engines() if started else {}}
        recorder = Recorder(engine, plan.settings(), notes=bench.notes)
        with noted(problems):
            bench.run()
    report = recorder.report(bench, problems[0].what if problems else None)
    with noted(problems):
        keep(report, json_file, picture, None)
    tables.show(report, err=to_stdout(json_file))
    for problem in problems[1:]:
        tell(problem)
    if problems:
        raise problems[0]
    return 0 if stopper.number is None else exit_code(stopper.number)
