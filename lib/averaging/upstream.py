"""Digests of the hivemind code that this project replaces, overrides or relies on, in the tested version.

docs/upgrading-hivemind.md has the catalogue of the workarounds and the steps to take when hivemind changes.
"""

import hashlib
import inspect
import pkgutil

import hivemind
from hivemind.utils import get_logger

logger = get_logger(__name__)

TESTED_VERSION = "1.1.12"

# Name in hivemind -> (row of the catalogue, first 16 hexadecimal digits of the SHA-256 of the source)
TESTED: dict[str, tuple[str, str]] = {
    "averaging.allreduce:AllReduceRunner.__init__": ("bounds", "597a0c8dbbeabbe3"),
    "averaging.allreduce:AllReduceRunner._accumulate_parts_streaming": ("bounds", "6c5a3c7266060303"),
    "averaging.allreduce:AllReduceRunner._ban_sender": ("early-parts", "3a3d52ad781b64d7"),
    "averaging.allreduce:AllReduceRunner._communicate_with_peer": ("weights", "d910885e9727ed48"),
    "averaging.allreduce:AllReduceRunner._generate_input_for_peer": ("weights", "c91d3343d3e60faf"),
    "averaging.allreduce:AllReduceRunner._get_peer_stub": ("streams", "2f3b1426869482d6"),
    "averaging.averager:DecentralizedAverager.__init__": ("rounds", "6180e0f134f0a7cc"),
    "averaging.averager:DecentralizedAverager._aggregate_with_group": ("rounds", "c297d8a435ce2b1c"),
    "averaging.averager:DecentralizedAverager._declare_for_download_periodically": ("offers", "23ae6db0d205bcaf"),
    "averaging.averager:DecentralizedAverager._load_state_from_peers": ("download", "fe7b419d01ced5fe"),
    "averaging.averager:DecentralizedAverager._register_allreduce_group": ("early-parts", "5bf43ed9b95db37d"),
    "averaging.averager:DecentralizedAverager._run_allreduce_inplace_": ("rounds", "914d57cffc7d69e1"),
    "averaging.averager:DecentralizedAverager._run_internal": ("matchmaking", "8f85686e1ccd3eb0"),
    "averaging.averager:DecentralizedAverager._shutdown": ("shutdown", "f1777b2ac329932a"),
    "averaging.averager:DecentralizedAverager._step": ("rounds", "dfbb4416e9ebba51"),
    "averaging.averager:DecentralizedAverager.rpc_aggregate_part": ("early-parts", "06ad9597d5884df8"),
    "averaging.averager:DecentralizedAverager.rpc_download_state": ("streams", "fd2f6f19e7d247af"),
    "averaging.averager:DecentralizedAverager.rpc_join_group": ("matchmaking", "a0c1dec1f5165713"),
    "averaging.averager:DecentralizedAverager.run": ("threads", "56590878daa9e5a0"),
    "averaging.averager:DecentralizedAverager.run_in_background": ("sigint", "028dd8b1e9b723d8"),
    "averaging.control:StepControl.__init__": ("control", "90ceebe268c38d9f"),
    "averaging.control:StepControl.cancel": ("control", "1abd18ff01412737"),
    "averaging.matchmaking:Matchmaking.__init__": ("matchmaking", "40dea3076c716ee9"),
    "averaging.matchmaking:Matchmaking.look_for_group": ("matchmaking", "05121895c7266059"),
    "averaging.matchmaking:Matchmaking.rpc_join_group": ("matchmaking", "0d6120e412849439"),
    "averaging.partition:TensorPartContainer.__init__": ("bounds", "b652a9b7267354d8"),
    "averaging.partition:TensorPartContainer.register_processed_part": ("bounds", "ff5ebad6141c4a88"),
    "averaging.partition:TensorPartReducer.__init__": ("bounds", "9ebe1038f511931b"),
    "averaging.partition:TensorPartReducer.accumulate_part": ("bounds", "1d64a8bd77052ac4"),
    "averaging.partition:TensorPartReducer.check_current_part_finished": ("bounds", "ec9b059c42f3ca27"),
    "compression.base:CompressionBase.compress": ("blocks", "b1764ad4f685cd02"),
    "compression.base:CompressionBase.estimate_compression_ratio": ("blocks", "63713c41aacc7635"),
    "compression.base:CompressionBase.extract": ("blocks", "2be86aad21dfb405"),
    "compression.quantization:BlockwiseQuantization": ("blocks", "ec2d8b112987851c"),
    "compression.quantization:Quantization.extract": ("numpy", "c522c9b6fd9ddaa2"),
    "compression.quantization:Uniform8BitQuantization.quantize": ("quantize", "22c9ac8b40147db0"),
    "compression.quantization:average_buckets": ("quantize", "7102b6a91c51be13"),
    "compression.serialization:deserialize_torch_tensor": ("wire", "74f1eed9fb9b7de3"),
    "dht.crypto:RSASignatureValidator.validate": ("malformed", "110b03cce3f94a66"),
    "dht.dht:DHT.__init__": ("admission", "27f69e86e6784ef6"),
    "dht.dht:DHT.replicate_p2p": ("admission", "d9987c59e10dd0a0"),
    "dht.dht:DHT.run": ("dead-callers", "bd3a376f042d386e"),
    "dht.node:DHTNode.create": ("relays", "f681de9c85567343"),
    "dht.node:_SearchState.finish_search": ("unreadable", "1f4dfb2bb5de81c4"),
    "dht.protocol:DHTProtocol.call_find": ("claims", "433adef0e520e526"),
    "dht.schema:SchemaValidator.validate": ("malformed", "6a774592487ae099"),
    "dht.validation:CompositeValidator.__init__": ("repeated", "9f15687857e5151d"),
    "dht.validation:CompositeValidator.validate": ("repeated", "2d27f3348ae716d4"),
    "optim.optimizer:Optimizer.__init__": ("steps", "310edba41646edad"),
    "optim.optimizer:Optimizer._make_gradient_averager": ("steps", "b9a4450197c1e6fb"),
    "optim.optimizer:Optimizer._make_progress_tracker": ("progress", "a3fe70a367d732d6"),
    "optim.optimizer:Optimizer._make_state_averager": ("steps", "59a43eff001c3284"),
    "optim.optimizer:Optimizer.load_state_from_peers": ("endless-load", "87030a961ecf8f7f"),
    "optim.optimizer:Optimizer.param_groups": ("steps", "c6ac6c82341a88bf"),
    "optim.optimizer:Optimizer.shutdown": ("steps", "52e41b26128082bc"),
    "optim.optimizer:Optimizer.step": ("steps", "7072604b4ad450ac"),
    "optim.optimizer:Optimizer.zero_grad": ("steps", "6bf12bb06ddb172f"),
    "optim.progress_tracker:ProgressTracker": ("progress", "49cf21042bec7978"),
    "optim.state_averager:TrainingStateAverager.__init__": ("schedule", "97f573400a46cdf9"),
    "optim.state_averager:TrainingStateAverager._apply_optimizer_parameters_": ("live-state", "95a8b2823478e64a"),
    "optim.state_averager:TrainingStateAverager._init_components": ("schedule", "a60b74a78a5c5503"),
    "optim.state_averager:TrainingStateAverager._update_scheduler": ("schedule", "9b8de2a7b6020122"),
    "optim.state_averager:TrainingStateAverager.get_current_state": ("live-state", "d2ee431a0a4b4074"),
    "optim.state_averager:TrainingStateAverager.load_state_from_peers": ("misfits", "e4d647a9ea78cde8"),
    "optim.state_averager:initialize_optimizer_state_": ("first-step", "5fc6b7b051e6938b"),
    "p2p.p2p_daemon:P2P._add_protobuf_stream_handler": ("streams", "f72a7faa60ec83fd"),
    "p2p.p2p_daemon:P2P._add_protobuf_unary_handler": ("admission", "29c242f5b962d984"),
    "p2p.p2p_daemon:P2P._call_unary_protobuf_handler": ("admission", "a844e495400c5598"),
    "p2p.p2p_daemon:P2P._make_process_args": ("relays", "def6fcf33d0d003e"),
    "p2p.p2p_daemon:P2P.add_binary_stream_handler": ("admission", "b42ff8e126f54793"),
    "p2p.p2p_daemon:P2P.call_binary_stream_handler": ("admission", "9c1301b5e99da899"),
    "p2p.p2p_daemon:P2P.create": ("sockets", "2e4720e954b79b67"),
    "p2p.p2p_daemon:P2P.is_identity_taken": ("admission", "60dcdc30d302a7ed"),
    "p2p.p2p_daemon:P2P.replicate": ("sockets", "ed7b3dd9d5cfb5e7"),
    "p2p.servicer:ServicerBase._strip_iterator_hint": ("annotations", "893564bbaa45a9f8"),
    "utils.asyncio:switch_to_uvloop": ("tasks", "04777b279a3d7fc8"),
    "utils.crypto:RSAPrivateKey": ("keys", "9cf8c6adaef3b056"),
    "utils.mpfuture:MPFuture.reset_backend": ("lock", "06cd5e31b99b4f58"),
    "utils.serializer:MSGPackSerializer": ("extensions", "9c0449e812a7ee67"),
}


def digest(name: str) -> str:
    """Return the digest of a class or function of hivemind, named as in TESTED; "missing" if it does not exist."""
    try:
        code = pkgutil.resolve_name(f"hivemind.{name}")
        source = inspect.getsource(code.fget if isinstance(code, property) else code)
    except (ImportError, AttributeError, OSError):
        return "missing"
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def find_changes() -> dict[str, list[str]]:
    """Compare the installed hivemind with the tested version.

    :returns: rows of the catalogue -> names whose source differs
    """
    changes: dict[str, list[str]] = {}
    for name, (row, tested_digest) in TESTED.items():
        if digest(name) != tested_digest:
            changes.setdefault(row, []).append(name.partition(":")[2])
    return changes


def warn_of_changes() -> None:
    """Log one warning if the installed hivemind is not the tested version. Call it before anything is replaced."""
    changes = find_changes()
    if not changes and hivemind.__version__ == TESTED_VERSION:
        return
    rows = "; ".join(f"{row} ({', '.join(names)})" for row, names in changes.items()) or "none"
    logger.warning(
        f"hivemind {hivemind.__version__} is installed, {TESTED_VERSION} was tested. Rows of "
        f"docs/upgrading-hivemind.md to check again: {rows}"
    )
