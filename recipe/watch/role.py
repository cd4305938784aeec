"""Which part of the job this process does, derived from what the `deepspeed` launcher put into its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from recipe.config.schema import Layout
from recipe.errors import ConfigError

LAUNCHER_KEYS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Role:
    """The place of one process in the run.

    ``rank`` is the launcher's; ``index`` counts within this role on this node. A target's world is one replica
    group of ``tp`` ranks on one node; the drafters of all nodes form one world.
    """

    kind: Literal["target", "drafter"]
    rank: int
    world_size: int
    node: int
    nodes: int
    local_rank: int
    index: int
    replicas: int
    tp: int
    drafters_per_node: int

    @property
    def replica(self) -> int:
        """Replica group of a target rank within its node."""
        return self.index // self.tp

    @property
    def tp_rank(self) -> int:
        """Rank of a target within its replica group."""
        return self.index % self.tp

    @property
    def drafter_rank(self) -> int:
        """Rank of a drafter in the drafter world, which spans the nodes."""
        return self.node * self.drafters_per_node + self.index

    @property
    def drafter_world(self) -> int:
        return self.nodes * self.drafters_per_node

    @property
    def group(self) -> tuple[str, int, int]:
        """Name of this rank's world, its rank there and the world's size."""
        if self.kind == "target":
            return f"target/{self.node}/{self.replica}", self.tp_rank, self.tp
        return "drafter", self.drafter_rank, self.drafter_world

    @property
    def is_leader(self) -> bool:
        """The one process that writes the run directory: drafter 0."""
        return self.kind == "drafter" and self.drafter_rank == 0

    @property
    def is_node_leader(self) -> bool:
        """The one process of a node that makes the ring: its first target rank."""
        return self.kind == "target" and self.index == 0

    @property
    def place(self) -> str:
        """``drafter 1, node 0`` or ``target replica 0 tp 1, node 0``."""
        place = f"replica {self.replica} tp {self.tp_rank}" if self.kind == "target" else f"{self.drafter_rank}"
        return f"{self.kind} {place}, node {self.node}"

    @property
    def name(self) -> str:
        """For messages: ``rank 3 (drafter 1, node 0)``."""
        return f"rank {self.rank} ({self.place})"

    def places(self, layout: Layout) -> dict[int, str]:
        """`place` of every rank of the run: all nodes have the same layout."""
        local = self.world_size // self.nodes
        found = {}
        for rank in range(self.world_size):
            env = {
                "RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": self.world_size, "LOCAL_SIZE": local,
                "CROSS_RANK": rank // local, "CROSS_SIZE": self.nodes, "MASTER_ADDR": "-", "MASTER_PORT": "-",
            }  # fmt: skip
            found[rank] = Role.from_environment(layout, {key: str(value) for key, value in env.items()}).place
        return found

    @classmethod
    def from_environment(cls, layout: Layout, env: Mapping[str, str] | None = None) -> Role:
        """Read the launcher's variables and find the role that ``layout`` gives to LOCAL_RANK.

        Raises:
            ConfigError: variables missing (another launcher), slots unequal over the nodes, or a number of slots
                that is not the layout's.
        """
        env = os.environ if env is None else env
        missing = [key for key in LAUNCHER_KEYS if not env.get(key)]
        if missing:
            raise ConfigError(
                "launcher",
                ", ".join(missing) + " not set",
                "only the deepspeed launcher (pdsh, ssh or --no_ssh) sets the variables that place a rank",
                "start with `./run.sh train CONFIG` or `deepspeed … recipe/train.py --deepspeed_config CONFIG`",
            )
        rank, local_rank, local_size = (int(env[key]) for key in ("RANK", "LOCAL_RANK", "LOCAL_SIZE"))
        node, nodes, world = (int(env[key]) for key in ("CROSS_RANK", "CROSS_SIZE", "WORLD_SIZE"))
        wanted = len(layout.target_gpus) + len(layout.drafter_gpus)
        if local_size != wanted:
            raise ConfigError(
                "dflash.layout",
                f"{local_size} processes on node {node}",
                f"the layout has {len(layout.target_gpus)} target + {len(layout.drafter_gpus)} drafter GPUs a node",
                f"launch {wanted} processes a node (--num_gpus {wanted}, slots={wanted}) or change layout",
            )
        if rank != node * local_size + local_rank or world != nodes * local_size:
            raise ConfigError(
                "hostfile",
                f"RANK {rank}, node {node}, LOCAL_RANK {local_rank}, WORLD_SIZE {world}",
                f"every node needs the same number of slots ({wanted})",
                "give each host of the hostfile the same slots=",
            )
        kind: Literal["target", "drafter"] = "target" if local_rank in layout.target_gpus else "drafter"
        members = layout.target_gpus if kind == "target" else layout.drafter_gpus
        return cls(
            kind=kind,
            rank=rank,
            world_size=world,
            node=node,
            nodes=nodes,
            local_rank=local_rank,
            index=members.index(local_rank),
            replicas=len(layout.target_gpus) // layout.target_tp,
            tp=layout.target_tp,
            drafters_per_node=len(layout.drafter_gpus),
        )
