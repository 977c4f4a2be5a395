"""`edgespec eval`: strings into values; `edgespec.evaluation` does the work, this shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from edgespec.cli.accept_flags import accept_options, refuse_lossy, relaxed_note
from edgespec.cli.draft_flags import ALIASES
from edgespec.cli.engine_options import (
    SPEC_DECODE,
    draft_options,
    engine_dir_option,
    engine_options,
    opened,
    planned,
    refuse_without_drafts,
)
from edgespec.cli.exit_codes import FAILED, SOME_FAILED
from edgespec.cli.flags import EdgeGroup, refuse
from edgespec.cli.help_pages import PAGES, PagedCommand
from edgespec.cli.infer import check_outputs, write_to
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.prompt_options import (
    CHECK_LOSSLESS,
    COMPARE_QUALITY,
    TOKENIZER_DIR,
    check_tokenizer,
)
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.streams import require_stream
from edgespec.cli.tables import columns, print_table
from edgespec.cli.terminal import json_text, say
from edgespec.compat import trtllm
from edgespec.errors import LimitError

if TYPE_CHECKING:
    from edgespec.evaluation.summarize import Evaluation
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.engine_request import EngineRequest

NAME = "eval summarize"


@click.group("eval", cls=EdgeGroup)
def command() -> None:
    """Measure how good answers are, beside other programs."""


@command.command(
    "summarize",
    cls=PagedCommand,
    page=PAGES[NAME],
    aliases={**ALIASES, **trtllm.ALIASES[NAME]},
    missing=trtllm.FLAGS[NAME],
)
@engine_dir_option
@click.option(
    "--dataset",
    required=True,
    type=FILE,
    help="Articles as JSONL: each line has an article and its highlights, as cnn_dailymail.",
)
@click.option("--num-articles", type=click.IntRange(1), help="Take the first N.  [default: all]")
@click.option("--batch-size", type=click.IntRange(1), default=1, help="Articles at a time.")
@click.option(
    "--max-input-len",
    type=click.IntRange(8),
    default=923,
    help="Tokens of a prompt at most: longer articles are cut.",
)
@click.option(
    "--output-len",
    type=click.IntRange(1),
    default=100,
    help="Tokens of a summary at most.",
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    help="Ask for the summary in messages.  [default: the article and TL;DR:]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    help="0 is greedy. typical acceptance means nothing at 0.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    help="Seed of each article.",
)
@CHECK_LOSSLESS
@COMPARE_QUALITY
@click.option(
    "--hf-model-dir",
    type=DIRECTORY,
    help="Answer with transformers too, in float32, from this checkpoint.",
)
@TOKENIZER_DIR
@click.option("--rouge1-threshold", type=click.FloatRange(0, 100), help="Fail below this ROUGE-1.")
@click.option("--output-file", type=FILE, help="Write answers and scores as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@engine_options(SPEC_DECODE, draft_options, accept_options)
def summarize(
    engine_dir: Path,
    engine_request: EngineRequest,
    dataset: Path,
    num_articles: int | None,
    batch_size: int,
    max_input_len: int,
    output_len: int,
    apply_chat_template: bool,
    temperature: float,
    seed: int,
    check_lossless: bool,
    compare_quality: bool,
    hf_model_dir: Path | None,
    tokenizer_dir: Path | None,
    rouge1_threshold: float | None,
    output_file: Path | None,
    as_json: bool,
) -> int:
    """Summarize articles and score the summaries with ROUGE, as TensorRT-LLM's summarize.py does.

    Answers are greedy without --temperature. With --hf-model-dir the same prompts go through transformers, and the
    answers are compared token for token: those of float32 engines are equal but for near-ties,
    those of low-bit engines show what the weights cost. --check-lossless compares answers with
    drafts to plain ones, as edgespec infer does; for rules that are lossy (--acceptance)
    --compare-quality scores both. Nothing is downloaded. Articles are texts alone: no image is
    asked about.

    Ctrl-C ends the run after the current step; what is done is scored and written (exit 130).

    \b
    edgespec eval summarize --engine-dir engines --dataset articles.jsonl --spec-decode
    edgespec eval summarize --engine-dir engines --dataset articles.jsonl --hf-model-dir Qwen3-0.6B
    edgespec eval summarize --engine-dir engines --dataset articles.jsonl --spec-decode \\
        --acceptance rejection --temperature 0.7 --compare-quality
    """
    if not engine_request.spec_decode:
        asked = {
            "`check_lossless` means": check_lossless,
            "`compare_quality` means": compare_quality,
        }
        refuse_without_drafts(asked)
    if check_lossless:
        refuse_lossy(engine_request.accepts, temperature)
    greedy = "`hf_model_dir`: it answers greedily; `temperature` is above 0"
    refuse({greedy: hf_model_dir is not None and temperature > 0})
    if output_file is None:
        require_stream("stdout")
    from edgespec.cli.progress import Bars
    from edgespec.evaluation import reference, rouge
    from edgespec.evaluation.articles import read_articles
    from edgespec.evaluation.summarize import Evaluation, prompts_of, sampling_of

    rouge.check_installed()
    check_outputs((dataset, engine_dir, hf_model_dir), output_file)
    articles = read_articles(dataset, num_articles)
    check_tokenizer(engine_dir, tokenizer_dir)
    with opened(engine_request, engine_dir) as open_engine:
        engine, plan = open_engine.engine, planned(open_engine)
        engine.limits.check_batch_size(batch_size)
        most = fitting_len(engine, max_input_len, output_len)
        for note in (*open_engine.notes, *notes_of_rule(engine, temperature)):
            say(note, err=True)
        prompts = prompts_of(engine, articles, most, chat=apply_chat_template)
        model = None if hf_model_dir is None else reference.load(hf_model_dir)
        sampling = sampling_of(output_len, temperature, seed)
        run = Evaluation(engine, prompts, plan, batch_size, sampling)
        with Stopper() as stopper, Bars() as bars:
            run.run(
                model,
                check_lossless=check_lossless,
                compare_quality=compare_quality,
                stopping=stopper,
                progress=bars,
            )
        summary = run.summary()
        if output_file is not None:
            write_to(output_file, {**summary, "answers": run.entries()})
    show(run, summary, as_json=as_json)
    return outcome(run, summary, rouge1_threshold, stopper.number)


def notes_of_rule(engine: Engine, temperature: float) -> Iterator[str]:
    """What makes a lossy rule mean nothing here."""
    if engine.acceptance.rule == "typical" and temperature == 0:
        yield "typical acceptance at temperature 0 is greedy decoding; give --temperature"
    if (note := relaxed_note(engine, ())) is not None:
        yield note


def fitting_len(engine: Engine, max_input_len: int, output_len: int) -> int:
    """Tokens that a prompt may have: as asked, and so that prompt and answer fit into the
    engines. Raises LimitError where none would be left."""
    limits = [config.limits for config in engine.configs.values()]
    room = min(engine.base.capacity - output_len, *(limit.max_input_len for limit in limits))
    if room < 1:
        message = f"--output-len {output_len}: the KV cache holds {engine.base.capacity} tokens"
        raise LimitError(message, "Lower it, or build with a larger --max-kv-cache-capacity.")
    if room < max_input_len:
        say(f"prompts are cut to {room} tokens, so that they fit into the engines", err=True)
    return min(room, max_input_len)


# ---- what is shown

COLUMNS = ("plain", "speculative", "transformers")
ROWS = (
    ("ROUGE-1", "rouge1", "{:.2f}"),
    ("ROUGE-2", "rouge2", "{:.2f}"),
    ("ROUGE-L", "rougeL", "{:.2f}"),
    ("ROUGE-Lsum", "rougeLsum", "{:.2f}"),
    ("articles", "articles", "{}"),
    ("tokens", "completion_tokens", "{}"),
    ("base passes after prefill", "base_passes_after_prefill", "{}"),
    ("tokens/s of the whole run", "output_tokens_per_s", "{:.1f}"),
    ("acceptance length", "acceptance_length", "{:.2f}"),
    ("acceptance rate", "acceptance_rate", "{:.2f}"),
)


def show(run: Evaluation, summary: dict[str, Any], *, as_json: bool) -> None:
    """Print the scores as a table with a column a program, or as JSON, and failures on stderr."""
    if as_json:
        click.echo(json_text(summary))
    else:
        print_table(table(summary))
        for line in agreements(run, summary):
            say(line)
    for place, error in run.answers.errors.items():
        say(f"line {run.prompts[place].article.number}: {error.what}\n  {error.remedy}", err=True)


def table(summary: dict[str, Any]) -> Table:
    """One column a program, and the rows that at least one of them has."""
    names = [name for name in COLUMNS if name in summary]
    out = columns("", *names)
    for label, key, form in ROWS:
        values = [summary[name].get(key) for name in names]
        if any(value is not None for value in values):
            out.add_row(label, *("-" if v is None else form.format(v) for v in values))
    return out


def agreements(run: Evaluation, summary: dict[str, Any]) -> Iterator[str]:
    """How answers agree with plain decoding and with transformers."""
    if (check := summary.get("lossless_check")) is not None:
        same = check["compared"] - check["differing"]
        yield (
            "lossless: yes"
            if not check["differing"]
            else f"lossless: {same} of {check['compared']} identical;"
            f" {check['differing']} differ, {check['not_explained']} NOT explained by rounding"
        )
        for place, difference in run.differences.items():
            yield f"line {run.prompts[place].article.number}: {difference.words}"
    if (quality := summary.get("quality_comparison")) is not None:
        same, compared = quality["identical"], quality["compared"]
        yield f"{quality['acceptance']}: {same} of {compared} answers equal plain ones"
    if (other := summary.get("transformers")) is not None:
        yield f"transformers: {other['identical']} of {other['compared']} answers identical"


def outcome(
    run: Evaluation, summary: dict[str, Any], threshold: float | None, stopped_by: int | None
) -> int:
    """The exit code, and on stderr what is behind it."""
    if not run.is_lossless:
        say("NOT lossless: please report it with the output", err=True)
        return FAILED
    if stopped_by is not None:
        return exit_code(stopped_by)
    rouge1 = summary["plain" if run.plan is None else "speculative"].get("rouge1")
    if threshold is not None and (rouge1 is None or rouge1 < threshold):
        shown = "no answer" if rouge1 is None else f"ROUGE-1 {rouge1:.2f}"
        say(f"{shown}: below --rouge1-threshold {threshold:g}", err=True)
        return FAILED
    return SOME_FAILED if run.answers.errors else 0
