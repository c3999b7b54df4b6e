"""Which platforms JAX looks for."""

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

PLATFORMS = "JAX_PLATFORMS"
GOOGLE = "0x1ae0"  # the vendor of TPUs, among devices on a PCI bus
PCI, TPU_DEVICES, GPU_DEVICES = "/sys/bus/pci/devices/*/vendor", ("accel*", "vfio/*"), ("nvidia*", "kfd")


def leave_out_missing_tpu(environment: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Have JAX use the CPU where libtpu is installed and there is no TPU, about which libtpu would print an error.

    libtpu is installed on such machines for `raggedmoe compile`. Where there may be a TPU or a GPU, or where
    JAX_PLATFORMS says what to use, nothing is changed.
    """
    has_plugins = importlib.util.find_spec("jax_plugins") is not None
    if PLATFORMS in environment or has_plugins or importlib.util.find_spec("libtpu") is None:
        return
    devices = [path for pattern in (*TPU_DEVICES, *GPU_DEVICES) for path in (root / "dev").glob(pattern)]
    if not devices and not _has_google_device(root):
        environment[PLATFORMS] = "cpu"


def _has_google_device(root: Path) -> bool:
    for path in root.glob(PCI.removeprefix(os.sep)):
        try:
            if path.read_text().strip() == GOOGLE:
                return True
        except OSError:  # what cannot be read may be one
            return True
    return False
