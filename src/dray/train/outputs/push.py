"""Push a saved model to the hub."""

from __future__ import annotations

import os
from pathlib import Path

from httpx2 import TransportError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from dray.contract.exit_codes import CONFIG, FAILED
from dray.contract.findings import ConfigError, DrayError
from dray.contract.trainer.image_tasks import Push
from dray.train.checkpoint import manifest


def run(job: Push) -> None:
    """Print its address."""
    manifest.check_model(Path(job.model))
    if not os.environ.get("HF_TOKEN"):
        raise ConfigError(
            "pushing a model to the hub needs a token",
            wanted="HF_TOKEN with permission to write",
            found="HF_TOKEN is not set",
            fix="create a token on the hub's page of tokens, and export HF_TOKEN=...",
        )
    try:
        hub = HfApi()
        hub.create_repo(job.name, private=job.private, exist_ok=True)
        if job.private and not hub.repo_info(job.name).private:
            raise ConfigError(
                "the repository exists and is public",
                wanted=f"a private {job.name}",
                found=f"{constants.ENDPOINT}/{job.name} is public",
                fix="use another name, make the repository private on its page, or add --public",
            )
        hub.upload_folder(
            repo_id=job.name,
            folder_path=job.model,
            commit_message="A model trained with dray",
            ignore_patterns=manifest.NAME,  # the hub has files of its own beside these
        )
    except (HFValidationError, HfHubHTTPError, TransportError, OSError) as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        raise DrayError(
            f"the model cannot be pushed to {job.name}",
            wanted=f"permission to write, at {constants.ENDPOINT}",
            found=str(error).splitlines()[0] or type(error).__name__,
            fix="use a token that may write for that owner" if refused else "check the name and the network",
            code=CONFIG if refused or isinstance(error, HFValidationError) else FAILED,
        ) from error
    print(f"{constants.ENDPOINT}/{job.name}", flush=True)
