"""The commands inside a chat: one row of SLASHES each.

Knows what a user may change or ask between two turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from edgespec.cli.chat import conversation as files
from edgespec.cli.chat.loop import Chat
from edgespec.cli.chat.settings import (
    SETTINGS,
    Settings,
    changed,
    shown,
)
from edgespec.cli.chat.tree_picture import tree_picture
from edgespec.cli.stats import stats
from edgespec.errors import RequestError, counted, in_terms_of
from edgespec.methods.names import RULES
from edgespec.prompts.image_item import MAX_IMAGES
from edgespec.prompts.parse import message_text
from edgespec.prompts.places import JsonPlace, did_you_mean

if TYPE_CHECKING:
    from edgespec.runtime.vision.image_prompts import ImagePrompts

AS_SETTINGS = {name: name for name in SETTINGS}  # what /set takes
IN_THE_FILE = {"image_root": "the directory of the file"}
HERE = {"image_root": "the directory where the chat was started"}


def run(chat: Chat, said: str) -> None:
    """Runs the command of a line that begins with a slash.

    Raises RequestError where there is none of that name, or for text behind one that takes none.
    """
    name, text = [*said.split(maxsplit=1), ""][:2]
    if name not in SLASHES:
        near = did_you_mean(name, SLASHES, "Did you mean {}? ").replace('"', "")
        raise RequestError(
            f"there is no command {name}",
            f"{near}Commands: {', '.join(SLASHES)}. To send a turn that begins with /, write //.",
        )
    slash = SLASHES[name]
    if text and not slash.takes:
        raise RequestError(f"{name} takes no text", f"To send it as a turn, write /{name} with it.")
    slash.act(chat, text.rstrip())


def show_commands(chat: Chat, _: str) -> None:
    """/help: lists the commands on stderr."""
    names = {name: f"{name} {slash.takes}".strip() for name, slash in SLASHES.items()}
    lines = [f"{names[name]:17} {slash.does}" for name, slash in SLASHES.items()]
    if chat.interactive:
        lines.append("Enter sends, Alt+Enter begins a new line; a pasted text is one turn.")
    else:
        lines.append("A line that ends with a backslash goes on in the next one.")
    chat.screen.note("\n".join(lines))


def set_system(chat: Chat, text: str) -> None:
    """/system: sets the system prompt, or removes it with an empty text. Raises RequestError for
    text that no message may hold."""
    chat.conversation.system = message_text(text, JsonPlace("the system prompt"))
    chat.screen.note("[the system prompt is set]" if text else "[no system prompt]")


def change_setting(chat: Chat, text: str) -> None:
    """/set: changes a setting for the answers to come; without text, shows them all. Raises
    RequestError or LimitError for what cannot be set, and keeps what was."""
    if not text:
        return chat.screen.note(shown(chat.settings))
    name, value = named_value(text)
    if not value:
        raise RequestError(f"{name} has no value", "Write it behind the name: /set top_k 20.")
    settings = changed(chat.settings, name, value)
    with in_terms_of(AS_SETTINGS):
        if settings.acceptance is not None:  # raises for what the model lacks
            rule = chat.engine.acceptance_for(settings.acceptance)
            settings = replace(settings, acceptance=rule)
        plan = settings.plan(chat.engine)  # raises for sizes that the engine cannot take
    if settings.enable_thinking and not chat.engine.tokenizer.knows_thinking():
        raise RequestError(
            "this model's template has no thinking mode", "Go on without: enable_thinking is off."
        )
    is_of_rule = settings.acceptance != chat.settings.acceptance
    is_of_plan = is_of_rule or settings.spec_policy != chat.settings.spec_policy
    changes_plan = is_of_plan and plan is not None and plan != chat.settings.plan(chat.engine)
    chat.settings = settings
    chat.screen.note(f"[{name} is {value}]")
    for note in rule_notes(settings) if is_of_rule else ():
        chat.screen.note(note)
    if changes_plan:
        from edgespec.cli.report import plan_line

        assert plan is not None
        words, can_adapt = chat.engine.drafting.words, chat.engine.planner.can_adapt
        line = plan_line(plan, chosen=False, words=words, can_adapt=can_adapt)
        chat.screen.note(f"[{line}]")


def rule_notes(settings: Settings) -> Iterator[str]:
    """What the accept rule guarantees, and what its options mean."""
    from edgespec.runtime.acceptance.verify import acceptance_words

    rule = settings.acceptance
    if rule is not None:
        yield f"[acceptance: {acceptance_words(rule.rule)}]"
        if rule.note is not None:
            yield f"[{rule.note}]"


def named_value(text: str) -> tuple[str, str]:
    """What /set has: `name value`, or `name=value`."""
    first, space, rest = text.partition(" ")
    name, equals, value = first.partition("=")
    if equals:
        return name, value + space + rest
    return name, rest.strip().removeprefix("=").strip()


def undo(chat: Chat, _: str) -> None:
    """/undo: drops the last exchange, and images that wait. Raises RequestError where there are
    neither."""
    if drop_images(chat) and not chat.conversation.exchanges:
        return
    if not chat.conversation.exchanges:
        raise RequestError("there is no exchange to take back", "Say something first.")
    chat.conversation.exchanges.pop()
    chat.screen.note("[the last exchange is taken back]")


def regenerate(chat: Chat, _: str) -> None:
    """/regenerate: answers the last turn again. The old answer stays where the new one fails."""
    if not chat.conversation.exchanges:
        raise RequestError("there is no answer to generate again", "Say something first.")
    sampling = chat.settings.sampling
    if sampling.temperature == 0 or sampling.seed is not None:
        chat.screen.note(
            "[the same settings give the same answer: /set temperature 0.7, or /set seed none]"
        )
    old = chat.conversation.exchanges.pop()
    count = len(chat.conversation.exchanges)
    try:
        chat.turn(old[0])
    finally:
        if len(chat.conversation.exchanges) == count:
            chat.conversation.exchanges.append(old)


def reset(chat: Chat, _: str) -> None:
    """/reset: drops all exchanges, and images that wait, and keeps the system prompt."""
    drop_images(chat)
    chat.conversation.exchanges.clear()
    chat.screen.note(
        "[a new conversation; the system prompt stays]"
        if chat.conversation.system
        else "[a new conversation]"
    )


def show_stats(chat: Chat, _: str) -> None:
    """/stats: the figures of the last answer, and of the session. Raises RequestError before the
    first answer."""
    from edgespec.runtime.loop.metrics import Pooled

    metrics = [response.metrics for response in chat.responses]
    if not metrics:
        raise RequestError("there is no answer yet", "Say something first.")
    chat.screen.note(stats(metrics[-1], drafted=chat.settings.drafts))
    pooled = Pooled(metrics)
    rate = pooled.decode_tokens / pooled.decode_s if pooled.decode_s else 0.0
    chat.screen.note(
        f"[session: {counted(len(metrics), 'answer')},"
        f" {counted(pooled.completion_tokens, 'token')},"
        f" {counted(pooled.steps, 'base pass', 'es')} after prefill, {rate:.1f} tokens/s]"
    )
    done = None if chat.engine.images is None else chat.engine.images.stats
    if done is not None and done.images:
        chat.screen.note(
            f"[images: {done.encoded} encoded in {done.encode_s:.2f} s,"
            f" {counted(done.encoded_tokens, 'token')}]"
        )


def show_tree(chat: Chat, _: str) -> None:
    """/tree: the tree of the last answer's last step that verified drafts. Raises RequestError where there is
    none."""
    step = chat.last_step
    if step is None or step.tree is None:
        message = "no draft was verified yet"
        if chat.last is not None:
            message = "no draft was verified in the last answer"
        raise RequestError(message, "Say something, with drafts: /set spec_decode on.")
    tokenizer = chat.engine.tokenizer

    def text(token: int) -> str:
        raw = tokenizer.token_bytes(token) or (tokenizer.token(token) or "").encode()
        return repr(raw.decode(errors="backslashreplace"))

    accepted = len(step.path) - 1
    own = step.token_ids[accepted] if len(step.token_ids) > accepted else None
    for line, stands in tree_picture(step.tree, step.path, own, text):
        chat.screen.line(line, marked=stands)
    chat.screen.note(
        f"[{len(step.tree) - 1} drafted, {accepted} accepted (\u25cf); the percentages are the"
        " draft's own]"
        if step.tree.probs is not None
        else f"[{len(step.tree) - 1} drafted, {accepted} accepted (\u25cf)]"
    )


def save(chat: Chat, text: str) -> None:
    """/save: writes the conversation to a file. Raises RequestError for a file that is not one of
    this chat's, or cannot be written."""
    path = files.home_path(text)
    if path.exists() and path.resolve() not in chat.own_files:
        raise RequestError(f"{path} exists", "Name another file, or remove that one first.")
    files.save(chat.conversation, path)
    chat.own_files.add(path.resolve())
    chat.screen.note(f"[saved to {path}; edgespec infer --input-file reads it too]")


