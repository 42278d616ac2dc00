"""Periodic upload of the monitor's newest checkpoint to the Hugging Face Hub, with a model card.

An upload never blocks the monitor: it is a separate process (hub_worker.py). The monitor starts the process,
polls it at each refresh, and kills it on a timeout or when the monitor stops. The process uploads hard links to the
checkpoint's files, so the checkpoint may be removed during the upload.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hivemind.utils import get_logger
from huggingface_hub import get_token
from transformers import PretrainedConfig

from lib.common.atomic_files import temporary_folder
from lib.common.backoff import Backoff
from lib.common.errors import UserError, describe
from lib.monitoring import hub_worker
from lib.monitoring.contributors import Contributors
from lib.monitoring.model_card import CardMetadata, build_card, build_card_data, read_curve
from lib.training.checkpoints import STATE_FILE, list_checkpoints
from lib.training.model import get_model_class, get_objective

logger = get_logger(__name__)

CHECK_TIMEOUT = 30.0  # seconds for the check of write access at the start
UPLOAD_TIMEOUT = 2 * 3600.0  # seconds for one upload
CLOSE_TIMEOUT = 2.0  # seconds for an upload to finish when the monitor stops; the next start repeats it
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds between attempts; each failure doubles the pause

# Not uploaded by default: the training state is three times as large as the model, and the files name its donor.
_STATE_FILES = (STATE_FILE, "collaboration.json")


def build_card_metadata(
    repo_id: str, run_id: str, config: PretrainedConfig, license: str | None = None, language: str | None = None
) -> CardMetadata:
    """What the model card says of a run's model."""
    return CardMetadata(
        repo_id=repo_id,
        run_id=run_id,
        model_type=config.model_type,
        model_class=get_model_class(config).__name__,
        objective=get_objective(config),
        license=license,
        language=language,
    )


def check_repo(metadata: CardMetadata, private: bool = False) -> None:
    """Create the repository if it does not exist, and check write access. An unreachable Hub causes a warning only.

    :raises UserError: if there is no token, the token has no write access, or the Hub refuses the card's metadata
    """
    command = [*_command(metadata.repo_id, private), f"--metadata={build_card_data(metadata).to_yaml()}"]
    try:
        result = subprocess.run(command, env=_environment(), capture_output=True, timeout=CHECK_TIMEOUT)
    except subprocess.TimeoutExpired:
        code, reason = hub_worker.EXIT_TRY_LATER, f"the Hub did not answer within {CHECK_TIMEOUT:.0f} seconds"
    else:
        code, reason = result.returncode, _last_line(result.stderr)
    if code == 1:
        raise UserError(f"--repo_id: {reason}")
    if code != 0:
        logger.warning(f"Cannot check whether '{metadata.repo_id}' may be written to: {reason}. Uploads will be tried")


def require_token(flag: str) -> None:
    """:raises UserError: if this machine has no token of the Hugging Face Hub"""
    if get_token() is None:
        raise UserError(f"{flag}: no token of the Hugging Face Hub was found: {hub_worker.REMEDY}")


def _command(repo_id: str, private: bool) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", hub_worker.__name__, repo_id, f"--parent={os.getpid()}"]
    return [*command, "--private"] if private else command


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}


