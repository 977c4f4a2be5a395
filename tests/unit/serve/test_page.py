"""The page at /: what a browser may do with it, and in Chromium what a user does."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil

import pytest

from edgespec.runtime.engine import Engine
from tests.unit.serve.serving import Running, served


def test_a_browser_runs_its_own_script_and_style_alone(server: Running) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.strip().split(" ", 1)
        for rule in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in str(policy)
    for tag in ("script", "style"):
        (block,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""<[^>]+\s(on\w+|style)=|(src|href)=["']https?:""", response.text)


def test_a_browsers_dialog_takes_the_key_as_password(engine: Engine) -> None:
    key = "k" * 24
    with served(engine, keys=(key,)) as running:
        refused = running.client.get("/")
        assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        assert running.client.get("/", auth=("any", key)).status_code == 200
        for wrong in (("any", key[1:]), (key, "")):
            assert running.client.get("/", auth=wrong).status_code == 401
        torn = running.client.get("/", headers={"authorization": "Basic /"})
        assert torn.status_code == 401


def test_a_step_tells_its_tree_where_it_is_asked_for(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_tokens": 16, "return_speculation": True}
    events = server.events("/v1/chat/completions", **asked)
    choices = [choice for event in events for choice in event["choices"]]
    steps = [choice["speculation"] for choice in choices if "speculation" in choice]
    figures = events[-1]["metrics"]["speculative_decoding"]
    assert sum(step["accepted"] for step in steps) == figures["num_accepted_draft_tokens"]
    first, *others = steps
    assert first["tree"] is None
    assert len(others) == figures["num_spec_steps"]
    for step in others:
        tree = step["tree"]
        assert len(tree["tokens"]) == len(tree["parents"])
        assert len(step["pieces"]) == step["accepted"] + 1 == len(tree["path"])
        assert [tree["parents"][node] for node in tree["path"]] == [-1, *tree["path"][:-1]]


@pytest.mark.clients
def test_chromium_shows_an_answer_and_stops_one(server: Running) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    wrong: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.get_by_role("heading", name="toy").wait_for()
        page.fill("#temperature", "0")
        page.fill("#tokens", "12")
        page.fill("#prompt", "Hi")
        page.press("#prompt", "Enter")
        page.locator("#log article").nth(1).wait_for()
        page.get_by_role("button", name="Send").wait_for()
        said = page.locator("#log .text").nth(1).inner_text()
        message = server.chat(max_tokens=12)["choices"][0]["message"]
        assert said.split() == message["content"].split()
        assert re.fullmatch(r"[0-9][.][0-9]{2}", page.locator("#length").inner_text())
        page.keyboard.press("Control+k")
        assert page.locator("#log article").count() == 0
        with server.service.engine.driver.paused():
            page.fill("#prompt", "Hi")
            page.press("#prompt", "Enter")
            page.get_by_role("button", name="Stop").wait_for()
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Send").wait_for()
        browser.close()
    assert not wrong