def load(chat: Chat, text: str) -> None:
    """/load: replaces the conversation by one of a file, whose images are in its directory and are
    read at once. Raises RequestError and LimitError, and keeps what was."""
    path = files.home_path(text)
    conversation = files.load(path)
    if conversation.images:
        images = encoder_of(chat)
        with in_terms_of(IN_THE_FILE):
            conversation = conversation.with_images(
                images.taken(conversation.images, path.absolute().parent)
            )
    drop_images(chat)
    chat.conversation = conversation
    chat.own_files.add(path.resolve())
    chat.screen.note(f"[{counted(len(chat.conversation.exchanges), 'exchange')} from {path}]")


def attach_image(chat: Chat, text: str) -> None:
    """/image: lets an image go with the next turn; it is read and encoded at once. Without a name,
    none of those that wait goes with it. Raises RequestError and LimitError for one that cannot be
    taken, or without an image encoder."""
    if not text:
        if not drop_images(chat):
            raise RequestError("no image waits for a turn", 'Name one: "/image ship.jpg".')
        return
    images = encoder_of(chat)
    if len(chat.conversation.images) + len(chat.images) >= MAX_IMAGES:
        message = f"the conversation has {MAX_IMAGES} images, and no request may have more"
        remedy = "/undo drops the last exchange, /image without a name what waits for the next one."
        raise RequestError(message, remedy)
    path = files.home_path(text)
    with in_terms_of(HERE):
        item, num_tokens = images.typed(path)
    chat.images.append(item)
    chat.screen.note(f"[{path}: {counted(num_tokens, 'token')}; it goes with the next turn]")


