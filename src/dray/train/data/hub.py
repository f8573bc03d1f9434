"""What comes from the Hugging Face hub: by name, once for all nodes that share HF_HOME, and offline from there on."""

from __future__ import annotations

import fnmatch
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
from dray.contract.findings import ConfigError, DrayError, listed, nearest
from dray.train.checkpoint import manifest

# The hub's copy of each dataset as parquet, whatever its own format or code; what pins a dataset is a commit of it.
_PARQUET = "refs/convert/parquet"
T = TypeVar("T")
# What it raises where no hub answers is of the library beneath, which had another name before.
_HTTP = import_module("httpx2" if find_spec("httpx2") else "httpx")
FAILURES = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, _HTTP.HTTPError)
_PREFETCH = "dray data prefetch RECIPE, on a machine that reaches the hub and with the same HF_HOME"


def dataset(name: str, split: str, *, streamed: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """The parquet files of `hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]`: of each split its slice, and they.

    They are brought here whole; where they are `streamed`, or a slice is asked for, they are URLs, unless the run is
    offline.
    """
    path, _, chosen = name.removeprefix("hub:").partition(":")
    owner, _, rest = path.partition("/")
    pinned, _, subset = rest.partition("/")
    short, _, commit = pinned.partition("@")
    revision = commit or _PARQUET
    if not owner or not short:
        raise ConfigError(
            "the dataset's name is incomplete",
            wanted="hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]",
            found=name,
            fix="correct the name in [data]",
        )
    slices = [*map(str, (chosen or split).split("+"))]
    splits, page = [one.partition("[")[0] for one in slices], f"https://huggingface.co/datasets/{owner}/{short}"
    patterns = {part: f"{subset or 'default'}/{part}/*.parquet" for part in splits}
    if (streamed or "[" in chosen) and not constants.HF_HUB_OFFLINE:
        folder = f"hf://datasets/{owner}/{short}@"
        commit, names = _listed(f"{owner}/{short}", revision)
        files = {
            part: [f"{folder}{commit}/{one}" for one in fnmatch.filter(names, of)] for part, of in patterns.items()
        }
        has = sorted({one.rpartition("/")[0] for one in names})
    else:
        folder = fetched(
            f"dataset {owner}/{short}",
            lambda: snapshot_download(
                f"{owner}/{short}", repo_type="dataset", revision=revision, allow_patterns=list(patterns.values())
            ),
        )
        files = {part: sorted(map(str, Path(folder).glob(pattern))) for part, pattern in patterns.items()}
        has = [] if all(files.values()) else _splits(f"{owner}/{short}", revision, folder)
    missing = [part for part in splits if not files[part]]
    partial = [part for part in splits if part.startswith("partial-") or f"{subset or 'default'}/partial-{part}" in has]
    if partial:
        parts = [part.removeprefix("partial-") for part in partial]
        raise ConfigError(
            f"the hub has converted only a part of dataset {owner}/{short} to parquet",
            wanted=f"all of {', '.join(parts)} as parquet",
            found="the first gigabytes, in partial-" + ", partial-".join(parts),
            fix=f"name its original files ({page}/tree/main lists them): hf://datasets/{owner}/{short}/FOLDER/*.jsonl",
        )
    if missing:
        raise ConfigError(
            f"dataset {owner}/{short} has no such split",
            wanted=", ".join(patterns[part] for part in missing),
            found=listed(filter(None, dict.fromkeys([nearest(patterns[missing[0]], has), *has])))
            or "none of its files",
            fix=f"name a subset and a split that {page} has"
            if has
            else f"name its original files: {_own(f'{owner}/{short}')}",
        )
    return [(one if "[" in one else "", tuple(files[part])) for one, part in zip(slices, splits, strict=True)]


def _listed(name: str, revision: str) -> tuple[str, list[str]]:
    """The commit of a revision, and its parquet files."""
    about = fetched(f"dataset {name}", lambda: HfApi().dataset_info(name, revision=revision))
    return about.sha or revision, sorted(
        one.rfilename for one in about.siblings or () if one.rfilename.endswith(".parquet")
    )


def _own(name: str) -> str:
    return f"hf://datasets/{name}/FOLDER/*.jsonl (dray never runs a dataset's loading script)"


def _splits(name: str, revision: str, folder: str) -> list[str]:
    """SUBSET/SPLIT of all that the hub has, or of what was fetched before."""
    paths = [path.relative_to(folder) for path in Path(folder).glob("*/*/*.parquet")]
    if not constants.HF_HUB_OFFLINE:
        names = fetched(
            f"dataset {name}", lambda: HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
        )
        paths = [Path(path) for path in names]
    return sorted({str(path.parent) for path in paths if path.suffix == ".parquet"})


def fetched(what: str, fetch: Callable[[], T]) -> T:
    """What `fetch` returns; a failure is an error with its fix."""
    try:
        return fetch()
    except (*FAILURES, OSError) as error:
        failed(what, error)


def failed(what: str, error: Exception, *, offline: str = _PREFETCH) -> NoReturn:
    """Raise the error of a failed fetch; `offline` is the fix if HF_HUB_OFFLINE is set."""
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    match error:
        case GatedRepoError():
            fix = "accept the terms on its page, and export HF_TOKEN (if a run is online, name it in pass_env)"
            _no(what, "its terms are not accepted yet", fix)
        case RevisionNotFoundError() if what.startswith("dataset "):
            _no(what, f"no such revision, or no parquet copy: {first}", f"name its original files: {_own(what[8:])}")
        case RepositoryNotFoundError() | RevisionNotFoundError():
            fix = "check its name and revision; a private one needs HF_TOKEN exported (in a run: in pass_env)"
            _no(what, first, fix)
        case LocalEntryNotFoundError() | OfflineModeIsEnabled() if constants.HF_HUB_OFFLINE:
            _no(what, f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have it", offline)
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            _no(what, first, "fetch it on a machine with a network", code=exit_codes.FAILED)
        case _:
            _no(what, first, "check the network", code=exit_codes.FAILED)


def _no(what: str, found: str, fix: str, *, code: int = exit_codes.CONFIG) -> NoReturn:
    raise DrayError(f"{what} is missing", wanted=f"{what} from {constants.ENDPOINT}", found=found, fix=fix, code=code)


def model(name: str, revision: str, *, weights: bool, code: bool) -> str:
    """The folder of a model or tokenizer: a folder's own path, or what the hub has by that name, brought here."""
    if name.startswith(("/", ".")):
        manifest.check_model(Path(name), weights=weights, required=False)
        return name
    kinds = [
        "*.json",
        "*.txt",
        "*.model",
        "*.jinja",
        *(["*.safetensors"] if weights else []),
        *(["*.py"] if code else []),
    ]
    return fetched(f"model {name}", lambda: snapshot_download(name, revision=revision, allow_patterns=kinds))
