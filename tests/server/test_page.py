from __future__ import annotations

import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import plait.server
from plait.cli.common.options import SAMPLING_HELP
from plait.config import ServerConfig
from plait.frontend.frontend import Front
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, serving, start, wait_until
from tests.server.fake import fake_front
from tests.server.real_engine import engine_front

PAGE = Path(plait.server.__file__).parent / "page"
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file())
# Libraries of others are held by the policy alone, which the tests in a browser watch.
OURS = [path for path in FILES if path.relative_to(PAGE).parts[0] != "vendor"]
SCRIPTS = [path for path in OURS if path.suffix == ".js"]
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def name(path: Path) -> str:
    return path.relative_to(PAGE).as_posix()


def address(path: Path) -> str:
    return "/" if name(path) == "index.html" else f"/page/{name(path)}"


class Markup(HTMLParser):
    """What a page loads, the ids it has, and what its policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.refused: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "src" or (key == "href" and tag == "link"):
                self.loaded.append(value or "")
            if key == "id":
                self.ids.append(value or "")
            if key == "style" or key.startswith("on"):
                self.refused.append(f"<{tag} {key}>")
        if tag == "style" or (tag == "script" and not dict(attrs).get("src")):
            self.refused.append(f"<{tag}>")


@pytest.fixture(scope="module")
def markup() -> Markup:
    found = Markup()
    found.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_file_is_served_as_what_it_is(client: Client, path: Path) -> None:
    answer = client.get(address(path))
    assert answer.status == 200
    assert answer.body == path.read_bytes()
    assert answer.headers["content-type"] == KINDS[path.suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    with serving(fake_front(), api_key=("not-for-everybody",)) as client:
        assert {client.get(address(path)).status for path in FILES} == {200}
        assert client.get("/v1/models").status == 401
        assert (
            client.request("GET", "/v1/models", headers={"Authorization": "Bearer not-for-everybody"}).status
            == 200
        )


def test_the_policy_lets_nothing_in_from_outside(client: Client) -> None:
    answer = client.get("/")
    policy = {
        part.split()[0]: part.split()[1:] for part in answer.headers["content-security-policy"].split(";")
    }
    assert policy["default-src"] == ["'self'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    assert policy["trusted-types"] == ["plait-worker"]  # the one address that may become a worker
    assert all(
        policy[what] == ["'none'"] for what in ("base-uri", "form-action", "frame-ancestors", "object-src")
    )
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_what_a_browser_has_is_not_sent_again(client: Client) -> None:
    first = client.get("/")
    again = client.request("GET", "/", headers={"If-None-Match": first.headers["etag"]})
    other = client.request("GET", "/", headers={"If-None-Match": '"of another version"'})
    assert first.headers["cache-control"] == "no-cache"
    assert (again.status, again.body) == (304, b"")
    assert (other.status, other.body) == (200, first.body)


def test_head_of_the_page_is_its_headers(client: Client) -> None:
    answer = client.request("HEAD", "/")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == KINDS[".html"]


@pytest.mark.parametrize(
    "path", ["/page", "/page/js/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/js/../../app.py"]
)
def test_only_files_of_the_page_are_served(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status == 404
    assert answer.error["code"] == "not_found"


def test_the_page_takes_no_posts(client: Client) -> None:
    assert client.post("/", {}).status == 405


def test_the_page_is_there_while_the_model_loads_and_can_show_how_far_it_is() -> None:
    go = threading.Event()

    def load(report: Any) -> Front:
        report("reading weights", 3, 8)
        go.wait(PATIENCE_S)
        return fake_front()

    running = start(load, ServerConfig(port=0))
    try:
        client = Client(running.url)
        assert wait_until(lambda: client.get("/health").json["progress"]["total"] == 8)
        assert client.get("/health").json == {
            "status": "loading",
            "progress": {"text": "reading weights", "done": 3, "total": 8},
        }
        assert client.get("/").status == 200
    finally:
        go.set()
        running.stop()


def test_everything_the_page_loads_exists(markup: Markup) -> None:
    assert markup.loaded
    for target in markup.loaded:
        assert (PAGE / target.removeprefix("page/")).is_file(), target
    for path in SCRIPTS:
        for target in re.findall(
            r'^(?:import|export) .*?from "(.+?)";', path.read_text("utf-8"), re.M | re.S
        ):
            assert (path.parent / target).is_file(), f"{name(path)} imports {target}"


def test_every_link_of_the_page_leads_somewhere(client: Client) -> None:
    targets = re.findall(r'<a [^>]*href="([^"#]+)"', (PAGE / "index.html").read_text(encoding="utf-8"))
    assert targets
    assert all(client.get(f"/{target}").status == 200 for target in targets)


def test_everything_scripts_look_for_is_on_the_page(markup: Markup) -> None:
    assert len(markup.ids) == len(set(markup.ids))
    wanted = {
        found for path in SCRIPTS for found in re.findall(r'byId\("([\w-]+)"\)', path.read_text("utf-8"))
    }
    assert wanted
    assert wanted <= set(markup.ids)


def test_the_page_itself_obeys_its_policy(markup: Markup) -> None:
    assert markup.refused == []


@pytest.mark.parametrize("path", OURS, ids=name)
def test_no_file_names_an_address_outside(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
    assert not re.search(r"""(?<!\\)//[\w-]+\.\w|["'(]//\w|@import|url\((?!#)""", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_no_script_makes_markup_or_code_from_text(path: Path) -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc"
    assert not re.search(rf"{markup}|\beval\b|new Function|javascript:", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", OURS, ids=name)
def test_files_of_the_page_are_small(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 400


def test_the_model_and_its_context_are_known(client: Client) -> None:
    (model,) = client.get("/v1/models").json["data"]
    assert model["id"]
    assert model["max_model_len"] > 0
    assert client.get("/version").json["version"]
    assert client.get("/health").json["status"] == "ok"


def test_a_model_without_a_chat_template_says_so_in_a_code() -> None:
    front = fake_front()
    front.chat_template = None
    with serving(front) as client:
        answer = client.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})
        assert answer.status == 400
        assert answer.error["code"] == "bad_template"


