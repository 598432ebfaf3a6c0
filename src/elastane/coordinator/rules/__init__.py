"""The rules of membership: a pure state machine that decides, and performs nothing.

`Rendezvous` takes events with their time and returns effects. `machine` holds the phases and the
theory of operation. `state` is composed of parts that own the facts; the other modules hold the
decisions of one subject each. Imports go one way, from rules to parts. Nothing outside imports the
inner modules, except checks of the simulation.

    which agents may join                              admission
    when nodes that arrived are taken in               forming; in a shrink-only world growth
    how many nodes a world has, and which              sizing; their order ranks
    how the next world becomes the current one         next_world
    a fault, its cost, and the world of the survivors  incident, recovery
    a planned change                                   changes, drain
    where the training state is                        state_holders
    which nodes are alive                              liveness
    which members do not reach one another             cuts
    when a coordinator steps down for lack of nodes    step_downs
    what agents report                                 reports; kept in nodes
    the end of the job                                 ending
"""

from elastane.coordinator.rules.machine import Rendezvous
from elastane.coordinator.rules.state import NO_PREDECESSOR, MembershipPhase, Takeover
from elastane.coordinator.rules.step_downs import StepDowns

__all__ = ["NO_PREDECESSOR", "MembershipPhase", "Rendezvous", "StepDowns", "Takeover"]
