"""A trainer whose invitation is revoked during training."""

import json
import re
import shutil

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.admission.invitations import make_invitation, save_invitation
from cotrain.admission.revocations import revoke_invitations
from peerstep.local_peer import write_private_key
from tests.support.peers import read_jsonl, steps_of, wait_until


@pytest.mark.early
def test_revoked_trainer_is_told_once_and_ends_and_the_other_continues(scripts, tmp_path):
    authority, invitations = RSAPrivateKey(), {}
    write_private_key(authority, tmp_path / "authority.key")
    for name in ("monitor", "alice", "carol"):
        invitations[name] = make_invitation(authority, name, days=1)
        save_invitation(invitations[name], tmp_path / f"{name}.invitation")
    monitor = scripts.monitor("--invitation", tmp_path / "monitor.invitation")

    def trainer(name: str, *flags: object, log: str = ""):
        return scripts.trainer(
            name, "--initial_peers", monitor.address, "--invitation", tmp_path / f"{name}.invitation", "--fp32",
            *steps_of(seconds=3, num_trainers=2), *flags,
        )  # fmt: skip

    refused = trainer("carol", "--username", "alice")
    assert refused.wait(120) == 1 and "--username is 'alice', and the invitation is for 'carol'" in refused.output
    alice, carol = trainer("alice", "--username", "alice"), trainer("carol")
    for script, name in ((alice, "alice"), (carol, "carol")):
        script.wait_for(rf"This peer is {name} \({str(invitations[name].peer_id)[-7:]}\)\n")
        script.wait_for("Averaged gradients with 2 peers")
    monitor.wait_for(r"carol \(")
    path = revoke_invitations({str(invitations["carol"].peer_id)}, authority, tmp_path / "authority.key")
    shutil.copy(path, scripts.folder / "monitor" / "revocations")
    assert carol.wait(120) == 1
    told = [line for line in carol.output.splitlines() if "revoked" in line and "[INFO]" not in line]
    assert len(told) == 1 and told[0].endswith(
        "--invitation: the invitation is revoked; ask the organiser of the run for another"
    )
    assert "Error(" not in carol.output and "Thank you" not in carol.output
    status = json.loads((scripts.folder / "carol" / "status.json").read_text(encoding="utf-8"))
    assert "the invitation is revoked" in status["error"] and status["ended_at"]
    assert all(entry["outcome"] != "alone" for entry in read_jsonl(scripts.folder / "carol" / "rounds.jsonl")[1:])

    seen = len(alice.steps)
    wait_until(lambda: len(alice.steps) >= seen + 3, 120, "the next steps of the other trainer")
    partial = re.findall(r"The round of step #(\d+) was partial", alice.output)
    assert len(partial) <= 1, partial
    again = trainer("carol")
    assert again.wait(60) == 1 and "the invitation is revoked" in again.output
    assert "Thank you, alice (" in (alice.stop(), alice.output)[1]
