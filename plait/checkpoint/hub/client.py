"""Models by their Hub name, through `huggingface_hub`, which caches, resumes, authenticates and redirects.

Written for its versions 0.30 to 2.x, so it uses only calls that all of them have. Errors are recognized by
their class names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from plait.errors import CheckpointError, ConfigError, clip_text, list_some

_HUB_HOSTS = frozenset({"hf.co", "www.hf.co", "huggingface.co", "www.huggingface.co"})
_FILE_WORDS, _TREE_WORDS = ("resolve", "blob", "raw"), ("tree", "commit")
_NO_MODELS = ("datasets", "spaces", "docs", "papers", "collections")
_WORD, _REVISION = r"[\w][\w.-]*", r"[\w][\w./-]*?"
_NAME = re.compile(
    rf"(?P<repo>{_WORD}/[\w][\w.-]*)(?:@(?P<first>{_WORD}))?"
    r"(?:/(?P<file>[\w][\w./+ -]*\.(?:gguf|safetensors))|:(?P<quant>[\w][\w.-]*))?"
    rf"(?:@(?P<last>{_REVISION}))?"
)
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.(?:gguf|safetensors)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# How a GGUF file is quantized, as the end of its name says: model-UD-Q4_K_XL.gguf, model.IQ2_M-00001-of-…
_QUANT = re.compile(
    r"(?:^|[-._/])(?P<quant>(?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|FP?16|FP?32)\w*)$", re.IGNORECASE
)
_NOT_MODELS = ("mmproj", "imatrix")
# of the HTTP clients of the library's versions: requests, httpx and its successor
_NO_CONNECTION = frozenset(
    ("ConnectError", "ConnectionError", "TimeoutException", "Timeout", "ProxyError", "NetworkError")
)


class HubName(Struct, frozen=True):
    """`org/name`, with `@revision` (branch, tag, commit), and `:QUANT` or `/file.gguf` to choose one file."""

    repo: str
    revision: str | None = None
    file: str | None = None
    quant: str | None = None

    @property
    def is_pinned(self) -> bool:
        """The revision is a whole commit id, so what it holds never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        chosen = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return f"{self.repo}{chosen}" + (f"@{self.revision}" if self.revision else "")


class Listing(Struct, frozen=True):
    """What a repository holds at one commit: file name -> bytes, None where the Hub does not say."""

    commit: str
    sizes: Mapping[str, int | None]


def is_hub_name(text: str) -> bool:
    """Does it look like org/name, perhaps with @revision and :QUANT or /file.gguf, or like its address?"""
    name = _parse_address(text)
    return _NAME.fullmatch(name) is not None and ".." not in name


def parse_hub_name(text: str) -> HubName:
    """The parts of a Hub name or address. Raises ConfigError."""
    name = _parse_address(text)
    match = _NAME.fullmatch(name)
    if match is None or ".." in name:
        raise ConfigError(
            f"{text!r} is not a name on the Hub; give org/name, org/name:Q4_K_M or org/name/file.gguf, "
            "each with @revision if need be, or the address of one of these"
        )
    if match["first"] and match["last"]:
        raise ConfigError(f"{text!r} names two revisions; keep one of them")
    return HubName(match["repo"], match["first"] or match["last"], match["file"], match["quant"])


def name_files(name: HubName, names: Collection[str]) -> list[str]:
    """The files that a name with a file or a quantization chooses, all parts. Raises ConfigError."""
    where = f"{name.repo} on the Hub"
    if name.file is not None:
        if name.file not in names:
            raise ConfigError(f"{where} has no file {name.file!r}; it has: {list_some(sorted(names), 12)}")
        return with_parts(name.file, names)
    found = quantizations(names)
    wanted = (name.quant or "").lower()
    models = sorted({m for quant, files in found.items() if quant.lower() == wanted for m in files})
    if not models:
        raise ConfigError(
            f"{where} has no {name.quant}; it has: {list_some(list(found), 12) or 'no GGUF file'}"
        )
    if len(models) > 1:
        raise ConfigError(f"{where} has several models in {name.quant}; name one: {list_some(models, 12)}")
    return with_parts(models[0], names)


