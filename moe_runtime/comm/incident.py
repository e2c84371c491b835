"""What one rank knows of a failure: where it is, where the others are, its stacks. Written as one JSON file.

Reports are read by people: texts are whole sentences, and numbers carry their unit in the key.
"""

import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d

from moe_runtime.comm.watch import Collective

# The newest entries of torch's flight recorder that a report keeps.
_RECORDED = 20
# Ranks of a kind that a summary has room for.
_SAID = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a rank has come. `phases` and `collectives` count those begun since the process started."""

    step: int = 0
    phase: str = ""
    phases: int = 0
    collectives: int = 0
    collective: Collective | None = None
    beat: int = 0

    def __str__(self) -> str:
        phase = f"phase '{self.phase}'" if self.phase else "between phases"
        under_way = f", in {self.collective}" if self.collective is not None else ""
        return f"step {self.step}, {phase}{under_way}"

    def has_reached(self, other: "Position") -> bool:
        """Whether this rank has come where `other` is: all ranks take the same phases and collectives in order."""
        return (self.phases, self.collectives) >= (other.phases, other.collectives)

    def to_text(self) -> str:
        """As `from_text` reads it."""
        return json.dumps(asdict(self))


def from_text(text: bytes) -> Position:
    """The position that `to_text` wrote."""
    fields = json.loads(text)
    if (collective := fields["collective"]) is not None:
        fields["collective"] = Collective(**{key: _frozen(value) for key, value in collective.items()})
    return Position(**fields)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What the store said of the other ranks.

    positions  the last of each rank that ever said one
    silent     seconds since a rank that should say its position regularly last did, of those that stopped
    sentence   why little is known, where the store itself does not answer
    """

    positions: Mapping[int, Position]
    silent: Mapping[int, float]
    sentence: str = ""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One rank's view of a failure."""

    rank: int
    world_size: int
    reason: str
    position: Position
    phase_seconds: float
    collective_seconds: float
    peers: Peers
    error: str = ""

    @property
    def concerned(self) -> Sequence[int]:
        """Ranks that had to arrive: those of the collective under way, else all."""
        collective = self.position.collective
        return collective.ranks if collective is not None else range(self.world_size)

    @property
    def arrived(self) -> list[int]:
        """Concerned ranks known to have come where this one is."""
        positions = {**self.peers.positions, self.rank: self.position}
        return [rank for rank in self.concerned if rank in positions and positions[rank].has_reached(self.position)]

    @property
    def missing(self) -> list[int]:
        """Concerned ranks not known to have come."""
        return [rank for rank in self.concerned if rank not in self.arrived]

    @property
    def elsewhere(self) -> list[int]:
        """Ranks that have come as far, and are in another exchange, or in one where this rank is in none."""
        positions, own = self.peers.positions, self.position.collective
        return [rank for rank in self.arrived if rank in positions and positions[rank].collective != own]

    def __str__(self) -> str:
        groups = {"not arrived": self.missing, "elsewhere": self.elsewhere}
        others = [f"; {name}: {'; '.join(map(self._of, ranks[:_SAID]))}" for name, ranks in groups.items() if ranks]
        more = sum(max(0, len(ranks) - _SAID) for ranks in groups.values())
        rest = f"; and {more} ranks more" if more else ""
        return f"rank {self.rank}: {self.reason}; {self.position}{''.join(others)}{rest}"

    def _of(self, rank: int) -> str:
        """`rank` and what is known of it."""
        position = self.peers.positions.get(rank)
        where = str(position) if position is not None else self.peers.sentence or "never said where it is"
        silent = self.peers.silent.get(rank)
        return f"rank {rank} ({where}{f', silent for {silent:.0f} s' if silent is not None else ''})"


def write(incident: Incident, folder: Path) -> Path:
    """The report's file, whole or not there."""
    position, collective = incident.position, incident.position.collective
    report = {
        "reason": incident.reason,
        "summary": str(incident),
        "rank": incident.rank,
        "world_size": incident.world_size,
        "host": platform.node(),
        "pid": os.getpid(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": position.step,
        "phase": position.phase,
        "phase_seconds": round(incident.phase_seconds, 3),
        "collective": collective.name if collective is not None else None,
        "layer": collective.layer if collective is not None else None,
        "collective_ranks": list(collective.ranks) if collective is not None else None,
        "send_rows": list(collective.send_rows) if collective is not None else None,
        "receive_rows": list(collective.receive_rows) if collective is not None else None,
        "collective_seconds": round(incident.collective_seconds, 3),
        "arrived": incident.arrived,
        "missing": incident.missing,
        "silent_seconds": {str(rank): round(seconds, 3) for rank, seconds in sorted(incident.peers.silent.items())},
        "positions": {str(rank): str(other) for rank, other in sorted(incident.peers.positions.items())},
        "store": incident.peers.sentence or "answers",
        "error": incident.error,
        "stacks": stacks(),
        "flight_recorder": flight_recorder(),
    }
    path = folder / f"rank-{incident.rank}-step-{position.step}-pid-{os.getpid()}.json"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    half = path.with_suffix(".part")
    with os.fdopen(private(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    half.rename(path)
    return path


def stacks() -> dict[str, list[str]]:
    """Python stacks of all threads, by name, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(number, 'a thread of native code')} ({number})": [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(top)
        ]
        for number, top in sys._current_frames().items()
    }


def flight_recorder() -> list[dict[str, Any]] | str:
    """The newest collectives of torch's own recorder, NCCL's or gloo's; a sentence where it has none."""
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json") if torch.cuda.is_available() else ("_dump_fr_trace_json",)
    dumps = [getattr(_distributed_c10d, name) for name in names if hasattr(_distributed_c10d, name)]
    if not dumps:
        return f"torch {torch.__version__} has no flight recorder to ask"
    entries = json.loads(dumps[0]()).get("entries", [])
    return entries[-_RECORDED:]


def private(path: Path, flags: int) -> int:
    """A descriptor of a file that is its owner's alone."""
    return os.open(path, flags, 0o600)
