"""What a newcomer types before anything works: mistyped words, `help`, versions, variables,
Ctrl-C."""

from __future__ import annotations

import ast
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import edgespec
from edgespec.cli import environment, startup
from edgespec.cli.chat.screen import Screen
from edgespec.cli.flags import flags_of
from edgespec.cli.help_pages import PAGES
from edgespec.cli.infer import warn
from edgespec.cli.main import COMMANDS, cli, hoisted, run
from edgespec.cli.terminal import harmless, json_text, say
from edgespec.errors import BundleError

Said = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("infr", "No such command: infr. Did you mean infer?"),
        ("Build", "Did you mean build?"),
        ("quantize drft", "Did you mean draft?"),
        ("zzz", "Commands: run, quantize, train, export"),
        ("infer --engin-dir E", "No such option: --engin-dir. Did you mean --engine-dir"),
        ("infer --enginDir E", "Did you mean --engine-dir"),
        ("build --no-share-embeding", "Did you mean --no-share-embedding"),
        (
            "export --onnxDir D",
            "No such option: --onnx-dir. It is a flag of edgespec build or verify.",
        ),
        (
            "--engine-dir E infer",
            "bench run, data hidden-states or data synthesize.",
        ),
        ("build --timing-cache F", "It is an option of --backend tensorrt."),
        ("build --backend tensorrt --no-share-embedding", "It is an option of --backend ort."),
        ("build --emit-onnx D", "It is an option of --backend tensorrt or tensorrt-rtx."),
        ("--verison", "Did you mean --version"),
        ("help infr", "Did you mean infer?"),
        ("infer --warmup abc", "'abc' is not a whole number."),
        ("build --max-batch-size 1.5", "'1.5' is not a whole number."),
        ("cache prune --older-than x", "'x' is not a number."),
        ("help infer more", "edgespec infer has no commands below it"),
    ],
)
def test_mistyped_word_is_answered_with_the_right_one(line: str, hint: str, capsys: Said) -> None:
    assert run(line.split()) == 2
    assert hint in capsys.readouterr().err


def test_hidden_flags_are_no_suggestion(capsys: Said) -> None:
    assert run(["build", "--max-lora-rnk", "0"]) == 2
    assert "--max-lora-rank" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["", "infer", "quantize", "quantize draft"])
def test_help_says_what_the_flag_says(command: str, capsys: Said) -> None:
    words = command.split()
    assert run(["help", *words]) == 0
    helped = capsys.readouterr().out
    assert run([*words, "--help"]) == 0
    assert helped == capsys.readouterr().out
    assert helped.startswith(f"Usage: edgespec {command}".strip())


