"""`edgespec serve`: strings into values; `pipeline.prepare` prepares the engines, as for `run`, and
`edgespec.serve` answers with them.

Knows flags. Those of a preparation are those of `run`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import build, run
from edgespec.cli.accept_flags import accept_options
from edgespec.cli.chat.command import choose_template
from edgespec.cli.costs_flag import measure_busy_again
from edgespec.cli.draft_flags import ALIASES
from edgespec.cli.engine_options import (
    BOTH_WAYS,
    MIB,
    PREFIX_CACHE_OF_CONTEXT,
    draft_options,
    engine_options,
    opened,
    planned,
)
from edgespec.cli.flags import refuse
from edgespec.cli.help_pages import PAGES
from edgespec.cli.paths import FILE, MODEL, FilePath
from edgespec.cli.prompt_options import CHAT_TEMPLATE
from edgespec.cli.signals import exit_code
from edgespec.cli.terminal import say
from edgespec.compat import serving
from edgespec.errors import MissingDependency, RequestError

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.engine_request import EngineRequest, Opened
    from edgespec.serve.server import Server

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
BUILT = "`max_batch_size` means nothing here: TARGET is a finished engine directory"
ONE_LANE = (
    "the engine has one lane: it answers one request at a time, and others wait. Build it for"
    " several: `max_batch_size` 8"
)
PARAMS = [
    click.Argument(["target"], metavar="TARGET", type=MODEL),
    click.Option(["--host"], default="127.0.0.1", help="The address to listen at."),
    click.Option(["--port"], type=click.IntRange(0, 65535), default=8000, help="0: a free one."),
    click.Option(
        ["--served-model-name", "names"],
        multiple=True,
        metavar="NAME",
        help="The model's name in requests; may be given repeatedly.  [default: TARGET's]",
    ),
    click.Option(
        ["--api-key-file"],
        type=FILE,
        help="Keys, one a line; a request must have one. Other addresses than the loopback need it.",
    ),
    click.Option(
        ["--allowed-host", "hosts"],
        multiple=True,
        metavar="NAME",
        help="A name by which clients reach the server, beside addresses and localhost.",
    ),
    click.Option(["--tls-certificate"], type=FILE, help="Serve HTTPS: the certificate, in PEM."),
    click.Option(["--tls-key"], type=FILE, help="The certificate's key, in PEM."),
    click.Option(
        ["--max-queue"],
        type=click.IntRange(0),
        default=64,
        help="Answers that may wait for a lane.",
    ),
    click.Option(
        ["--request-timeout"],
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        help="Seconds for an answer.",
    ),
    click.Option(
        ["--prefix-cache-dir"],
        type=FilePath("directory"),
        help=(
            "Keeps KV rows of prompts over a restart, 16 times as many bytes as in memory. Users'"
            " prompts are in them."
        ),
    ),
    click.Option(
        ["--allow-control-tokens"],
        is_flag=True,
        help="Control tokens that texts of messages spell are control tokens, not their characters.",
    ),
    *(param for param in run.PARAMS if param.name in run.MAKING and param.name != "max_input_len"),
    click.Option(
        ["--max-input-len"],
        type=int,
        help=build.LIMITS["max_input_len"].help + "  [default: as many as prompt and answer]",
    ),
    click.Option(
        ["--max-batch-size"],
        type=click.IntRange(1),
        help="Requests at a time of a model that is prepared.  [default: as many as fit, at least 4]",
    ),
]


class ServeCommand(run.RunCommand):
    """A command with the options of the backend that it builds for."""

    before = "chat_template"


@click.command(
    "serve",
    cls=ServeCommand,
    page=PAGES["serve"],
    aliases={**ALIASES, **serving.ALIASES},
    missing=serving.FLAGS,
    params=PARAMS,
)
@CHAT_TEMPLATE
@engine_options(BOTH_WAYS, draft_options, accept_options, PREFIX_CACHE_OF_CONTEXT)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    target: str,
    engine_request: EngineRequest,
    host: str,
    port: int,
    names: tuple[str, ...],
    api_key_file: Path | None,
    hosts: tuple[str, ...],
    tls_certificate: Path | None,
    tls_key: Path | None,
    max_queue: int,
    request_timeout: float,
    allow_control_tokens: bool,
    max_batch_size: int | None,
    chat_template: str | None,
    **values: Any,
) -> int:
    """Serve TARGET over HTTP: OpenAI's, Anthropic's and KServe's APIs, and a page (docs/serving.md).

    TARGET is an engine directory, or a model as for edgespec run, which is prepared first, for as many
    requests at a time as fit, at least 4. The server listens on this machine alone unless --host says
    otherwise, and takes requests of no web page. Ctrl-C or SIGTERM ends it once the answers under way
    have ended; a second one ends it at once.

    \b
    edgespec serve engines
    edgespec serve Qwen/Qwen3-8B --draft Tengyunw/qwen3_8b_eagle3 --weights int4
    edgespec serve engines --host 0.0.0.0 --api-key-file keys.txt
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        message = f"the package {missing[0].replace('_', '-')} is not installed"
        raise MissingDependency(message, "Install the extra: pip install 'edgespec[serve]'.")
    from edgespec.pipeline.prepare import is_engine_dir, lanes_that_fit
    from edgespec.serve.limits import ServeLimits
    from edgespec.serve.security import Guard, check_exposure, read_keys
    from edgespec.serve.server import Server, check_certificate, listening
    from edgespec.serve.service import Service

    alone = "`tls_certificate` and `tls_key` go together"
    refuse(
        {
            alone: (tls_certificate is None) != (tls_key is None),
            "`served_model_name` is empty": not all(names),
        }
    )
    if tls_certificate is not None and tls_key is not None:
        check_certificate(tls_certificate, tls_key)
    keys = () if api_key_file is None else read_keys(api_key_file)
    check_exposure(host, keys)
    listening(host, port).close()  # what is prepared takes long
    limits = build.limits_of(run.LIMITS, values)
    if limits.max_input_len is None:  # agents send long conversations
        limits = replace(limits, max_input_len=limits.max_kv_cache_capacity)
    request = run.run_request(ctx, target, engine_request, limits, values)
    if is_engine_dir(target):
        refuse({BUILT: max_batch_size is not None})
    else:
        from edgespec.cli.progress import Steps

        with Steps() as steps:
            lanes = max_batch_size or lanes_that_fit(request, steps)
        if ctx.get_parameter_source("max_input_len") not in run.GIVEN:  # agents send it all
            limits = replace(limits, max_input_len=limits.max_kv_cache_capacity)
        request = replace(request, limits=replace(limits, max_batch_size=lanes))
    with run.prepared_with_steps(request) as engine_dir:
        measure_busy_again(engine_dir, engine_request.spec_decode, engine_request.spec_policy)
        with opened(engine_request, engine_dir) as open_engine:
            engine = open_engine.engine
            template_of(engine, engine_dir, chat_template)
            if engine.prefix_store is not None:
                engine.prefix_store.said = partial(say, err=True)
            service = Service(
                engine,
                names or (name_of(target),),
                ServeLimits(max_queue=max_queue, request_timeout_s=request_timeout),
                Guard(hosts, keys),
                allow_control_tokens=allow_control_tokens,
            )
            server = Server(
                service,
                certificate=tls_certificate,
                key=tls_key,
                said=lambda text: say(text, err=True),
            )
            socket = listening(host, port)
            place = f"http{'s' if tls_key else ''}://{host}:{socket.getsockname()[1]}"
            tell(open_engine, server, place)
            asyncio.run(server.serve([socket]))
            return exit_code(server.number) if server.force_exit else 0


