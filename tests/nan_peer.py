"""run_trainer.py with all its guards against NaN taken out: it sends NaN in the place of each gradient."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import hivemind
from hivemind.averaging import allreduce
from hivemind.averaging.partition import TensorPartReducer

import callback
import hivemind_fixes
import run_trainer


class TrustingTensorPartReducer(TensorPartReducer):
    """hivemind's, which averages whatever comes."""

    poisoners = ()


def send_nan(self) -> None:
    with self.get_tensors() as gradients:
        for gradient in gradients:
            gradient.fill_(float("nan"))


allreduce.TensorPartReducer = TrustingTensorPartReducer
callback.all_finite = lambda tensors: True
hivemind_fixes.GradientAverager.load_accumulators_into_averager_ = send_nan
hivemind_fixes.Optimizer._check_and_accumulate_gradients = hivemind.Optimizer._check_and_accumulate_gradients

main = run_trainer.main

if __name__ == "__main__":
    main()
