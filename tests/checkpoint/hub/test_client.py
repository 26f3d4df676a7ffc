"""Models by their Hub name: the real library against a small hub of our own on this machine."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.file_download
import pytest

from plait.checkpoint.find_files import find_model, plan_fetch
from plait.checkpoint.hub.cache import cached_models, plan_removal
from plait.checkpoint.hub.client import HubName, advice, ask, is_hub_name, parse_hub_name, quantizations
from plait.errors import CheckpointError, ConfigError, UnsupportedFormat
from tests.checkpoint.hub.fake_hub import FakeHub, Repo, running

CHUNK = 64 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with running() as made:
        yield made


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The library asks the server, keeps files in an empty folder, and never waits before it tries again."""
    server.repos, server.drops, server.broken = {"org/m": Repo()}, 0, None
    server.forget()
    aim(server.url, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return server


def aim(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_TOKEN_PATH": str(folder / "token"),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": CHUNK,
    }.items():
        for module in (huggingface_hub.constants, huggingface_hub.file_download):  # old versions copy some
            if hasattr(module, key):
                monkeypatch.setattr(module, key, value)
    monkeypatch.setenv("HF_TOKEN", "")
    patient = SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0, monotonic=lambda: 0.0)
    monkeypatch.setattr(huggingface_hub.file_download, "time", patient)


def tensors(nbytes: int = 400, name: str = "w") -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)


SMALL = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "tokenizer.model": b"1",
    "chat_template.jinja": b"{{ 1 }}",
}
OTHER_NAMES = (
    *("pytorch_model.bin", "m.gguf", "README.md", "original/params.json", "onnx/model.onnx"),
    *("consolidated.safetensors", "pytorch_model.bin.index.json", "trainer_state.json"),
)
OTHERS = dict.fromkeys(OTHER_NAMES, b"unwanted")