def test_a_streamed_chat_has_what_the_page_shows(client: Client) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 5}
    events = client.chat("Hi", **asked).events
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] > 0
    assert usage["prompt_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hi"
    assert choices[-1]["finish_reason"] == "stop"
    scored = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", [])]
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 5 for one in scored)
    assert scored[0]["token"] == "H"


def test_a_streamed_completion_has_what_the_page_shows(client: Client) -> None:
    events = client.complete("Hi", stream=True, logprobs=5, stream_options={"include_usage": True}).events
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hi"
    lists = choices[0]["logprobs"]
    assert lists["tokens"] == ["H"]
    assert lists["token_logprobs"][0] == lists["top_logprobs"][0]["H"]


def test_a_reply_can_go_on_from_another_token(client: Client) -> None:
    prompt = client.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json
    more = client.post("/tokenize", {"prompt": "He", "add_special_tokens": False}).json
    assert prompt["max_model_len"] > len(prompt["tokens"])
    assert client.complete([*prompt["tokens"], *more["tokens"]]).status == 200


def test_every_metric_the_page_reads_is_there() -> None:
    wanted = set(re.findall(r'"(plait_\w+)"', (PAGE / "js" / "engine.js").read_text(encoding="utf-8")))
    wanted.remove("plait_engine_restarts_total")  # only an engine in a process of its own can be replaced
    with serving(engine_front()) as client:
        assert client.complete("Hello", max_tokens=3, ignore_eos=True).status == 200
        families = list(text_string_to_metric_families(client.get("/metrics").body.decode()))
    names = {sample.name for family in families for sample in family.samples}
    histograms = {family.name for family in families if family.type == "histogram"}
    assert len(wanted) > 10
    assert wanted <= names | histograms
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    assert labels["plait_blocks"] == labels["plait_slots"] == {"state"}
    assert labels["plait_prefix_cache_lookups_total"] == {"cause"}


def test_no_limit_of_top_k_is_the_same_value_in_the_page_and_on_the_command_line() -> None:
    row = re.search(r'\["top_k".*\]', (PAGE / "js" / "settings.js").read_text(encoding="utf-8"))
    assert row is not None
    assert "0: no limit" in row[0]
    assert "0: no limit" in SAMPLING_HELP["top_k"]
