"""What comes from the Hugging Face hub: by name, once for all nodes that share HF_HOME, and offline from there on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dray.train.stop import EXIT_FAILED, stop

# The hub keeps each data set as parquet, too, whatever its own format or code: here.
_PARQUET = "refs/convert/parquet"
_PREFETCH = "dray prefetch RECIPE, on a machine that reaches the hub and with the same HF_HOME"


def dataset(said: str, split: str) -> tuple[str, ...]:
    """The parquet files of `hub:OWNER/NAME[/SUBSET][:SPLIT[+SPLIT]]`."""
    name, _, chosen = said.removeprefix("hub:").partition(":")
    owner, _, rest = name.partition("/")
    short, _, subset = rest.partition("/")
    if not owner or not short:
        stop(
            "a data set's name is not whole",
            wanted="hub:OWNER/NAME[/SUBSET][:SPLIT[+SPLIT]]",
            found=said,
            fix="set data.train",
        )
    patterns = [f"{subset or 'default'}/{part}/*.parquet" for part in (chosen or split).split("+")]
    folder = fetched(
        f"data set {owner}/{short}",
        lambda: snapshot_download(f"{owner}/{short}", repo_type="dataset", revision=_PARQUET, allow_patterns=patterns),
    )
    parts = {pattern: sorted(map(str, Path(folder).glob(pattern))) for pattern in patterns}
    missing = [pattern for pattern, found in parts.items() if not found]
    if missing:
        has = sorted({str(path.parent.relative_to(folder)) for path in Path(folder).glob("*/*/*.parquet")})
        stop(
            f"data set {owner}/{short} has no such part",
            wanted=", ".join(missing),
            found=", ".join(has) or "none of it here",
            fix=f"name a subset and a split that https://huggingface.co/datasets/{owner}/{short} has",
        )
    return tuple(file for found in parts.values() for file in found)


def fetched(what: str, fetch: Callable[[], str]) -> str:
    """What `fetch` brings, or a word about why not."""
    try:
        return fetch()
    except GatedRepoError:
        _no(
            what,
            "its owner asks for consent first",
            "accept the terms on its page, and export HF_TOKEN (a run that is online names it in pass_env)",
        )
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        _no(
            what,
            str(error).splitlines()[0],
            "check its name and revision; a private one wants HF_TOKEN exported (in a run: in pass_env)",
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if not constants.HF_HUB_OFFLINE:
            _no(what, str(error).splitlines()[0], "fetch it where there is a network", code=EXIT_FAILED)
        _no(what, f"HF_HUB_OFFLINE is set, and it is not in {constants.HF_HUB_CACHE}", _PREFETCH)
    except (HfHubHTTPError, OSError) as error:
        _no(what, str(error).splitlines()[0] or type(error).__name__, "look at the network", code=EXIT_FAILED)


def _no(what: str, found: str, fix: str, *, code: int = 78) -> NoReturn:
    stop(f"{what} cannot be had", wanted=f"{what} from {constants.ENDPOINT}", found=found, fix=fix, code=code)


def model(name: str, revision: str, *, weights: bool, code: bool) -> str:
    """The folder of a model or tokenizer: a folder's own path, or what the hub has by that name, brought here."""
    if name.startswith(("/", ".")):
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