def drop_images(chat: Chat) -> bool:
    """Whether there were images that waited for the next turn; none is left."""
    if not chat.images:
        return False
    count, chat.images = counted(len(chat.images), "image"), []
    chat.screen.note(f"[{count} dropped]")
    return True


def encoder_of(chat: Chat) -> ImagePrompts:
    """What reads and encodes images. Raises RequestError where there is none."""
    if chat.engine.images is None:
        remedy = "Start the chat with --multimodal-engine-dir, the directory of `visual`."
        raise RequestError("there is no image encoder", remedy)
    return chat.engine.images


def leave(chat: Chat, _: str) -> None:
    """/exit: ends the chat."""
    chat.leave()


class Slash(NamedTuple):
    """A command; `takes` names the text behind it, where it takes one. `words` complete that text:
    None for the path of a file."""

    act: Callable[[Chat, str], None]
    does: str
    takes: str = ""
    words: Sequence[str] | None = ()


SLASHES = {
    "/help": Slash(show_commands, "This list."),
    "/system": Slash(
        set_system, "Set the system prompt; without text, remove it. The turns so far stay.", "TEXT"
    ),
    "/set": Slash(
        change_setting,
        "Change a setting: /set temperature 0.2, /set acceptance typical posterior_threshold=0.09."
        " Without text, show all.",
        "NAME VALUE",
        (*SETTINGS, *(f"acceptance {rule}" for rule in RULES)),
    ),
    "/regenerate": Slash(regenerate, "Answer the last turn again."),
    "/undo": Slash(undo, "Take back the last turn and its answer."),
    "/reset": Slash(reset, "Begin a new conversation, with the same system prompt."),
    "/stats": Slash(show_stats, "Figures of the last answer and of the session."),
    "/tree": Slash(show_tree, "The drafts of the last step, and which were accepted."),
    "/save": Slash(save, "Write the conversation to a file, as an input.json.", "FILE", None),
    "/load": Slash(load, "Read a conversation from such a file.", "FILE", None),
    "/image": Slash(
        attach_image,
        "Send an image with the next turn; may be given repeatedly. Without a name, send none.",
        "FILE",
        None,
    ),
    "/exit": Slash(leave, "Leave."),
}
