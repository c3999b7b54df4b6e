"""How rows reach their experts: one small file a strategy, chosen from a table."""

from raggedmoe.mesh import EXPERT
from raggedmoe.moe.config import ACROSS_RANKS, TAKES_RANKS, MoEConfig, chosen_by_experts
from raggedmoe.moe.dispatch import all_to_all, capacity, dense, local, ring
from raggedmoe.moe.dispatch.strategy import Strategy as Strategy
from raggedmoe.moe.dispatch.strategy import StrategySettings
from raggedmoe.moe.grid import Grid

MAKERS = {
    "local": local.make,
    "capacity": capacity.make,
    "dense": dense.make,
    "ring": ring.make,
    "all_to_all": all_to_all.make,
}


def make_strategy(config: MoEConfig, num_tokens: int, grid: Grid, num_sequences: int = 1) -> Strategy:
    """The configuration's strategy for so many tokens, of so many sequences, on each device of a grid."""
    if grid.mesh is None and config.strategy_name in ACROSS_RANKS:
        raise ValueError(
            f"strategy={config.strategy_name!r} needs the mesh that experts are split over, got None; pass mesh=..., "
            "or use strategy='local'"
        )
    if grid.size(EXPERT) > 1 and config.strategy_name not in TAKES_RANKS:
        raise ValueError(
            f"strategy={config.strategy_name!r} needs all experts on every device, got a mesh with "
            f"expert_parallelism={grid.size(EXPERT)}; use {' or '.join(map(repr, ACROSS_RANKS))}"
        )
    return MAKERS[config.strategy_name](
        StrategySettings(
            num_experts=config.num_experts,
            capacity=_capacity(config, num_tokens // num_sequences),
            num_sequences=num_sequences,
            weigh_input=config.router.weigh == "input",
            kernels=config.kernel_choice,
            hardware=config.hardware,
            axis=EXPERT,
            num_ranks=grid.size(EXPERT),
            buffer_factor=config.ragged_buffer_factor,
            ragged=grid.hardware(config.hardware).platform != "cpu",  # XLA's CPU backend has no ragged all-to-all
        )
    )


def _capacity(config: MoEConfig, length: int) -> int | None:
    """Slots that each expert has in a sequence, where it is the tokens that choose."""
    if config.strategy_name != "capacity" or chosen_by_experts(config):
        return None
    return config.sequence_capacity(length)