def name_of(target: str) -> str:
    """What a model is called: its name on the hub, or that of its directory or file."""
    path = Path(target)
    return path.resolve().name if path.exists() else target


def template_of(engine: Any, engine_dir: Path, named: str | None) -> None:
    """Sets the chat template that is named; says where there is none, so that messages are
    refused."""
    try:
        note = choose_template(engine, engine_dir, named, raw=False, thinking=False)
    except RequestError as error:
        if named is not None:
            raise
        note = f"{error.what} Messages are refused, texts are continued."
    if note:
        say(note, err=True)


def prefix_line(engine: Engine) -> str:
    """How long the prompts are that the prefix cache holds, and what would hold longer ones."""
    budget, each = engine.session.prefixes.budget_bytes, engine.parts.kv_bytes_per_token
    whole = engine.base.capacity * each
    line = f"prefix cache {budget // MIB} MiB"
    if 0 < budget < whole:
        longest, wanted = budget // each, -(-whole // MIB)
        line += f", prompts of {longest} tokens; --prefix-cache-mb {wanted} holds the whole context"
    store = engine.prefix_store
    if store is not None:
        line += f"; on disk {store.bound_bytes // MIB} MiB, {store.directory}"
    return line


def tell(open_engine: Opened, server: Server, place: str) -> None:
    """What is served, where, and within which limits."""
    from edgespec.cli.report import opened_line

    engine, service, plan = open_engine.engine, server.service, planned(open_engine)
    say(opened_line(open_engine, plan) if plan else "decoding plainly, without drafts", err=True)
    for note in (*open_engine.notes, *((ONE_LANE,) if engine.max_batch_size == 1 else ())):
        say(note, err=True)
    say(f"lanes {engine.max_batch_size}, context {service.max_model_len} tokens", err=True)
    say(prefix_line(engine), err=True)
    for line in service.limits.lines():
        say(f"  {line}", err=True)
    say(f"serving {', '.join(service.names)} at {place}/v1", err=True)
