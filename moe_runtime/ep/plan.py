"""What dispatch decides and combine needs: a frozen value that travels between them; nothing is kept on a module."""

# T tokens   K top-k   R routed rows   E local experts   P ranks of the expert group

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.ep.capacity import PaddedRoute
from moe_runtime.kernels.permute import Route


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Where each (token, choice) slot went.

    local     slots of this rank's tokens, sorted by expert over the whole group
    received  rows received from the group, sorted by local expert; None at expert degree 1
    send_rows, receive_rows  rows exchanged with each rank; empty at expert degree 1
    """

    local: Route | PaddedRoute
    received: Route | None = None
    send_rows: tuple[int, ...] = ()
    receive_rows: tuple[int, ...] = ()

    @property
    def ends_E(self) -> Tensor:
        """End row of each local expert in the rows handed to the experts, int32 (E,)."""
        return (self.received or self.local).ends_E

    @property
    def token_R(self) -> Tensor:
        """The token of each local row, int32 (R,). A padded route, some of whose rows have none, has no such list."""
        assert isinstance(self.local, Route)
        top_k = max(self.local.row_TK.shape[1], 1)
        return (self.local.slot_R // top_k).to(torch.int32)