def _last_line(output: bytes) -> str:
    """Return the error message of hub_worker.py, without the name of the program."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1].split(" error: ", 1)[-1][:400] if lines else "no reason was given"


@dataclass
class _Upload:
    """Upload in progress. `resources`: the folder that is uploaded and the output of the process."""

    checkpoint: Path
    process: subprocess.Popen
    output: BinaryIO
    started: float
    resources: ExitStack


class HubUploader:
    """Keeps a repository on the Hub up to date with the newest checkpoint. A failure is one log line and never raises.

    :param metadata: see `build_card_metadata`
    :param initial_peers: addresses through which newcomers join over the internet; none if they cannot
    :param folder: of the checkpoints
    :param private: whether a repository that has to be created is private
    :param interval: seconds between two uploads
    :param with_training_state: upload the optimizer's state, too
    """

    def __init__(
        self,
        folder: Path,
        metadata: CardMetadata,
        contributors: Contributors,
        initial_peers: Sequence[str] = (),
        private: bool = False,
        interval: float = 3600.0,
        with_training_state: bool = False,
    ):
        self.folder, self.metadata, self.contributors = folder, metadata, contributors
        self.initial_peers = initial_peers
        self.private, self.interval, self.with_training_state = private, interval, with_training_state
        self.page: str | None = None  # address of the run's curves, for the model card
        self.uploaded: str | None = None  # the checkpoint's name
        self._upload: _Upload | None = None
        self._due_at = float("-inf")
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)

    def update(self, run_is_over: bool = False) -> None:
        """Poll the upload in progress, and start the next one when it is due.

        :param run_is_over: the last checkpoint need not wait for the interval
        """
        try:
            self._look_after()
            now = time.monotonic()
            is_due = now >= self._due_at or run_is_over
            newest = next(iter(list_checkpoints(self.folder)), None)
            if newest is None or newest.name == self.uploaded or self._upload is not None:
                return
            if is_due and self._backoff.is_over:
                self._start(newest)
        except Exception as error:
            self._fail(describe(error))

    def close(self) -> None:
        """Wait CLOSE_TIMEOUT seconds for the upload in progress, then kill it."""
        if self._upload is None:
            return
        try:
            self._upload.process.wait(CLOSE_TIMEOUT)
            self._look_after()
        except subprocess.TimeoutExpired:
            logger.warning(f"Ended the upload of {self._upload.checkpoint.name}: the next start repeats it")
            self._end()
        except Exception as error:
            logger.warning(f"Could not finish the upload: {describe(error)}")

    def _start(self, checkpoint: Path) -> None:
        step = int(checkpoint.name.rsplit("-", 1)[-1])
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder(self.folder / "upload"))
            try:
                self._fill(folder, checkpoint, step)
            except FileNotFoundError:
                logger.debug(f"{checkpoint} was removed before it could be uploaded")  # a newer one exists
                return
            output = stack.enter_context(tempfile.TemporaryFile())
            message = f"Step {step} of {' '.join(self.metadata.run_id.split())}"
            command = _command(self.metadata.repo_id, self.private)
            command += [f"--folder={folder}", f"--message={message}", f"--tag=step-{step}"]
            process = subprocess.Popen(
                command, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
            )
            self._upload = _Upload(checkpoint, process, output, time.monotonic(), stack.pop_all())

    def _fill(self, folder: Path, checkpoint: Path, step: int) -> None:
        """Fill a folder with the files to upload."""
        left_out = {"README.md"} if self.with_training_state else {"README.md", *_STATE_FILES}
        for path in checkpoint.iterdir():  # a checkpoint downloaded from the Hub has a card and a hidden folder
            if path.name not in left_out and not path.is_dir():
                _link(path, folder / path.name)
        curve = read_curve(self.folder / "metrics.jsonl", step)
        card = build_card(self.metadata, step, curve, self.contributors, self.initial_peers, self.page)
        card.save(folder / "README.md")

    def _look_after(self) -> None:
        """Process the result of an upload that has ended; kill an upload that exceeds UPLOAD_TIMEOUT."""
        upload = self._upload
        if upload is None:
            return
        code = upload.process.poll()
        if code is None and time.monotonic() < upload.started + UPLOAD_TIMEOUT:
            return
        upload.output.seek(0)
        reason = _last_line(upload.output.read())
        self._end()
        if code is None:
            self._fail(f"not done after {UPLOAD_TIMEOUT / 60:.0f} minutes")
        elif code != 0:
            self._fail(reason)
        else:
            self.uploaded = upload.checkpoint.name
            self._backoff.reset()
            self._due_at = upload.started + self.interval
            logger.info(f"Uploaded {upload.checkpoint.name} to {self.metadata.repo_id}")

    def _end(self) -> None:
        upload, self._upload = self._upload, None
        if upload.process.poll() is None:
            upload.process.kill()
            upload.process.wait()
        upload.resources.close()

    def _fail(self, reason: str) -> None:
        pause = self._backoff.fail()
        logger.warning(f"Could not upload to {self.metadata.repo_id}: {reason}; trying again in {pause:.0f} seconds")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
