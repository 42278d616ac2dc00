"""Scenarios with monitors, whose keepers of checkpoints are those of cotrain."""

from pathlib import Path
from types import SimpleNamespace

import torch

from cotrain.monitoring.monitor import CheckpointKeeper
from cotrain.task import Task
from tests.support.engine import Hyperparameters
from tests.support.scenario import LINKS, SETTINGS, Scenario
from tests.support.simulated_network import Node
from tests.support.state import build_averager


class Monitor(Node):
    """A monitor's keeper of checkpoints and its node. Create it with `MonitoredScenario.add_monitor`."""

    def __init__(self, scenario: Scenario, folder: Path):
        super().__init__(scenario, LINKS, client=False, clock=0.0)
        self.scenario, self.log = scenario, list[str]()
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(scenario.initial.clone())
        averager = self.context.copy().run(
            build_averager,
            model,
            SimpleNamespace(dht=self, public_key=self.subkey),
            "run_state_averager",
            Hyperparameters(optimizer=SETTINGS["optimizer"]),
            offload_optimizer=False,
        )
        self.keeper = CheckpointKeeper(averager, Task(), model, "run", folder, interval=2, keep=(2, 8), pause=0.01)

    def look(self, step: int) -> None:
        """Do what a monitor does that reports a step."""
        trainers = {peer.peer_id for peer in self.scenario.peers if not peer.ended}
        self.keeper.update(step, trainers_are_leaving=False, trainers=trainers)

    def refresh(self, step: int) -> None:
        """Do what a monitor does that reports a step, and wait until it is done."""
        self.look(step)
        if self.keeper.pending is not None:
            self.keeper.pending.result()

    def close(self) -> None:
        self.keeper.close()


class MonitoredScenario(Scenario):
    """A scenario to which monitors can be added."""

    def add_monitor(self, folder: Path) -> Monitor:
        """Add a monitor that saves every second step."""
        self.nodes.append(Monitor(self, folder))
        return self.nodes[-1]
