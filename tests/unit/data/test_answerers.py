"""Engines answer conversations in all of their lanes, as the Python API answers the messages."""

from __future__ import annotations

import json
from pathlib import Path

import edgespec
from edgespec.data.answerers import EngineAnswerer
from edgespec.data.synthesize import read_asked, synthesize
from edgespec.progress import Silent
from tests.lossless.pairs import shared_pair


def test_engines_answer_as_the_api_does_and_list_what_does_not_fit(tmp_path: Path) -> None:
    texts = {"a": ["Hi", "And on?"], "b": ["Count to 3."], "long": ["word " * 200]}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = (json.dumps({"id": name, "turns": turns}) for name, turns in texts.items())
    source.write_text("\n".join(lines))
    settings = {"seed": 0, "drop_truncated": False}
    with edgespec.load(shared_pair("llama", "eagle") / "engines") as engine:
        answerer = EngineAnswerer(engine, temperature=0.0, max_length=6)
        found = synthesize(
            read_asked(source), out, answerer, settings, stopping=lambda: False, progress=Silent()
        )
        assert (found.written, found.failed) == (2, 1)
        assert answerer.concurrency == engine.max_batch_size
        greedy = edgespec.SamplingParams(temperature=0, max_generate_length=6)
        cut = 0
        for line in map(json.loads, out.read_text().splitlines()):
            messages, reasons = line["messages"], []
            for place in range(1, len(messages), 2):
                response = engine.generate(messages[:place], greedy, edgespec.PLAIN)
                assert messages[place]["content"] == response.text
                reasons.append(response.finish_reason)
            assert line.get("truncated", False) is ("max-length" in reasons)
            cut += "max-length" in reasons
        assert found.cut == cut > 0
    (failure,) = map(json.loads, (tmp_path / "out.failures.jsonl").read_text().splitlines())
    assert failure["conversation_id"] == "long"
