"""Web addresses of models: those of the Hub as Hub names, and GGUF files anywhere else."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from plait.errors import ConfigError

_HUB_HOSTS = frozenset({"hf.co", "www.hf.co", "huggingface.co", "www.huggingface.co"})
_FILE_WORDS, _TREE_WORDS = ("resolve", "blob", "raw"), ("tree", "commit")
_NO_MODELS = ("datasets", "spaces", "docs", "papers", "collections")


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
        raise ConfigError(
            f"{text!r} is not a model; wanted is the address of a repository or of a file in it"
        )
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