@pytest.mark.parametrize("command", [*PAGES])
def test_help_is_a_page_and_help_all_has_every_flag(command: str, capsys: Said) -> None:
    assert run([*command.split(), "--help"]) == 0
    page = capsys.readouterr().out
    assert run([*command.split(), "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert len(page.splitlines()) <= 66
    assert "Trees, by the names of TensorRT-LLM:" in whole
    there: click.Command | None = cli
    for word in command.split():
        assert isinstance(there, click.Group)
        there = there.get_command(click.Context(cli), word)
    assert there is not None
    assert {*PAGES[command].split()} <= {
        param.name for param in there.get_params(click.Context(there))
    }
    flags = flags_of(there, click.Context(there))
    assert [flag for flag in flags if f"  {flag}" not in whole and f"/ {flag}" not in whole] == []
    assert "--eagle-choices" in flags
    assert "--eagle-choices" not in page


@pytest.mark.parametrize(("line", "code"), [("", 0), ("cache", 2), ("eval", 2)])
def test_group_alone_shows_its_help_once(line: str, code: int, capsys: Said) -> None:
    assert run(line.split()) == code
    shown = capsys.readouterr()
    text = shown.err if code else shown.out
    assert text.startswith(f"Usage: edgespec {line}".strip())
    assert (text.count("Usage:"), "Error" in text) == (1, False)
    assert (shown.out if code else shown.err) == ""


def test_version_has_a_short_flag(capsys: Said) -> None:
    assert run(["-V"]) == 0
    assert capsys.readouterr().out == f"edgespec, version {edgespec.__version__}\n"


def test_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgespec", "-V"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"edgespec, version {edgespec.__version__}\n"


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell: str, capsys: Said) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{environment.COMPLETING}={shell}_complete" in script
    assert "edgespec" in script


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("edgespec inf", ["infer"]), ("edgespec infer --engine", ["--engine-dir"])],
)
def test_shell_gets_completions_and_success(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv(environment.COMPLETING, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert run([]) == 0
    assert capsys.readouterr().out.split() == [f"plain,{word}" for word in completed]


# ---- variables


def test_every_variable_is_read_by_a_flag_and_named_in_its_help() -> None:
    read = set()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        below = command.commands.values() if isinstance(command, click.Group) else [command]
        read |= {param.envvar for one in below if one for param in one.params if param.envvar}
    read |= {param.envvar for param in cli.params if param.envvar}
    assert read == set(environment.VARIABLES) - set(environment.NO_FLAGS)


def test_variables_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "shell.md").read_text(encoding="utf-8")
    for name, meaning in environment.VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page


def test_variable_is_the_default_of_its_flag(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    monkeypatch.setenv(environment.ENGINE_DIR, "from-the-variable")
    assert run(["chat"]) == 3
    assert "from-the-variable does not exist" in capsys.readouterr().err
    assert run(["chat", "--engine-dir", "from-the-flag"]) == 3
    assert "from-the-flag does not exist" in capsys.readouterr().err


def test_wrong_value_of_a_variable_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Said, tmp_path: Path
) -> None:
    monkeypatch.setenv(environment.PREFIX_CACHE_MB, "much")
    assert run(["chat", "--engine-dir", str(tmp_path)]) == 2
    assert environment.PREFIX_CACHE_MB in capsys.readouterr().err


def test_mistyped_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    monkeypatch.setenv("EDGESPEC_ENGINEDIR", "E")
    monkeypatch.setenv("EDGESPEC_TESTS_OF_MY_OWN", "x")
    assert run(["help"]) == 0
    warned = "EDGESPEC_ENGINEDIR is not a variable of edgespec; did you mean EDGESPEC_ENGINE_DIR?\n"
    assert capsys.readouterr().err == warned


# ---- the log


def records(monkeypatch: pytest.MonkeyPatch, capsys: Said, *flags: str) -> list[str]:
    """What a command that logs shows of it."""

    def chatty(**words: object) -> None:
        logging.getLogger("edgespec.x").info("opened %s", "a\x1b[31mname")
        logging.getLogger("edgespec.x").debug("a detail")
        logging.getLogger("strange").info("not ours")

    monkeypatch.setattr("edgespec.cli.help.command.callback", chatty)
    assert run([*flags, "help"]) == 0
    return capsys.readouterr().err.splitlines()


def test_log_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    assert records(monkeypatch, capsys) == []
    (shown,) = records(monkeypatch, capsys, "--verbose")
    assert "INFO    edgespec.x: opened a\\x1b[31mname" in shown
    assert len(records(monkeypatch, capsys, "-v", "--debug")) == 2
    monkeypatch.setenv(environment.VERBOSE, "1")
    assert len(records(monkeypatch, capsys)) == 1
    assert logging.getLogger("edgespec").handlers == [
        h for h in logging.getLogger("edgespec").handlers if isinstance(h, logging.NullHandler)
    ]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("infer --debug x", "--debug infer x"),
        ("infer -v x --verbose", "-v --verbose infer x"),
        ("export -- --debug", "export -- --debug"),
    ],
)
def test_flags_for_all_commands_work_behind_them_too(line: str, wanted: str) -> None:
    assert hoisted(line.split()) == wanted.split()


# ---- text that is not ours


