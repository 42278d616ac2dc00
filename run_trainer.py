#!/usr/bin/env python3
"""Train a language model together with others: compute gradients and average them with the other peers.

Join a collaboration with

    ./run_trainer.py --initial_peers /ip4/203.0.113.1/tcp/31337/p2p/XXXX

where the address is one that a training monitor, or any trainer, prints when it starts.
"""

from contextlib import ExitStack
from pathlib import Path

from arguments import (
    AveragerArguments,
    CollaborationArguments,
    DatasetArguments,
    LocalTrainingArguments,
    ProgressTrackerArguments,
    parse_arguments,
)
from errors import run_script
from processes import StopSignal, Watchdog, exit_after, guard_children

ARGUMENTS = (
    LocalTrainingArguments,
    DatasetArguments,
    CollaborationArguments,
    AveragerArguments,
    ProgressTrackerArguments,
)


def main() -> None:
    with StopSignal() as stop:
        args = parse_arguments(ARGUMENTS, __doc__)
        guard_children()
        train(*args, stop)


def train(
    training_args: LocalTrainingArguments,
    dataset_args: DatasetArguments,
    collaboration_args: CollaborationArguments,
    averager_args: AveragerArguments,
    tracker_args: ProgressTrackerArguments,
    stop: StopSignal,
) -> None:
    # Seconds of imports, which --help and a wrong flag need not wait for.
    from atomic import remove_leftovers
    from callback import CollaborativeCallback
    from checkpoints import lock_folder
    from data import load_training_data
    from model import build_model, load_config, load_tokenizer
    from optimizer import build_optimizer
    from trainer import PeerSampler, build_trainer, build_training_arguments, choose_precision, find_checkpoint
    from utils import KeepInTouch, log_visible_maddrs, setup_logging, start_peer

    setup_logging(collaboration_args.debug)
    choose_precision(training_args)
    tokenizer = load_tokenizer(dataset_args.tokenizer_path)
    config = load_config(dataset_args, tokenizer)
    dataset, collator = load_training_data(dataset_args, training_args, tokenizer, config)
    model = build_model(config, collaboration_args.run_id)
    output_dir = Path(training_args.output_dir)

    with ExitStack() as stack:
        stack.enter_context(lock_folder(output_dir, "--output_dir"))
        remove_leftovers(output_dir)
        stop.defer()
        identity_path = Path(collaboration_args.identity_path or output_dir / "identity.key")
        peer = start_peer(collaboration_args, identity_path, collaboration_args.client_mode, stop.event)
        stack.callback(peer.dht.shutdown)
        log_visible_maddrs(peer.dht.get_visible_maddrs(), only_p2p=collaboration_args.use_ipfs)

        training_arguments = build_training_arguments(training_args, str(peer.dht.peer_id))
        model.to(training_arguments.device)
        batch_size_per_step = training_args.batch_size_per_step(training_arguments.n_gpu)
        optimizer = build_optimizer(
            model, peer, batch_size_per_step, training_args, collaboration_args, averager_args, tracker_args
        )
        stack.callback(optimizer.shutdown)
        stack.callback(exit_after, 15.0, 1, "hivemind does not shut down")  # last resort, armed before the above
        watchdog = Watchdog(
            {"DHT": peer.dht, "state averager": optimizer.state_averager, "gradient averager": optimizer.grad_averager}
        )
        watchdog.start()
        stack.callback(watchdog.stop)
        keep_in_touch = KeepInTouch(peer.dht, collaboration_args.initial_peers)
        keep_in_touch.start()
        stack.callback(keep_in_touch.stop)
        callback = CollaborativeCallback(
            peer,
            optimizer,
            model,
            collaboration_args,
            output_dir / "backup.pt",
            stop.is_set,
            training_args.disable_tqdm,
        )
        stack.callback(callback.close)

        sampler = PeerSampler(len(dataset), str(peer.dht.peer_id), training_args.seed, optimizer)
        trainer = build_trainer(model, tokenizer, dataset, collator, optimizer, training_arguments, sampler, callback)
        trainer.train(resume_from_checkpoint=find_checkpoint(training_args.output_dir))
        callback.leave()


if __name__ == "__main__":
    run_script(main)
