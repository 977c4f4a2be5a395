"""`--help` of a command with many flags is a page: what most users type. `--help-all` shows every
flag, in groups.

Knows names of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import click

from edgespec.cli.accept_flags import ACCEPTING
from edgespec.cli.config_file import ConfigCommand
from edgespec.cli.draft_flags import KEY_NAMES, TREE_NAMES

REST = "Options"
GROUPS: Mapping[str, str] = {
    "Requests": (
        "input_file prompts texts raw_texts system chat_template no_chat_template enable_thinking"
        " batch_size"
    ),
    "Server": (
        "host port names api_key_file hosts tls_certificate tls_key max_queue request_timeout"
    ),
    "Images": "named_images multimodal_engine_dir allow_image_root allow_image_urls skip_visual",
    "Sampling": (
        "max_generate_length temperature top_k top_p min_p repetition_penalty guided seed stop"
        " num_logprobs"
    ),
    "What drafts, and how much": (
        "spec_decode drafter spec_draft_top_k spec_draft_step spec_verify_size spec_policy"
        f" drafter_time_budget_ms {' '.join(KEY_NAMES)}"
    ),
    "Trees, by the names of TensorRT-LLM": " ".join(TREE_NAMES),
    "Which drafts are accepted": " ".join((*ACCEPTING, "exact")),
    "Output and measurements": (
        "output_file as_json dump_output show_speculation check_lossless compare_quality warmup"
        " dump_profile profile_output_file history_file no_history"
    ),
}
PAGES: Mapping[str, str] = {
    "infer": (
        "engine_dir config input_file texts named_images output_file spec_decode drafter"
        " spec_draft_top_k spec_draft_step spec_verify_size batch_size max_generate_length"
        " temperature seed check_lossless as_json"
    ),
    "run": (
        "draft prompts named_images weights system spec_decode drafter spec_draft_top_k"
        " spec_draft_step spec_verify_size show_speculation max_generate_length temperature"
        " seed enable_thinking"
    ),
    "serve": (
        "host port names api_key_file draft weights max_batch_size max_kv_cache_capacity"
        " config spec_decode drafter spec_draft_top_k spec_draft_step spec_verify_size"
        " tls_certificate tls_key max_queue request_timeout"
    ),
    "chat": (
        "engine_dir config system spec_decode drafter spec_draft_top_k spec_draft_step"
        " spec_verify_size show_speculation max_generate_length temperature seed"
        " enable_thinking chat_template multimodal_engine_dir"
    ),
    "bench run": (
        "config modes prompts num_prompts input_tokens output_tokens batch_sizes"
        " synthetic_acceptance repeats json_file measure_costs explain drafter"
        " spec_draft_top_k spec_draft_step spec_verify_size"
    ),
    "eval summarize": (
        "engine_dir dataset num_articles batch_size output_len temperature spec_decode"
        " drafter spec_draft_top_k spec_draft_step spec_verify_size check_lossless"
        " compare_quality hf_model_dir output_file as_json"
    ),
}
GROUP_OF = {name: title for title, names in GROUPS.items() for name in names.split()}


class PagedCommand(ConfigCommand):
    """A command whose --help shows the parameters that `page` names, and the help up to a form feed.
    Its --help-all shows all."""

    def __init__(self, *args: Any, page: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.page = page.split()
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=show_whole,
                help="Show all options, in groups, and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options of the page, or all in groups where there is none."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (REST, *GROUPS)}
        shown = (*self.page, "help_all")
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            on_page = not self.page or param.name in shown or param is self.get_help_option(ctx)
            if record is not None and on_page and isinstance(param, click.Option):
                title = REST if self.page else GROUP_OF.get(param.name or "", REST)
                rows[title].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def whole(command: click.Command) -> click.Command:
    """A command that shows all of its help."""
    if not isinstance(command, PagedCommand):
        return command
    shown = copy(command)
    shown.page, shown.help = [], (command.help or "").replace("\f", "")
    return shown


def show_whole(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """--help-all."""
    del param
    if value and not ctx.resilient_parsing:
        click.echo(whole(ctx.command).get_help(ctx))
        ctx.exit()
