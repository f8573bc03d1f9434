"""`python -m dray.train.push FOLDER OWNER/NAME True|False`: a saved model to the hub."""

from __future__ import annotations

import os
import sys

from httpx2 import TransportError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils.tqdm import disable_progress_bars

from dray.train.stop import EXIT_FAILED, stop


def main(folder: str, name: str, *, private: bool) -> None:
    """Its address there."""
    disable_progress_bars()  # a log is no terminal
    if not os.environ.get("HF_TOKEN"):
        stop(
            "nobody may write to the hub without a token",
            wanted="HF_TOKEN, of the kind that may write",
            found="HF_TOKEN is not set",
            fix="make one on the hub's page of tokens, and export HF_TOKEN where you type this",
        )
    try:
        hub = HfApi()
        hub.create_repo(name, private=private, exist_ok=True)
        if private and not hub.repo_info(name).private:
            stop(
                "the repository is there, and all can see it",
                wanted=f"a private {name}, or a word that it may be public",
                found=f"{constants.ENDPOINT}/{name} is public",
                fix="take another name, make that one private on its page, or say --public",
            )
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="A model trained with dray")
    except (HFValidationError, HfHubHTTPError, TransportError, OSError) as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        stop(
            f"the model cannot be pushed to {name}",
            wanted=f"leave to write there, at {constants.ENDPOINT}",
            found=str(error).splitlines()[0] or type(error).__name__,
            fix="take a token that may write for that owner" if refused else "look at the name and at the network",
            code=78 if refused or isinstance(error, HFValidationError) else EXIT_FAILED,
        )
    print(f"{constants.ENDPOINT}/{name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], private=sys.argv[3] == "True")