def quantizations(names: Collection[str]) -> dict[str, list[str]]:
    """The GGUF models among these names by their quantization; of a split model, the first part stands."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        base = name.rpartition("/")[2]
        if not name.endswith(".gguf") or base.lower().startswith(_NOT_MODELS):
            continue
        match = _PART.fullmatch(name)
        if match and "-00001-of-" not in base:
            continue
        stem = match["stem"] if match else name.removesuffix(".gguf")
        if quant := _QUANT.search(stem):
            found.setdefault(quant["quant"], []).append(name)
    return found


def with_parts(file: str, names: Collection[str]) -> list[str]:
    """A file and, if its name says that it is one of several, the others."""
    match = _PART.fullmatch(file)
    if match is None:
        return [file]
    stem = match["stem"]
    return sorted(n for n in names if (other := _PART.fullmatch(n)) and other["stem"] == stem)


def cache_folder(name: str = "the Hub's cache") -> Path:
    """Where the library keeps what it fetched. Raises ConfigError without the library."""
    library(name)
    return Path(import_module("huggingface_hub.constants").HF_HUB_CACHE).expanduser()


def repo_folder(name: HubName) -> Path:
    """Where the library keeps this repository, there or not."""
    return cache_folder(str(name)) / f"models--{name.repo.replace('/', '--')}"


def cached_folder(name: HubName) -> Path | None:
    """The folder of this revision on this disk, whole or not; None if nothing of it is here."""
    folder, revision = repo_folder(name), name.revision or "main"
    commit = revision
    if not name.is_pinned:
        try:
            commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    found = folder / "snapshots" / commit
    return found if commit and os.path.isdir(found) else None


def cached_names(folder: Path) -> Iterator[str]:
    """The files of a cached revision, by their names in the repository."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def ask(name: HubName) -> Listing:
    """What the Hub has under this name. Raises CheckpointError with a message that says what to do."""
    hub = library(str(name))
    try:
        found = hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:  # the library's own, its HTTP client's and the system's
        raise CheckpointError(f"cannot ask the Hub for {name}: {advice(error, name)}") from error
    if not _COMMIT.fullmatch(str(found.sha)):  # it becomes a folder's name
        raise CheckpointError(
            f"the Hub has {clip_text(ascii(found.sha), 60)} as the commit of {name}, which is none; look at "
            "HF_ENDPOINT, or use the true Hub"
        )
    return Listing(str(found.sha), {s.rfilename: s.size for s in found.siblings or ()})


def advice(error: BaseException, name: HubName) -> str:
    """One line: what went wrong, and what helps."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    kinds = {cls.__name__ for e in chain for cls in type(e).__mro__}
    answers = (getattr(e, "response", None) for e in chain)
    status = next((answer.status_code for answer in answers if answer is not None), None)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set, so the Hub is not queried; unset it to fetch"
    if "GatedRepoError" in kinds:
        return f"it is gated (HTTP {status}): accept its terms on its page on the Hub, then {login}"
    if "RevisionNotFoundError" in kinds:
        wanted = name.revision or "main"
        return f"it has no branch, tag or commit {wanted!r}; without @REVISION it is the default one"
    if "RepositoryNotFoundError" in kinds or status in (401, 403, 404):
        return f"there is no such repository, or it is private (HTTP {status}): check the name; or {login}"
    if status == 429:
        return f"too many requests (HTTP 429): wait a little, or {login}"
    text = clip_text(" ".join(str(error).split())) or type(error).__name__
    if kinds & _NO_CONNECTION:
        return f"no connection ({text}): check the network and proxies (HTTPS_PROXY), or pass --offline"
    return text


def _parse_address(text: str) -> str:
    """A Hub address as a name; it may be the address of another Hub, which the library asks instead."""
    is_other = "://" in text and find_spec("huggingface_hub") is not None
    return hub_text(text, import_module("huggingface_hub.constants").ENDPOINT if is_other else None)


def library(model: str) -> ModuleType:
    """`huggingface_hub`. Raises ConfigError if it is not installed."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{model!r} is not a path here. To fetch it from the Hub: pip install 'plait-engine[hub]'; "
            "or pass the directory or file of a model."
        ) from error
    module: ModuleType = huggingface_hub
    return module


def hub_text(text: str, endpoint: str | None = None) -> str:
    """A Hub address as a Hub name (`org/name/file.gguf@main`); any other text as it is.

    Known: `hf.co/org/name:Q4_K_M`, and addresses with https of repositories, branches and files as a browser
    shows them. `endpoint`: the address of another Hub. Raises ConfigError for pages that are no model.
    """
    scheme, _, rest = text.rpartition("://")
    host, _, path = rest.partition("/")
    hosts = _HUB_HOSTS | ({urlsplit(endpoint).netloc} if endpoint and scheme else set())
    if scheme not in ("", "http", "https") or host.lower() not in hosts:
        return text
    parts = [unquote(part) for part in path.split("#")[0].split("?")[0].rstrip("/").split("/")]
    if len(parts) < 2 or parts[0] in _NO_MODELS:
        raise ConfigError(f"{text!r} is not a model; give the address of a repository or of a file in it")
    repo, words = "/".join(parts[:2]), parts[2:]
    if not words:
        return repo
    if words[0] in _TREE_WORDS and len(words) == 2:
        return f"{repo}@{words[1]}"
    if words[0] in _FILE_WORDS and len(words) > 2:
        return f"{repo}/{'/'.join(words[2:])}@{words[1]}"
    return "/".join(parts)


def is_file_address(text: str) -> bool:
    """Whether it is the web address of a GGUF file, on any host."""
    found = urlsplit(text) if text.startswith(("http://", "https://")) else None
    return found is not None and bool(found.netloc) and found.path.lower().endswith(".gguf")
