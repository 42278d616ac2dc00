"""Periodic upload of the monitor's newest checkpoint to the Hugging Face Hub, with a model card.

An upload runs in a thread and never blocks the monitor. It uploads a copy of the checkpoint's files, so the checkpoint
may be removed during the upload. huggingface_hub finds the token: HF_TOKEN, or that of `hf auth login`.
"""

import json
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hivemind.utils import get_logger
from huggingface_hub import HfApi, ModelCard, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars

from cotrain.common.atomic_files import temporary_folder
from cotrain.common.backoff import Backoff
from cotrain.common.errors import TemporaryError, UserError, describe
from cotrain.common.json_file import read_records, write_json
from cotrain.common.run_folder import list_checkpoints
from cotrain.monitoring.contributors import Contributors
from cotrain.monitoring.model_card import CardMetadata, build_card, build_card_data
from cotrain.training.checkpoints import STATE_FILE

logger = get_logger(__name__)

# Seconds to connect, to read and to write a byte, and to wait for another request. huggingface_hub has no limit.
TIMEOUTS = (10.0, 120.0, 120.0, None)
CLOSE_TIMEOUT = 2.0  # seconds for an upload to finish when the monitor stops; the next start repeats it
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds between attempts; each failure doubles the pause

# Not uploaded by default: the training state is three times as large as the model, and the files name its donor.
_STATE_FILES = (STATE_FILE, "collaboration.json")
_REMEDY = "run `hf auth login`, or set HF_TOKEN, with a token that may write (settings of your account, Access Tokens)"
_REASONS = {  # HTTP status -> why the Hub refuses
    401: f"the Hub does not accept the token: {_REMEDY}",
    403: f"the token may not write to '%s': pass a repository of your own, or {_REMEDY}",
    404: "the Hub has no repository '%s'",
    429: "rate-limited by the Hub (429)",
}


def require_token(flag: str) -> None:
    """:raises UserError: if this machine has no token of the Hugging Face Hub"""
    if get_token() is None:
        raise UserError(f"{flag}: {describe_refusal(LocalTokenNotFoundError(), '')}")


def check_repo(metadata: CardMetadata, private: bool = False) -> None:
    """Create the repository if it does not exist, and check write access. An unreachable Hub causes a warning only.

    :raises UserError: if there is no token, the token has no write access, or the Hub refuses the card's metadata
    """
    repo_id = metadata.repo_id
    try:
        api = _open_repo(repo_id, private)
        api.auth_check(repo_id, write=True)  # create_repo also succeeds for another user's repository
        try:
            ModelCard(f"---\n{build_card_data(metadata).to_yaml()}\n---\n").validate()
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the Hub does not know this --license or --language: {reason}") from None
    except UserError:
        raise
    except Exception as error:
        reason = describe_refusal(error, repo_id)
        if not isinstance(reason, TemporaryError):
            raise UserError(f"--repo_id: {reason}") from None
        logger.warning(f"Cannot check whether '{repo_id}' may be written to: {reason}. Uploads will be tried")


def _open_repo(repo_id: str, private: bool) -> HfApi:
    disable_progress_bars()
    get_session().timeout = TIMEOUTS
    api = HfApi(token=True)
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    return api


def describe_refusal(error: Exception, repo_id: str) -> UserError:
    """Return one line for an error, with the remedy where one is known; a TemporaryError if it may pass by itself."""
    known = (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled)
    while not isinstance(error, known) and error.__cause__ is not None:
        error = error.__cause__  # a failed transfer is a RuntimeError, by the Hub's response
    if isinstance(error, LocalTokenNotFoundError):
        return UserError(f"no token of the Hugging Face Hub was found: {_REMEDY}")
    if isinstance(error, OfflineModeIsEnabled):
        return UserError("HF_HUB_OFFLINE is set: unset it")
    if not isinstance(error, HfHubHTTPError):
        return TemporaryError(describe(error).removesuffix(" (--debug shows where)"))
    status, message = error.response.status_code, " ".join(str(error.server_message or error).split())[:200]
    reason = _REASONS.get(status, f"the Hub refused ({status}): {message}").replace("%s", repo_id)
    return TemporaryError(reason) if status in (404, 429) or status >= 500 else UserError(reason)


class HubUploader:
    """Keeps a repository on the Hub up to date with the newest checkpoint. A failure is one log line and never raises.

    :param folder: of the checkpoints
    :param interval: seconds between two uploads
    :param private: whether a repository that has to be created is private
    :param has_state: whether the training state is uploaded, too
    """

    def __init__(
        self,
        metadata: CardMetadata,
        contributors: Contributors,
        initial_peers: Sequence[str],
        folder: Path,
        interval: float,
        private: bool = False,
        has_state: bool = False,
    ):
        self.metadata, self.contributors, self.initial_peers = metadata, contributors, initial_peers
        self.folder, self.interval, self.private, self.has_state = folder, interval, private, has_state
        self.uploaded: str | None = None  # the checkpoint's name
        self._thread: threading.Thread | None = None
        self._due_at = float("-inf")
        self.backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def update(self, page: str | None, run_is_over: bool) -> None:
        """Start an upload if one is due.

        :param page: address of the run's curves, for the model card
        :param run_is_over: the last checkpoint need not wait for the interval
        """
        is_due = self.backoff.is_over and (run_is_over or time.monotonic() >= self._due_at)
        if is_due and not self.is_running:
            newest = next(iter(list_checkpoints(self.folder)), None)
            if newest is not None and newest.name != self.uploaded:
                self._thread = threading.Thread(target=self._upload, args=(newest, page), daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait CLOSE_TIMEOUT seconds for the upload in progress. It ends with the process."""
        if self.is_running:
            self._thread.join(CLOSE_TIMEOUT)
        if self.is_running:
            logger.warning("Ended the upload in progress: the next start repeats it")

    def _upload(self, checkpoint: Path, page: str | None) -> None:
        started, repo_id = time.monotonic(), self.metadata.repo_id
        state_files = () if self.has_state else _STATE_FILES
        # A checkpoint that was downloaded from the Hub has a card and a hidden folder.
        left_out = shutil.ignore_patterns(".*", "README.md", *state_files)
        try:
            step = int(checkpoint.name.rsplit("-", 1)[-1])
            records = [record for record in read_records(self.folder / "metrics.jsonl") if record["step"] <= step]
            loss = records[-1].get("loss") if records else None
            card = build_card(self.metadata, step, loss, self.contributors, self.initial_peers, page)
            with temporary_folder(self.folder / "upload") as folder:
                shutil.copytree(checkpoint, folder, ignore=left_out, dirs_exist_ok=True)
                card.save(folder / "README.md")
                if (adapters := folder / "adapter_config.json").is_file():
                    config = json.loads(adapters.read_text(encoding="utf-8"))
                    if Path(base := config["base_model_name_or_path"]).is_absolute():  # a folder of this machine
                        write_json(adapters, {**config, "base_model_name_or_path": Path(base).name})
                api = _open_repo(repo_id, self.private)
                message = f"Step {step} of {' '.join(self.metadata.run_id.split())}"
                commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)
                api.create_tag(repo_id, tag=f"step-{step}", revision=commit.oid, exist_ok=True)
            self.uploaded, self._due_at = checkpoint.name, started + self.interval
            self.backoff.reset()
            logger.info(f"Uploaded {checkpoint.name} to {repo_id}")
        except Exception as error:
            reason = describe_refusal(error, repo_id)
            pause = self.backoff.fail(str(reason))
            logger.warning(f"Could not upload to {repo_id}: {reason}; trying again in {pause:.0f} seconds")
