"""run_training_monitor.py with a fake ngrok server at localhost; the variable FAKE_NGROK holds its port."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import ngrok

import run_training_monitor
from cotrain.common.errors import run_script

SDK = ngrok.SessionBuilder


def builder() -> ngrok.SessionBuilder:
    certificate = Path(os.environ["FAKE_NGROK_CERTIFICATE"]).read_bytes()
    return SDK().server_addr(f"localhost:{os.environ['FAKE_NGROK']}").ca_cert(bytearray(certificate))


ngrok.SessionBuilder = builder

if __name__ == "__main__":
    run_script(run_training_monitor.main)
