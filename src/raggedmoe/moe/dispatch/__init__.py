"""How rows reach their experts: one small file a strategy, chosen from a table."""

from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.dispatch import capacity, dense, local, ring
from raggedmoe.moe.dispatch.strategy import Strategy as Strategy
from raggedmoe.moe.dispatch.strategy import StrategySettings

MAKERS = {"local": local.make, "capacity": capacity.make, "dense": dense.make, "ring": ring.make}


def make_strategy(config: MoEConfig, num_tokens: int, axis: str | None = None) -> Strategy:
    """The configuration's strategy for that many tokens; ``axis`` is the mesh axis of the experts, for "ring"."""
    settings = StrategySettings(
        num_experts=config.num_experts,
        capacity=config.capacity(num_tokens) if config.strategy_name == "capacity" else None,
        weigh_input=config.router.weigh == "input",
        kernels=config.kernel_choice,
        hardware=config.hardware,
        axis=axis,
    )
    return MAKERS[config.strategy_name](settings)
