#!/bin/bash
# The first boot of a cloud machine: install the project, run a coordinator or a trainer as a service.
#
# aws.py puts the settings before this script; together they are the machine's user data. It contains no secret, since
# anybody who may describe the instance, and any program on it, can read it.
#
#   ROLE                coordinator or trainer
#   REPO_URL, REVISION  the project, and its commit, branch or tag
#   SCRIPT, FLAGS       what the service runs
#   PORT, REGION        where others reach this peer; AWS's region
#   PUBLIC_IP, ALLOCATION_ID, DATASET_URL, DATASET_SHA256, IDENTITY_PARAMETER  for a coordinator
# shellcheck disable=SC2154
set -euo pipefail
trap give_up EXIT

FOLDER=/opt/collaboration
UNITS=/etc/systemd/system
METADATA=http://169.254.169.254/latest # the instance metadata service

give_up() {
    [[ $? == 0 ]] && return
    echo "This machine could not be set up: see the lines above"
    [[ $ROLE == coordinator ]] || give_back # do not pay for an idle instance
}

give_back() { # terminate this trainer's instance, without a replacement
    retry aws autoscaling terminate-instance-in-auto-scaling-group --region "$REGION" \
        --instance-id "$(retry metadata instance-id)" --should-decrement-desired-capacity
}

metadata() { # PATH: one of the machine's metadata. IMDSv2 requires a token
    local token
    token=$(curl -fsS -m 5 -X PUT -H "X-aws-ec2-metadata-token-ttl-seconds: 60" "$METADATA/api/token") || return
    curl -fsS -m 5 -H "X-aws-ec2-metadata-token: $token" "$METADATA/meta-data/$1"
}

retry() { # COMMAND…: the network may not be up yet, and some errors are transient
    local pause
    for pause in 5 10 20 40 80 160; do
        "$@" && return
        echo "Failed, trying again in $pause seconds: $1" >&2
        sleep $pause
    done
    "$@"
}

as_user() {
    runuser --user collaboration -- env "HOME=$FOLDER" "TMPDIR=$FOLDER/tmp" "$@"
}

take_address() { # the elastic IP, which cuts all connections that are open by then
    aws ec2 associate-address --region "$REGION" --instance-id "$(metadata instance-id)" \
        --allocation-id "$ALLOCATION_ID" --allow-reassociation && [[ $(metadata public-ipv4) == "$PUBLIC_IP" ]]
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

download_tokenizer() { # the monitor needs it to keep checkpoints; trainers fetch the data by themselves
    local archive=$FOLDER/tmp/data.tar.gz
    retry as_user curl -fsSL -m 3600 -o "$archive" "$DATASET_URL"
    [[ -z $DATASET_SHA256 ]] || sha256sum --check --quiet <<<"$DATASET_SHA256  $archive"
    as_user mkdir -p "$FOLDER/project/data/tokenizer"
    (cd "$FOLDER/project" && as_user "$FOLDER/venv/bin/python" - "$archive" <<<"
import pathlib, sys
from cotrain.data.archive import TOKENIZER, unpack_archive
unpack_archive(pathlib.Path(sys.argv[1]), {TOKENIZER: pathlib.Path(TOKENIZER)})")
    rm "$archive"
}

load_identity() { # the private key that gives the coordinator its peer ID: only its role may read it
    local key
    key=$(retry aws ssm get-parameter --region "$REGION" --name "$IDENTITY_PARAMETER" --with-decryption \
        --query Parameter.Value --output text)
    (umask 077 && base64 -d <<<"$key" >"$FOLDER/identity.key")
    chown collaboration "$FOLDER/identity.key"
}

# FLAG…: the machine's own, which FLAGS may overrule. The service is trainer.service with other settings. AWS shuts an
# interrupted machine down: systemd then stops the trainer, which leaves the run, and does not start give-back.
write_services() {
    local command=("$SCRIPT" "$@" --host_maddrs "/ip4/0.0.0.0/tcp/$PORT"
        --announce_maddrs "/ip4/$PUBLIC_IP/tcp/$PORT" "${FLAGS[@]}")
    cat >"$FOLDER/start.sh" <<EOF
#!/bin/bash
exec ${FOLDER@Q}/venv/bin/python -u ${command[@]@Q}
EOF
    cat >"$FOLDER/give_back.sh" <<EOF
#!/bin/bash
METADATA=$METADATA REGION=$REGION
$(declare -f metadata retry give_back)
give_back
EOF
    chmod 755 "$FOLDER"/{start,give_back}.sh
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
    printf "[Service]\nExecStart=%s\nStandardOutput=journal+console\n" "$FOLDER/give_back.sh" >"$UNITS/give-back.service"
}

if [[ $ROLE == coordinator ]]; then
    retry take_address
    install_project requirements-organiser.txt # its flags may ask for a dashboard
    download_tokenizer
    load_identity
    write_services --identity_path "$FOLDER/identity.key"
else
    PUBLIC_IP=$(retry metadata public-ipv4)
    install_project requirements.txt
    batch_size=$(cd "$FOLDER/project" && as_user "$FOLDER/venv/bin/python" -m deploy.join)
    write_services --per_device_train_batch_size "$batch_size"
fi
systemctl daemon-reload
systemctl enable --now collaboration.service
echo "This machine is set up as a $ROLE"
