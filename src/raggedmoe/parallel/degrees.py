"""How many devices along each mesh axis."""

import math
from dataclasses import dataclass, fields, replace

from raggedmoe.mesh import AXES, TOKEN_AXES


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Devices along each axis; -1, for one of them: all that are left."""

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"expected {name}_parallelism >= 1, or -1 for the devices that are left, got {size}")
        if len(self.open) > 1:
            names = " and ".join(f"{name}_parallelism" for name in self.open)
            raise ValueError(f"expected one degree of -1 at most, got {names}; give all but one a number")

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, in the mesh's order."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def open(self) -> tuple[str, ...]:
        """The axis that takes the devices that are left, if there is one."""
        return tuple(name for name, size in self.sizes.items() if size == -1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh; all degrees must be known."""
        assert not self.open, f"{self.open} are open"
        return math.prod(self.sizes.values())

    @property
    def num_token_shards(self) -> int:
        """Parts that the tokens of a batch are split into."""
        return math.prod(self.sizes[name] for name in TOKEN_AXES)


assert tuple(field.name for field in fields(Degrees)) == AXES


def resolved(degrees: Degrees, num_devices: int) -> Degrees:
    """The degrees with -1 filled in, required to use so many devices at most."""
    given = {name: size for name, size in degrees.sizes.items() if size != -1}
    used = math.prod(given.values())
    text = " × ".join(f"{name}_parallelism={size}" for name, size in given.items() if size > 1) or "all degrees 1"
    if degrees.open:
        if num_devices % used:
            raise ValueError(
                f"{num_devices} devices cannot be divided by {text} = {used}, so {degrees.open[0]}_parallelism=-1 has "
                f"no whole number; use degrees whose product is one of {_divisors(num_devices)}"
            )
        return replace(degrees, **{degrees.open[0]: num_devices // used})
    if used > num_devices:
        raise ValueError(
            f"{text} = {used} devices, but there are {num_devices}; use degrees whose product is at most {num_devices}"
        )
    return degrees


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