def test_no_control_character_reaches_the_terminal(capsys: Said) -> None:
    hostile = "".join(map(chr, range(0x110))) + "\udcff"
    say(hostile)
    shown = capsys.readouterr().out
    assert not [c for c in shown.removesuffix("\n") if ord(c) < 32 and c not in "\t\n"]
    assert not [c for c in shown if 127 <= ord(c) < 160]
    assert "\\x1b" in shown
    assert "\\x9b" in shown
    assert "\\udcff" in shown


def test_json_on_the_terminal_has_no_control_character_and_reads_back() -> None:
    import json

    value = {"name": "".join(map(chr, range(0x110)))}
    text = json_text(value)
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
    assert json.loads(text) == value
    assert harmless(text) == text


def test_wrong_usage_shows_no_control_character(capsys: Said) -> None:
    assert run(["infer", "--no\x1b[31mflag"]) == 2
    assert run(["no\x1b[31mcommand"]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "--no\\x1b[31mflag" in said


def test_error_shows_no_control_character(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    def broken(**words: object) -> None:
        raise BundleError("named \x1b]0;mine\x07", "do \x9b31m")

    monkeypatch.setattr("edgespec.cli.help.command.callback", broken)
    assert run(["help"]) == 3
    assert capsys.readouterr().err == "error: named \\x1b]0;mine\\x07\n  do \\x9b31m\n"


def test_notes_of_an_engine_show_no_control_character(capsys: Said) -> None:
    """Its config.json may say anything, such as what its weights are emulated by."""
    warn("emulated \x1b[2J")
    Screen(sys.stdout).note("emulated \x1b[2J")
    said = capsys.readouterr().err
    assert said.count("emulated \\x1b[2J") == 2
    assert "\x1b[2J" not in said


# Where text is printed without passing `harmless`, and why.
PRINTED_AS_IT_IS = {
    "completion.py": "a script of click's",
    "help.py": "help texts are ours",
    "help_pages.py": "help texts are ours",
    "data/show.py": "it gives a style to what passed `harmless`",
    "chat/screen.py": "it gives a style to what passed `harmless`",
    "tables.py": "what goes into a table's cells passed `harmless`",
    "report.py": "answers go to files and pipes as they are, and tables have our words",
}
SAFE = ("harmless", "json_text", "ours")


def printing(source: str) -> list[str]:
    """The calls in a file that print something that was not made harmless."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name not in ("click.echo", "print", "os.write", "console.print", "sys.stdout.write"):
            continue
        first = node.args[0] if node.args else None
        safe = isinstance(first, ast.Call) and ast.unparse(first.func) in SAFE
        found += [] if safe or isinstance(first, ast.Constant) else [ast.unparse(node)]
    return found


def test_all_text_passes_one_function_on_its_way_to_the_terminal() -> None:
    root = Path(edgespec.__file__).parent / "cli"
    files = [file for file in root.rglob("*.py") if printing(file.read_text(encoding="utf-8"))]
    raw = {str(file.relative_to(root)) for file in files}
    assert raw == set(PRINTED_AS_IT_IS)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("click.echo(name)", 1),
        ("click.echo(f'{name}', err=True)", 1),
        ("click.echo(harmless(name))\nclick.echo(json_text(name))", 0),
        ("def f():\n    print(name)", 1),
        ("click.echo('our own words')", 0),
    ],
)
def test_planted_print_is_found(source: str, count: int) -> None:
    assert len(printing(source)) == count


# ---- Ctrl-C at the very start

SLOW_IMPORT = """
import sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "edgespec.cli.main":
            print("importing", flush=True)
            import time
            time.sleep(30)
sys.meta_path.insert(0, Slow())
sys.argv = ["edgespec", "--help"]
from edgespec.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_IMPORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")


def test_handler_of_others_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        startup.watch()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_but_the_standard_library_is_imported_before_ctrl_c_is_handled() -> None:
    """And of that, little: what is imported before has the traceback of the interpreter."""
    code = (
        "import sys; before = set(sys.modules); import edgespec.cli.startup;"
        " print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    loaded = set(eval(done.stdout))
    assert not loaded & {"click", "rich", "numpy", "asyncio"}