def test_only_what_is_needed_is_fetched(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({**SMALL, **OTHERS, "model.safetensors": tensors()})
    files = find_model("org/m")
    assert set(hub.fetched()) == {*SMALL, "model.safetensors"}
    assert hub.fetched()[-1] == "model.safetensors"  # last: a folder that has its weights is whole
    assert (files.name, files.kind, [p.name for p in files.weights]) == (
        *("org/m", "safetensors"),
        ["model.safetensors"],
    )
    assert set(files.side_files) == set(SMALL) - {"config.json"}


def test_what_is_there_is_not_fetched_again(hub: FakeHub) -> None:
    first = hub.repos["org/m"].commit({**SMALL, "model.safetensors": tensors()})
    find_model("org/m")
    hub.forget()
    find_model("org/m")
    assert hub.fetched() == []
    hub.forget()
    find_model(f"org/m@{first}")  # a commit never changes, so the hub gets no request
    assert hub.asked == []


def test_an_index_says_which_shards_are_needed(hub: FakeHub) -> None:
    shards = {"part-a.safetensors": tensors(name="a"), "part-b.safetensors": tensors(name="b")}
    index = {"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}}
    other = {"model.safetensors.index.json": json.dumps(index).encode(), "spare.safetensors": tensors()}
    hub.repos["org/m"].commit({**SMALL, **shards, **other})
    assert [p.name for p in find_model("org/m").weights] == sorted(shards)
    assert "spare.safetensors" not in hub.fetched()


def test_one_of_many_quantizations_is_named(hub: FakeHub) -> None:
    hub.repos["org/m"].commit(
        {"m-Q4_K_M.gguf": b"GGUF4", "m-Q8_0.gguf": b"GGUF8", "mmproj-F16.gguf": b"GGUF"}
    )
    with pytest.raises(
        ConfigError, match=r"org/m on the Hub holds several models; name one, like org/m:Q4_K_M"
    ):
        find_model("org/m")
    for name in ("org/m:Q8_0", "org/m:q8_0", "org/m/m-Q8_0.gguf"):
        files = find_model(name)
        assert (files.kind, files.name, files.weights[0].read_bytes()) == ("gguf", name, b"GGUF8")
    assert set(hub.fetched()) == {"m-Q8_0.gguf"}
    with pytest.raises(ConfigError, match=r"no file 'm-Q2_K\.gguf'; it has: m-Q4_K_M\.gguf"):
        find_model("org/m/m-Q2_K.gguf")
    with pytest.raises(ConfigError, match=r"has no Q2_K; it has: Q4_K_M, Q8_0"):
        find_model("org/m:Q2_K")


def test_all_parts_of_a_quantization_in_a_folder_are_fetched(hub: FakeHub) -> None:
    names = ("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "Q8_0/m-Q8_0.gguf")
    hub.repos["org/m"].commit(dict.fromkeys(names, b"GGUF"))
    assert len(find_model("org/m:bf16").weights) == 2
    assert set(hub.fetched()) == set(names[:2])


def test_quantizations_are_known_from_file_names() -> None:
    names = ["m-Q4_K_M.gguf", "m.IQ2_XXS.gguf", "m-UD-Q4_K_XL.gguf", "Qwen3-8B-Q8_0.gguf", "x-f16.gguf"]
    names += ["m-mxfp4.gguf", "imatrix-Q4_0.gguf", "plain.gguf", "m-Q4_0-00002-of-00002.gguf", "Q6_K.txt"]
    assert set(quantizations(names)) == {"Q4_K_M", "IQ2_XXS", "UD-Q4_K_XL", "Q8_0", "f16", "mxfp4"}


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub) -> None:
    repo = hub.repos["org/m"]
    old = repo.commit({**SMALL, "model.safetensors": tensors(300)}, "v1", "refs/pr/1")
    repo.commit({**SMALL, "model.safetensors": tensors(301)})
    for name in ("org/m@v1", f"org/m@{old}", "org/m/model.safetensors@v1"):
        assert find_model(name).weights[0].stat().st_size == len(tensors(300)), name
    assert find_model("org/m").weights[0].stat().st_size == len(tensors(301))
    with pytest.raises(CheckpointError, match="it has no branch, tag or commit 'v9'"):
        find_model("org/m@v9")


def test_a_dropped_connection_is_taken_up_where_it_broke(hub: FakeHub) -> None:
    data = tensors(10 * CHUNK)
    hub.repos["org/m"].commit({"model.safetensors": data})
    hub.drops = 1
    assert find_model("org/m").weights[0].read_bytes() == data
    ranges = [r for _, path, r in hub.asked if path.startswith("/cdn/") and r]
    assert len(ranges) == 1
    assert hub.served < 1.3 * len(data)


def test_a_fetch_that_was_given_up_goes_on_the_next_time(hub: FakeHub) -> None:
    data = tensors(10 * CHUNK)
    hub.repos["org/m"].commit({**SMALL, "model.safetensors": data})
    hub.drops = 100
    with pytest.raises(
        CheckpointError, match=r"cannot fetch org/m .*what has arrived is kept: `plait pull org/m`"
    ):
        find_model("org/m")
    (left,) = cached_models()
    assert left.unfinished > len(data) // 3
    hub.forget()
    hub.drops = 0
    assert find_model("org/m").weights[0].read_bytes() == data
    assert hub.served < len(data) * 2 // 3
    assert cached_models()[0].unfinished == 0


def test_bytes_that_went_wrong_on_this_disk_are_noticed(hub: FakeHub, tmp_path: Path) -> None:
    data = tensors(10 * CHUNK)
    hub.repos["org/m"].commit({"model.safetensors": data})
    hub.drops = 100
    with pytest.raises(CheckpointError):
        find_model("org/m")
    hub.drops = 0
    (partial,) = (tmp_path / "hub" / "models--org--m" / "blobs").glob("*.incomplete")
    partial.write_bytes(bytes(partial.stat().st_size))
    with pytest.raises(CheckpointError, match="its SHA-256 differs; it was removed"):
        find_model("org/m")
    assert find_model("org/m").weights[0].read_bytes() == data


def test_an_unfinished_model_is_not_taken_for_a_whole_one(hub: FakeHub) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": tensors(2000, f"w{n}") for n in (1, 2)}
    commit = hub.repos["org/m"].commit({**SMALL, **shards})
    folder = find_model(f"org/m@{commit}").directory
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*`plait pull org/m@.*` fetches what"):
        find_model(f"org/m@{commit}", offline=True)
    assert len(find_model(f"org/m@{commit}").weights) == 2


@pytest.mark.parametrize("how", ["option", "environment", "network", "503"])
def test_without_a_network_the_copy_on_disk_is_used(
    how: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/m"].commit({**SMALL, **OTHERS, "model.safetensors": tensors()})
    find_model("org/m")
    hub.forget()
    match how:
        case "environment":
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        case "network":
            aim("http://127.0.0.1:9", tmp_path, monkeypatch)
        case "503":
            hub.broken = 503
    assert [p.name for p in find_model("org/m", offline=how == "option").weights] == ["model.safetensors"]
    if how == "option":
        assert hub.asked == []
    with pytest.raises(CheckpointError, match=r"not on this disk|this disk has no copy"):
        find_model("org/other", offline=how == "option")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", r"no connection .*check the network.*this disk has no copy"),
        (None, "HTTP 503|503"),
    ],
)
def test_a_hub_that_does_not_answer(
    url: str | None, message: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url is None:
        hub.broken = 503
    else:
        aim(url, tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        find_model("org/m")


def test_a_gated_model_says_what_to_do(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/m"] = Repo(gated=True)
    hub.repos["org/m"].commit({"model.safetensors": tensors()})
    with pytest.raises(
        CheckpointError, match=r"it is gated \(HTTP 403\): accept its terms.*hf auth login.*HF_TOKEN"
    ):
        find_model("org/m")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert find_model("org/m").weights


def test_a_model_that_is_not_there(hub: FakeHub) -> None:
    with pytest.raises(
        CheckpointError, match=r"no such repository, or it is private \(HTTP 401\): check the name"
    ):
        find_model("org/nothing")


@pytest.mark.parametrize("commit", ["../../../../out", "/out", "main", "", "A" * 40])
def test_a_hub_that_names_no_commit_writes_nothing(hub: FakeHub, tmp_path: Path, commit: str) -> None:
    hub.repos["org/m"] = Repo({commit: {**SMALL, "model.safetensors": tensors()}}, {"main": commit})
    with pytest.raises(CheckpointError, match="as the commit of org/m, which is none"):
        find_model("org/m")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_disk_that_is_too_small_is_known_before(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/m"].commit({"model.safetensors": tensors()})
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"0\.00 GB free: free some \(`plait list`, `plait rm`\)"):
        find_model("org/m")
    assert hub.fetched() == []


def test_a_repository_of_pickles_is_refused_before_fetching(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({"pytorch_model.bin": b"PK", "config.json": b"{}"})
    with pytest.raises(UnsupportedFormat, match="org/m on the Hub has only"):
        find_model("org/m")
    assert hub.fetched() == []


def test_what_would_be_fetched_is_known_with_its_size(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({**SMALL, **OTHERS, "model.safetensors": tensors()})
    plan = plan_fetch(HubName("org/m"), ask(HubName("org/m")))
    assert plan.sizes["model.safetensors"] == len(tensors())
    assert set(plan.missing) == {*SMALL, "model.safetensors"}
    assert hub.fetched() == []


def test_what_is_here_is_listed_by_revision(hub: FakeHub) -> None:
    repo = hub.repos["org/m"]
    old = repo.commit({**SMALL, "model.safetensors": tensors(3000)}, "v1")
    new = repo.commit({**SMALL, "model.safetensors": tensors(4000)})
    hub.repos["a/b"] = Repo()
    hub.repos["a/b"].commit({"b-Q8_0.gguf": b"GGUF"})
    for name in ("org/m@v1", "org/m", "a/b:Q8_0"):
        find_model(name)
    models = cached_models()
    assert (models[0].repo, models[0].kind, models[0].quantizations) == ("a/b", "gguf", ("Q8_0",))
    assert {(m.commit, m.refs) for m in models[1:]} == {(old, ("v1",)), (new, ("main",))}
    assert {m.files["model.safetensors"] for m in models[1:]} == {len(tensors(3000)), len(tensors(4000))}


def test_models_are_listed_while_a_fetch_ends(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was partial gets its name between two looks at the folder."""
    hub.repos["org/m"].commit({"model.safetensors": tensors()})
    hub.repos["org/m2"] = Repo()
    hub.repos["org/m2"].commit({"model.safetensors": tensors(500)})
    blobs = find_model("org/m").weights[0].resolve().parent
    find_model("org/m2")
    plain = Path.glob

    def glob(path: Path, pattern: str) -> list[Path]:
        found = list(plain(path, pattern))
        for one in found if pattern == "*.incomplete" else ():
            one.replace(one.with_suffix(""))
        return found

    monkeypatch.setattr(Path, "glob", glob)
    (blobs / "00.incomplete").write_bytes(b"rest")
    assert [(model.repo, model.unfinished) for model in cached_models()] == [("org/m", 0), ("org/m2", 0)]


def test_removing_a_revision_leaves_what_another_shares(hub: FakeHub, tmp_path: Path) -> None:
    repo = hub.repos["org/m"]
    shared = {**SMALL, "tokenizer.json": b"[" + b" " * 5000 + b"]"}
    repo.commit({**shared, "model.safetensors": tensors(3000)}, "v1")
    repo.commit({**shared, "model.safetensors": tensors(4000)})
    hub.repos["org/m2"] = Repo()
    hub.repos["org/m2"].commit({"model.safetensors": tensors(500)})
    for name in ("org/m@v1", "org/m", "org/m2"):
        find_model(name)
    plan = plan_removal(parse_hub_name("org/m@v1"))
    assert plan.nbytes == len(tensors(3000))
    plan.execute()
    assert [m.refs for m in cached_models()] == [("main",), ("main",)]
    left = find_model("org/m", offline=True)
    assert left.side_files["tokenizer.json"].stat().st_size == 5002
    plan_removal(parse_hub_name("org/m")).execute()
    assert [m.repo for m in cached_models()] == ["org/m2"]
    assert not (tmp_path / "hub" / "models--org--m").exists()
    assert find_model("org/m2", offline=True).weights


def test_one_quantization_can_go(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({"m-Q4_0.gguf": b"GGUF4" * 200, "m-Q8_0.gguf": b"GGUF8" * 300})
    find_model("org/m:Q4_0")
    find_model("org/m:Q8_0")
    plan = plan_removal(parse_hub_name("org/m:Q4_0"))
    assert (plan.what, plan.nbytes) == (("org/m/m-Q4_0.gguf",), 1000)
    plan.execute()
    assert cached_models()[0].quantizations == ("Q8_0",)
    assert find_model("org/m:Q8_0", offline=True).weights[0].read_bytes() == b"GGUF8" * 300


def test_what_is_not_here_cannot_go(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({"model.safetensors": tensors()})
    for name in ("org/m", "org/m:Q4_0", "org/m@v1"):
        with pytest.raises(CheckpointError, match="is not on this disk"):
            plan_removal(parse_hub_name(name))
    find_model("org/m")
    with pytest.raises(CheckpointError, match="no such revision on this disk; it has main"):
        plan_removal(parse_hub_name("org/m@v1"))


def test_a_name_with_two_revisions_is_refused() -> None:
    assert (
        parse_hub_name("o/n:Q8_0@v1") == parse_hub_name("o/n@v1:Q8_0") == HubName("o/n", "v1", None, "Q8_0")
    )
    assert parse_hub_name("o/n/s/f.gguf@refs/pr/2") == HubName("o/n", "refs/pr/2", "s/f.gguf")
    with pytest.raises(ConfigError, match="names two revisions"):
        parse_hub_name("org/name@a:Q8_0@b")


def test_rate_limits_are_known_from_refusals() -> None:
    error = OSError("no")
    error.response = SimpleNamespace(status_code=429)  # type: ignore[attr-defined]
    assert advice(error, HubName("org/m")).startswith("too many requests (HTTP 429): wait a little")


def test_without_the_library_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'plait-engine\[hub\]'; or pass the directory"):
        find_model("org/some-model")


def test_a_mistyped_path_never_asks_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match="no such file"):
        find_model("models/typo")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("org/name", True), ("org/name-1.5_b", True), ("org/name/file.gguf", True), ("org/n/s/f.gguf", True),
        ("name", False), ("./org/name", False), ("/org/name", False), ("org/../name", False),
        ("org/name:Q4_K_M", True), ("org/name@v1", True),
        ("org/name@v1:Q4_K_M", True), ("org/name/f.gguf@refs/pr/1", True), ("org/name@", False),
        ("org/name/file.bin", False), ("org/name/", False), ("~/name", False), ("o g/name", False),
        ("", False),
    ],
)  # fmt: skip
def test_what_looks_like_a_hub_name(text: str, is_name: bool) -> None:
    assert is_hub_name(text) is is_name


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf.co/org/name", "org/name"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("https://huggingface.co/org/name/", "org/name"),
        ("https://hf.co/org/name/tree/v1.0", "org/name@v1.0"),
        ("https://huggingface.co/org/name/resolve/main/s/f.gguf?download=true", "org/name/s/f.gguf@main"),
        ("https://huggingface.co/org/name/blob/refs%2Fpr%2F1/f.gguf#L1", "org/name/f.gguf@refs/pr/1"),
    ],
)
def test_an_address_of_the_hub_is_the_name_it_shows(address: str, name: str) -> None:
    assert is_hub_name(address)
    assert str(parse_hub_name(address)) == name


@pytest.mark.parametrize("address", ["https://huggingface.co/org", "https://hf.co/datasets/org/name"])
def test_an_address_that_is_no_model_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="give the address of a repository"):
        parse_hub_name(address)


def test_the_address_of_another_hub_is_one_of_the_hub_that_is_queried(hub: FakeHub) -> None:
    hub.repos["org/m"].commit({"m.gguf": b"GGUF" + bytes(600)})
    assert find_model(f"{hub.url}/org/m/resolve/main/m.gguf").weights[0].name == "m.gguf"
