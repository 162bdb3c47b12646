"""The GPU that a graph is planned for: the one present, or one that is only named."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .errors import UnknownTargetError, nearest

# SM counts: H100/H200 SXM 132, B200 148, B300 148, RTX 5090 170, A100 108
# (NVIDIA's architecture white papers); persistent kernels bake the count in.
NAMED_TARGETS: Mapping[str, int] = {
    "sm_80": 108,
    "sm_90a": 132,
    "sm_100a": 148,
    "sm_103a": 148,
    "sm_120a": 170,
}

# Kernel libraries, by distribution, and the versions that fa_inductor is tested with.
TESTED_LIBRARIES: Mapping[str, str] = {
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cudnn-frontend": "1.32.0",
    "quack-kernels": "0.6.5",
    "cudnn": "9.19.0",  # not a distribution: what PyTorch has loaded
}


@dataclass(frozen=True)
class Target:
    """What a graph is planned for.

    arch: "sm_90a", "sm_100a", ... or "cpu".
    named: True when the user named it (it need not be present); False when it is the device
        that the tensors are on.
    sm_count: number of streaming multiprocessors, 0 on the CPU.
    libraries: version of each kernel library, "" where it is not installed, and "cudnn": that
        of the cuDNN which PyTorch has loaded. For a named target a missing library counts as
        installed in the tested version.
    """

    arch: str
    named: bool = False
    sm_count: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def family(self) -> int:
        """Major compute capability: 9 for Hopper, 10 for Blackwell, 0 for the CPU."""
        found = re.match(r"sm_(\d+)\d", self.arch)
        return int(found.group(1)) if found else 0

    @staticmethod
    def of_name(name: str) -> Target:
        """The target called `name` ("sm_90a"; "sm_90" is the same).

        Raises `UnknownTargetError` for a name that fa_inductor cannot plan for.
        """
        for known, sm_count in NAMED_TARGETS.items():
            if name in (known, known.rstrip("a")):
                libraries = {
                    library: version or TESTED_LIBRARIES[library]
                    for library, version in installed_libraries().items()
                }
                return Target(known, True, sm_count, libraries)
        raise UnknownTargetError(
            f"Unknown target {name!r}; fa_inductor plans for {', '.join(NAMED_TARGETS)}."
            + nearest(name, NAMED_TARGETS)
        )

    @staticmethod
    def of_device(device: torch.device) -> Target:
        """The target that tensors on `device` run on."""
        libraries = installed_libraries()
        if device.type != "cuda":
            return Target("cpu", libraries=libraries)
        properties = torch.cuda.get_device_properties(device)
        major, minor = properties.major, properties.minor
        arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        return Target(arch, False, properties.multi_processor_count, libraries)


def installed_libraries() -> dict[str, str]:
    """Version of each kernel library from its distribution's metadata, "" where missing.

    `flash_attn.cute.__version__` is "0.0.0" in 4.0.0b36, so the metadata is what counts.
    Nothing is imported.
    """
    versions = {}
    for library in TESTED_LIBRARIES:
        if library == "cudnn":
            versions[library] = loaded_cudnn()
            continue
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = ""
    return versions


def loaded_cudnn() -> str:
    """Version of the cuDNN that this PyTorch loads, "9.19.0"; "" for a build without."""
    number = torch.backends.cudnn.version()
    if number is None:
        return ""
    # cuDNN 9: major * 10000 + minor * 100 + patch (cudnn_version.h).
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
