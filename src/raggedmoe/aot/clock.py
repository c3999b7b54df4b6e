"""What turns a TensorCore's cycles into seconds and shares of its peak."""

from dataclasses import dataclass

from raggedmoe.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Clock:
    """One TensorCore's pace."""

    macs: int  # bfloat16 multiply-adds a cycle
    hertz: float
    hbm_bandwidth: float  # bytes a second: the core's share of its chip's
    branch_delay: int  # bundles after a branch that still run

    def of_peak(self, macs: int, cycles: int) -> float:
        """Divide the useful multiply-adds in so many cycles by those that the matrix units could do."""
        return macs / self.macs / max(cycles, 1)


# Multiply-adds a cycle: matrix units of 128 × 128 (256 × 256 from v6e on) as the compiler's own occupancy has them.
# Branch delay: seen in the compiler's bundles, where the bundles after a backward branch belong to the loop.
_MACS = {"v4": 65536, "v5e": 65536, "v5p": 65536, "v6e": 262144, "tpu7x": 262144}
_BRANCH_DELAY = {"v4": 4, "v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 6}


def clock_of(hardware: Hardware) -> Clock:
    """Derive the pace of a chip's TensorCore: the clock follows from its published peak."""
    if hardware.name not in _MACS or hardware.bf16_flops is None or hardware.hbm_bandwidth is None:
        raise ValueError(f"no schedule is known for {hardware.name}; expected one of {', '.join(_MACS)}")
    macs = _MACS[hardware.name]
    return Clock(
        macs=macs,
        hertz=hardware.bf16_flops / hardware.tensor_cores / 2 / macs,
        hbm_bandwidth=hardware.hbm_bandwidth / hardware.tensor_cores,
        branch_delay=_BRANCH_DELAY[hardware.name],
    )
