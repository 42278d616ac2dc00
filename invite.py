#!/usr/bin/env python3
"""Invite somebody to a run that is not open to everybody. The organiser runs it once for each peer:

    ./invite.py --username alice --output alice.invitation

Hand the file to that person alone, over a private channel; it goes to `run_trainer.py --invitation alice.invitation`.
The monitor needs an invitation too, and so does each further machine. All that are made with the same --authority
belong together; keep that file, and show it to nobody.
"""

from pathlib import Path

from arguments import InvitationArguments, parse_arguments
from errors import UserError, run_script


def main() -> None:
    (args,) = parse_arguments([InvitationArguments], __doc__)
    invite(args)


def invite(args: InvitationArguments) -> None:
    from lib.peer.invitations import make_invitation, save_invitation
    from utils import load_identity

    output = Path(args.output)
    if output.exists():
        raise UserError(f"--output: '{output}' is there already; choose another name, it may be in use")
    authority_path = Path(args.authority)
    is_new = not authority_path.exists()
    authority = load_identity(authority_path, "--authority")
    save_invitation(make_invitation(authority, args.username, args.days), output)
    if is_new:
        print(f"Made {authority_path}, which signs all invitations to this run: keep it, and show it to nobody")
    print(f"Invited {args.username} for {args.days:g} days: {output}")


if __name__ == "__main__":
    run_script(main)
