"""The parts of a router: its configuration, scores and choice, auxiliary losses, and the record of a routing."""

from moe_runtime.nn.routing.config import AuxLoss, RouterConfig
from moe_runtime.nn.routing.losses import BatchScope, RouterLosses, router_losses
from moe_runtime.nn.routing.record import RoutingChoice, RoutingRecord

__all__ = [
    "AuxLoss",
    "BatchScope",
    "RouterConfig",
    "RouterLosses",
    "RoutingChoice",
    "RoutingRecord",
    "router_losses",
]
