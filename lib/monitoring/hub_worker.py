"""Requests to the Hugging Face Hub, in a separate process that the monitor can kill whatever the network does.

hub_upload.py starts it as

    python -m lib.monitoring.hub_worker NAME/MODEL --parent PID [--private] [--metadata YAML]
        [--folder FOLDER --message MESSAGE --tag TAG]

The repository is created if it does not exist. --metadata checks that the token has write access and that the Hub
accepts a model card with this metadata. --folder commits and tags a folder. huggingface_hub finds the token: HF_TOKEN,
or the token of `hf auth login`.
"""

import argparse
import os
from collections.abc import Iterator

from lib.common.errors import UserError, exit_with, first_line
from lib.common.processes import leave_with_parent

EXIT_TRY_LATER = 75  # EX_TEMPFAIL of <sysexits.h>

REMEDY = "run `hf auth login`, or set HF_TOKEN, with a token that may write (settings of your account, Access Tokens)"


def main() -> None:
    leave_with_parent()
    os.nice(10)  # hashing a large model must not slow down the monitor
    parser = argparse.ArgumentParser()
    parser.add_argument("repo_id")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--private", action="store_true")
    for name in ("--metadata", "--folder", "--message", "--tag"):
        parser.add_argument(name)
    args = parser.parse_args()
    if os.getppid() != args.parent:
        exit_with("the monitor has ended")  # before leave_with_parent took effect
    try:
        talk(args)
    except Exception as error:
        message, is_passing = explain(error, args.repo_id)
        exit_with(message, EXIT_TRY_LATER if is_passing else 1)


def talk(args: argparse.Namespace) -> None:
    """Make the requests that the command line names. Exceptions of huggingface_hub pass through."""
    from huggingface_hub import HfApi, ModelCard

    api = HfApi(token=True)
    api.create_repo(args.repo_id, private=args.private or None, exist_ok=True)
    if args.metadata:
        api.auth_check(args.repo_id, write=True)  # create_repo also succeeds for another user's repository
        try:
            ModelCard(f"---\n{args.metadata}\n---\n").validate()
        except ValueError as error:
            raise UserError(f"the Hub does not know this --license or --language: {error}") from None
    if args.folder:
        commit = api.upload_folder(repo_id=args.repo_id, folder_path=args.folder, commit_message=args.message)
        api.create_tag(args.repo_id, tag=args.tag, revision=commit.oid, exist_ok=True)


def explain(error: Exception, repo_id: str) -> tuple[str, bool]:
    """Return one line for an error, with the remedy where one is known, and whether the error may be temporary."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, UserError):
        return " ".join(str(error).split()), False
    causes = list(_causes(error))
    if any(isinstance(cause, LocalTokenNotFoundError) for cause in causes):
        return f"no token of the Hugging Face Hub was found: {REMEDY}", False
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return "HF_HUB_OFFLINE is set: unset it", False
    refusal = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    if refusal is None:
        return f"{type(causes[-1]).__name__}: {first_line(causes[-1])}", True
    status = refusal.response.status_code
    if status == 401:
        return f"the Hub does not accept the token: {REMEDY}", False
    if status == 403:
        return f"the token may not write to '{repo_id}': pass a repository of your own, or {REMEDY}", False
    if status == 404:
        return f"the Hub has no repository '{repo_id}'", True
    if status == 429:
        return "rate-limited by the Hub (429)", True
    if status >= 500:
        return f"the Hub has an internal error ({status})", True
    return f"the Hub refused ({status}): {' '.join(str(refusal.server_message or refusal).split())[:200]}", False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: a failed transfer is a RuntimeError that wraps the Hub's response."""
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    main()
