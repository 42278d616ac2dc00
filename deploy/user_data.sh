#!/bin/bash
# The first boot of a cloud machine: install the project, run a coordinator or a trainer as a service.
#
# aws.py puts the settings before this script; together they are the machine's user data. It contains no secret, since
# anybody who may describe the instance, and any program on it, can read it.
#
#   ROLE                     coordinator or trainer
#   REPO_URL, REVISION       the project, and its commit, branch or tag
#   SCRIPT, FLAGS            what the service runs
#   PORT                     where others reach this peer
#   PUBLIC_IP, SIGNAL_URL    of a coordinator: its elastic IP; where CloudFormation waits for its address, once
#   INITIAL_PEERS, REGION    of a trainer: the coordinator's address; AWS's region
# shellcheck disable=SC2154
set -euo pipefail
trap give_up EXIT

LOG=/var/log/cloud-init-output.log # this script's output
FOLDER=/opt/collaboration
UNITS=/etc/systemd/system
METADATA=http://169.254.169.254/latest # the instance metadata service

give_up() {
    [[ $? == 0 ]] && return
    if [[ $ROLE == coordinator ]]; then
        sleep 1 # the log is written through a pipe
        signal FAILURE "$(tail -n 5 "$LOG" | tr '\n' ' ' | tr -cd '[:alnum:] .,:/_-' | tail -c 400)"
    else
        systemctl start give-back.service # do not pay for an idle instance
    fi
    echo "This machine could not be set up: see the lines above"
}

signal() { # STATUS TEXT: tell CloudFormation the address, or why there is none
    local text='{"Status": "%s", "UniqueId": "coordinator", "Reason": "%s", "Data": "%s"}'
    # shellcheck disable=SC2059
    retry curl -fsS -X PUT -H "Content-Type:" --data "$(printf "$text" "$1" "$2" "$2")" "$SIGNAL_URL"
}

metadata() { # PATH: one of the machine's metadata. IMDSv2 requires a token
    local token
    token=$(curl -fsS -m 5 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$METADATA/api/token") || return
    curl -fsS -m 5 -H "X-aws-ec2-metadata-token: $token" "$METADATA/meta-data/$1"
}

retry() { # COMMAND…: the network may not be up yet, and some errors are transient
    local pause
    for pause in 5 10 20 40 80 160; do
        "$@" && return 0 # in a trap, a bare `return` has the status from before the trap
        echo "Failed, trying again in $pause seconds: $1" >&2
        sleep $pause
    done
    "$@"
}

as_user() {
    runuser --user collaboration -- env "HOME=$FOLDER" "TMPDIR=$FOLDER/tmp" "$@"
}

install_project() { # FILE: the list of requirements
    retry dnf install -q -y git python3.11
    useradd --system --create-home --home-dir "$FOLDER" collaboration
    as_user mkdir -p "$FOLDER/tmp" # /tmp is half of the memory, too little for pip
    as_user git init -q "$FOLDER/project"
    retry as_user git -C "$FOLDER/project" fetch -q --depth 1 -- "$REPO_URL" "$REVISION"
    as_user git -C "$FOLDER/project" checkout -q FETCH_HEAD
    as_user python3.11 -m venv "$FOLDER/venv"
    retry as_user "$FOLDER/venv/bin/pip" install -q --no-cache-dir -r "$FOLDER/project/$1"
}

wait_for_address() { # of the monitor, which logs it; fails if the monitor does
    local log=(journalctl -u collaboration.service -o cat --no-pager)
    until grep -oPm1 -e '--initial_peers \K/\S+' < <("${log[@]}"); do
        ! systemctl is-failed -q collaboration.service || { "${log[@]}" -n 3 >&2 && return 1; }
        sleep 2
    done
}

# A service that terminates this trainer's instance, without a replacement. AWS shuts an interrupted machine down: systemd
# then stops the trainer, which leaves the run, and does not start give-back.
write_give_back() {
    cat >"$UNITS/give-back.service" <<EOF
[Service]
ExecStart=/usr/bin/env aws autoscaling terminate-instance-in-auto-scaling-group --region $REGION \\
  --instance-id $(retry metadata instance-id) --should-decrement-desired-capacity
Restart=on-failure
RestartSec=10
StandardOutput=journal+console
EOF
}

write_service() { # FLAG…: the machine's own, which FLAGS may overrule. It is trainer.service with other settings
    local command=("$SCRIPT" "$@" --host_maddrs "/ip4/0.0.0.0/tcp/$PORT"
        --announce_maddrs "/ip4/$PUBLIC_IP/tcp/$PORT" "${FLAGS[@]}")
    cat >"$FOLDER/start.sh" <<EOF
#!/bin/bash
exec ${FOLDER@Q}/venv/bin/python -u ${command[@]@Q}
EOF
    chmod 755 "$FOLDER/start.sh"
    cp "$FOLDER/project/deploy/trainer.service" "$UNITS/collaboration.service"
    mkdir -p "$UNITS/collaboration.service.d"
    cat >"$UNITS/collaboration.service.d/machine.conf" <<EOF
[Unit]
Description=Collaborative training: $ROLE
$([[ $ROLE == coordinator ]] || printf "OnSuccess=give-back.service\nOnFailure=give-back.service")

[Service]
User=collaboration
WorkingDirectory=$FOLDER/project
ExecStart=
ExecStart=$FOLDER/start.sh
StandardOutput=journal+console
EOF
}

if [[ $ROLE == coordinator ]]; then
    # CloudFormation attaches the elastic IP, which cuts all connections that are open by then.
    until [[ $(metadata public-ipv4) == "$PUBLIC_IP" ]]; do sleep 5; done
    install_project requirements-organiser.txt # its flags may ask for a dashboard
    write_service
else
    write_give_back
    PUBLIC_IP=$(retry metadata public-ipv4)
    install_project requirements.txt
    batch_size=$(cd "$FOLDER/project" && as_user "$FOLDER/venv/bin/python" -m deploy.join)
    write_service --initial_peers "$INITIAL_PEERS" --per_device_train_batch_size "$batch_size"
fi
systemctl daemon-reload
systemctl enable --now collaboration.service
if [[ $ROLE == coordinator ]]; then
    address=$(wait_for_address)
    signal SUCCESS "$address"
fi
echo "This machine is set up as a $ROLE"
