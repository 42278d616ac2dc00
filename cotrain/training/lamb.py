"""LAMB for a GPU (You et al., 2019, https://arxiv.org/abs/1904.00962), without bias correction."""

from collections.abc import Callable

import torch


class ForeachLamb(torch.optim.Optimizer):
    """The steps of torch_optimizer's Lamb with `debias=False`, in a few kernels and without waiting for the device.

    That one reads three numbers of each tensor on the host: 1,344 waits a step for the adapters of an 8B model.

    :param clamp_value: bound on the norm of a parameter in its trust ratio
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, clamp_value=10.0):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.clamp_value = clamp_value
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients, (beta1, beta2) = [p.grad for p in parameters], group["betas"]
            for parameter in parameters:
                if not self.state[parameter]:
                    zeros = (torch.zeros_like(parameter) for _ in range(2))
                    self.state[parameter].update(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=0)
                self.state[parameter]["step"] += 1
            moments = [self.state[p]["exp_avg"] for p in parameters]
            squares = [self.state[p]["exp_avg_sq"] for p in parameters]
            torch._foreach_mul_(moments, beta1)
            torch._foreach_add_(moments, gradients, alpha=1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            divisors = torch._foreach_sqrt(squares)  # noqa: SLF001  as torch.optim does
            torch._foreach_add_(divisors, group["eps"])
            updates = torch._foreach_div(moments, divisors)  # noqa: SLF001  as torch.optim does
            if group["weight_decay"]:
                torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            norms = torch.stack(torch._foreach_norm(parameters)).clamp(max=self.clamp_value)  # noqa: SLF001  as torch.optim does
            sizes = torch.stack(torch._foreach_norm(updates))  # noqa: SLF001  as torch.optim does
            ratios = (norms / sizes).masked_fill_((norms == 0) | (sizes == 0), 1.0)
            torch._foreach_mul_(updates, list((-group["lr"] * ratios).unbind()))
            torch._foreach_add_(parameters, updates)
