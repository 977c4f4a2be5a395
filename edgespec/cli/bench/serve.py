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
from edgespec.errors import EdgeSpecError, RequestError, noted

PREFIX = "serve_"
MODES = tuple(name.removeprefix(PREFIX) for name in SERVED)
MOST_CLIENTS, MOST_REQUESTS, MAX_KEY_BYTES = 1024, 100_000, 4096


@click.command("serve", cls=EdgeCommand, aliases=SERVE_NAMES)
@click.argument("engine_dir", type=DIRECTORY, required=False)
@click.option("--url", help="A server that runs, such as http://127.0.0.1:8000.")
@click.option("--model", help="Its name there.  [default: the one that the server has]")
@click.option("--api-key-file", type=FILE, help="A file with the key that the server wants.")
@click.option(
    "--prompts", type=FILE, required=True, help="Conversations, as JSONL with turns (MT-Bench)."
)
@click.option(
    "--category",
    "categories",
    multiple=True,
    metavar="NAME",
    help="Of --prompts those of this category; may be given repeatedly.",
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
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--repeats", type=click.IntRange(1), default=3, help="Runs of each, in turn.")
@click.option("--warmup", type=click.IntRange(0), default=1, help="Unmeasured runs of each.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    help="Seconds without a byte after which a request has failed.",
)
@click.option(
    "--json",
    "json_file",
    type=FILE,
    help="Write the report (docs/benchmark.md); - is stdout, and the tables go to stderr.",
)
@click.option("--picture", type=FILE, help="Draw all panels into a .png or .svg.")
@click.option(
    "--pictures", type=FILE, metavar="DIR", help="Draw each panel as PNG and SVG into a directory."
)
def command(
    engine_dir: Path | None,
    url: str | None,
    model: str | None,
    api_key_file: Path | None,
    prompts: Path,
    categories: tuple[str, ...],
    modes: tuple[str, ...],
    concurrency: tuple[int, ...],
    num_requests: int | None,
    output_tokens: int,
    temperature: float,
    repeats: int,
    warmup: int,
    timeout_s: float,
    json_file: Path | None,
    picture: Path | None,
    pictures: Path | None,
) -> int:
    """Load an OpenAI-compatible server with clients, plain and with drafts.

    The server is edgespec serve of ENGINE_DIR, started here on a free port, or the one at --url. Each
    client asks again as soon as it is answered. Runs of plain and speculative decoding are next to
    each other, with the same conversations; figures have the names of aiperf.

    Ctrl-C ends it: the runs that are done are shown and written (exit 130).

    \b
    edgespec bench serve engines --prompts mt_bench.jsonl --json load.json --picture load.svg
    edgespec bench serve --url http://127.0.0.1:8000 --prompts mt_bench.jsonl --concurrency 1,4,16
    edgespec bench serve --url http://127.0.0.1:8080 --mode speculative --prompts mt_bench.jsonl
    """
    refuse(
        {
            "give an ENGINE_DIR or `url`": (engine_dir is None) == (url is None),
            f"`concurrency` is at most {MOST_CLIENTS}": max(concurrency) > MOST_CLIENTS,
            "`temperature` is a finite number": temperature == float("inf"),
            "`timeout` is a finite number": timeout_s == float("inf"),
        }
    )
    inputs = (engine_dir, prompts, api_key_file)
    check_outputs(inputs, json_file, picture)
    check_pictures(inputs, picture, pictures)
    from edgespec.benchmark.prompts import PromptSource
    from edgespec.benchmark.report import Recorder
    from edgespec.benchmark.serving.client import ChatClient, Server
    from edgespec.benchmark.serving.measure import ServeBenchmark, ServePlan
    from edgespec.benchmark.serving.process import ServeProcess
    from edgespec.cli.bench import tables
    from edgespec.cli.progress import Bars
    from edgespec.prompts import read_prompt_set

    source = PromptSource(
        read_prompt_set(prompts, categories=categories),
        sampling_of(temperature, seed=0),
        num_prompts=num_requests,
        categories=categories,
    )
    with ExitStack() as stack:
        process = None if engine_dir is None else stack.enter_context(ServeProcess(engine_dir))
        own = "" if process is None else process.url
        stopper = stack.enter_context(Stopper(lambda: "" if process is None else process.kill()))
        if process is not None:
            process.wait(stopper)
        server = Server.of(url or own, key_of(api_key_file))
        if not server.is_loopback:
            say(f"warning: prompts are sent to {server.host}, not to this machine", err=True)
        client = ChatClient(server, timeout_s)
        plan = ServePlan(
            model=model or ("" if stopper() else client.model()),
            modes=[PREFIX + mode for mode in modes],
            source=source,
            concurrency=concurrency,
            output_tokens=output_tokens,
            repeats=repeats,
            warmup=warmup,
        )
        bars = stack.enter_context(Bars())
        bench = ServeBenchmark(client, plan, bars, stopper)
        recorder = Recorder(
            {
                "directory": None if engine_dir is None else engine_dir.name,
                "method": None,
                "url": url,
                "model": plan.model,
                "engines": {} if process is None else process.engines(),
            },
            plan.settings(),
            notes=bench.notes,
        )
        problems: list[EdgeSpecError] = []
        with noted(problems):
            bench.run()
    report = recorder.report(bench, problems[0].what if problems else None)
    with noted(problems):
        keep(report, json_file, picture, pictures)
    tables.show(report, err=to_stdout(json_file))
    for problem in problems[1:]:
        tell(problem)
    if problems:
        raise problems[0]
    return 0 if stopper.number is None else exit_code(stopper.number)


def key_of(path: Path | None) -> str | None:
    """The key in a file. Raises RequestError for a file without one."""
    if path is None:
        return None
    from edgespec.safe_read.regular import read_regular

    key = read_regular(path, MAX_KEY_BYTES).decode("ascii", "replace").strip()
    if not key.isprintable() or not key.isascii() or not key:
        raise RequestError(f"{path} has no key", "Write it in one line.")
    return key
