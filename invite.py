#!/usr/bin/env python3
"""Invite a peer to a closed run. The organiser runs this script once for each peer:

    ./invite.py --username alice --output alice.invitation

Hand the file to that person alone, over a private channel; it goes to `run_trainer.py --invitation alice.invitation`.
The monitor needs an invitation too, and so does each further machine. All that are made with the same --authority
belong to one run; keep that file secret.

    ./invite.py revoke --username alice
    cp authority.revoked monitor_outputs/revocations

revokes all invitations of alice; the monitor passes the list on to all peers.
"""

from cotrain.common.errors import UserError, announce_imports, require_writable, run_script  # isort: skip
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

from cotrain.common.flags import Flags, flag, require


@dataclass
class InvitationArguments(Flags, group="Invitation"):
    """Who is invited."""

    username: str = flag(MISSING, "Name of the invited user, shown in the public list of contributors")
    output: str = flag(MISSING, "Invitation file to write. It contains the private key of the invited peer")
    authority: str = flag("authority.key", "File with the organiser's private key, created if it does not exist")
    days: float = flag(365.0, "Days until the invitation expires")
    debug: bool = flag(False, "Show the traceback of a fatal error")

    def __post_init__(self):
        super().__post_init__()
        self.username = self.username.strip()
        require(0 < len(self.username) <= 64, "--username must have 1 to 64 characters")
        require(self.username.isprintable(), "--username must be one line, without control characters")


@dataclass
class RevocationArguments(Flags, group="Revocation"):
    """Which invitations no longer hold."""

    username: str | None = flag(None, "Revoke all invitations of this user")
    invitation: str | None = flag(None, "Revoke the invitation in this file")
    authority: str = flag(
        "authority.key", "The organiser's private key. The revocation list is written beside it, as authority.revoked"
    )
    debug: bool = flag(False, "Show the traceback of a fatal error")

    def __post_init__(self):
        self.username = self.username and self.username.strip()
        require((self.username is None) != (self.invitation is None), "pass either --username or --invitation")


def main() -> None:
    from cotrain.common.argument_parser import parse_arguments

    if sys.argv[1:2] == ["revoke"]:
        revoke(*parse_arguments([RevocationArguments], "Revoke invitations", sys.argv[2:]))
    else:
        invite(*parse_arguments([InvitationArguments], __doc__))


def invite(args: InvitationArguments) -> None:
    output = Path(args.output)
    if output.exists():
        raise UserError(f"--output: '{output}' already exists and may be in use; choose another name")
    require_writable(output.parent, "--output")
    announce_imports()
    from cotrain.admission.invitations import load_identity, make_invitation, save_invitation
    from cotrain.admission.revocations import record_invitation
    from cotrain.status.status import format_duration

    authority_path = Path(args.authority)
    is_new = not authority_path.exists()
    authority = load_identity(authority_path, "--authority")
    invitation = make_invitation(authority, args.username, args.days)
    record_invitation(invitation, authority_path)
    save_invitation(invitation, output)
    if is_new:
        print(f"Created {authority_path}, the key that signs all invitations: keep it secret and back it up")
    print(f"Invited {args.username} for {format_duration(86_400 * args.days)}: {output}")


def revoke(args: RevocationArguments) -> None:
    announce_imports()
    from cotrain.admission.invitations import load_identity, load_invitation
    from cotrain.admission.revocations import find_invitations, revoke_invitations

    authority_path = Path(args.authority)
    if not authority_path.exists():
        raise UserError(f"--authority: there is no file '{authority_path}'; pass the one that signed the invitations")
    authority = load_identity(authority_path, "--authority")
    if args.invitation is not None:
        invitation = load_invitation(Path(args.invitation))
        if invitation.authority.to_bytes() != authority.get_public_key().to_bytes():
            raise UserError(f"--invitation: '{args.invitation}' is not signed by '{authority_path}'")
        revoked = {invitation.peer_id.to_base58()}
    else:
        revoked = find_invitations(args.username, authority_path)
    path = revoke_invitations(revoked, authority, authority_path)
    print(f"Revoked {len(revoked)} invitations: {path}, which the monitor reads as `revocations` in its --output_dir")


if __name__ == "__main__":
    run_script(main)
