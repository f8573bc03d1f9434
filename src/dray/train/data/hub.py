"""What comes from the Hugging Face hub: by name, once for all nodes that share HF_HOME, and offline from there on."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError, listed
from dray.train.checkpoint import manifest

# The hub's copy of each dataset as parquet, whatever its own format or code; @REVISION is a commit of this branch.
_PARQUET = "refs/convert/parquet"
_NAME = re.compile("hub:([^/@:]+/[^/@:]+)(?:@([^/:]+))?(?:/([^:]+))?(?::(.+))?")
_FORM = "hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]"
T = TypeVar("T")
# If no server answers, huggingface_hub raises errors of httpx2, and older ones of httpx.
_HTTP = import_module("httpx2" if find_spec("httpx2") else "httpx")
FAILURES = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, _HTTP.HTTPError)
_PREFETCH = "dray data prefetch RECIPE, on a machine that reaches the hub and with the same HF_HOME"


def dataset(name: str, split: str, *, streamed: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """The parquet files of `hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]`: for each split its slice, or an empty
    text, and its files.

    They are downloaded; where they are `streamed`, or a slice is asked for, they are URLs, unless the run is offline.
    """
    parts = _NAME.fullmatch(name)
    if not parts:
        raise ConfigError(
            "the dataset's name is incomplete", wanted=_FORM, found=name, fix="correct the name in [data]"
        )
    repository, revision, subset, chosen = parts.groups()
    slices = (chosen or split).split("+")
    patterns = [f"{subset or 'default'}/{part.partition('[')[0]}/*.parquet" for part in slices]
    what, revision = f"dataset {repository}", revision or _PARQUET
    online = not constants.HF_HUB_OFFLINE
    if online:
        about = fetched(what, lambda: HfApi().dataset_info(repository, revision=revision))
        folder = f"hf://datasets/{repository}@{about.sha}"
        files = _files(repository, patterns, [file.rfilename for file in about.siblings or ()])
    if not (online and (streamed or "[" in (chosen or ""))):
        folder = fetched(
            what,
            lambda: snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=patterns),
        )
        names = [str(path.relative_to(folder)) for path in Path(folder).rglob("*.parquet")]
        files = _files(repository, patterns, names)
    return [
        (part if "[" in part else "", tuple(f"{folder}/{file}" for file in own))
        for part, own in zip(slices, files, strict=True)
    ]


def _files(repository: str, patterns: list[str], names: list[str]) -> list[list[str]]:
    """The files of each pattern, in order; refuse a split without files."""
    # Of a large dataset the hub converts only the first gigabytes, as the split partial-train.
    whole = [name for name in names if name.endswith(".parquet") and "/partial-" not in name]
    files = [sorted(fnmatch.filter(whole, pattern)) for pattern in patterns]
    if not all(files):
        raise ConfigError(
            f"dataset {repository} has no such split, or the hub has converted only a part of it",
            wanted=", ".join(pattern for pattern, own in zip(patterns, files, strict=True) if not own),
            found=listed(sorted({name.rpartition("/")[0] for name in whole})) or "none of its files",
            fix=f"name a subset and a split of these; or name its original files: {_own(repository)}",
        )
    return files


def _own(name: str) -> str:
    return f"hf://datasets/{name}/FOLDER/*.jsonl (dray never runs a dataset's loading script)"


def fetched(what: str, fetch: Callable[[], T]) -> T:
    """What `fetch` returns; a failure is an error with its fix."""
    try:
        return fetch()
    except (*FAILURES, OSError) as error:
        failed(what, error)


def failed(what: str, error: Exception, *, offline: str = _PREFETCH) -> NoReturn:
    """Raise the error of a failed fetch; `offline` is the fix if HF_HUB_OFFLINE is set."""
    found, code = (str(error).splitlines() or [""])[0] or type(error).__name__, exit_codes.CONFIG
    match error:
        case GatedRepoError():
            found = "its terms are not accepted yet"
            fix = "accept the terms on its page, and export HF_TOKEN (if a run is online, name it in pass_env)"
        case RevisionNotFoundError() if what.startswith("dataset "):
            found = f"no such revision, or no parquet copy: {found}"
            fix = f"name its original files: {_own(what[8:])}"
        case RepositoryNotFoundError() | RevisionNotFoundError():
            fix = "check its name and revision; a private one needs HF_TOKEN exported (in a run: in pass_env)"
        case LocalEntryNotFoundError() | OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            found, fix = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have it", offline
        case _:
            fix, code = "check the network", exit_codes.FAILED
    raise DrayError(f"{what} is missing", wanted=f"{what} from {constants.ENDPOINT}", found=found, fix=fix, code=code)


def model(name: str, revision: str, *, weights: bool, code: bool) -> str:
    """The folder of a model or tokenizer: a folder's own path, or what the hub has by that name, downloaded."""
    if name.startswith(("/", ".")):
        manifest.check_model(Path(name), weights=weights, required=False)
        return name
    kinds = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights + ["*.py"] * code
    return fetched(f"model {name}", lambda: snapshot_download(name, revision=revision, allow_patterns=kinds))
