"""Checks of the packages Megatron-Core looks for, and its import without the noise about the optional ones.

Megatron-Core decides by ``try: import apex`` which kernels it has, so a package that merely has that name makes it fail
far from the cause. Both checks read the file system and package metadata only.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path

from megarl.errors import SetupError


def check_optional_packages() -> None:
    """Raises SetupError for packages that are known to break Megatron-Core, by name and with the fix."""
    if is_foreign_apex():
        raise SetupError(
            "the installed 'apex' is PyPI's unrelated package, not NVIDIA's, and Megatron-Core would import it",
            fix="pip uninstall apex (NVIDIA's is optional and built from github.com/NVIDIA/apex)",
        )
    if _version("nvidia-resiliency-ext") == "0.4.1" and (_version("megatron-core") or "").startswith("0.19"):
        raise SetupError(
            "nvidia-resiliency-ext 0.4.1 breaks megatron-core 0.19 at import",
            fix="pip uninstall nvidia-resiliency-ext, or install a later one",
        )


def is_foreign_apex() -> bool:
    """Whether ``import apex`` would find something other than NVIDIA's Apex."""
    spec = util.find_spec("apex")
    if spec is None:
        return False
    locations = [Path(place) for place in spec.submodule_search_locations or ()]
    return not any((place / "multi_tensor_apply").is_dir() and (place / "optimizers").is_dir() for place in locations)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's PyTorch part can be found."""
    return util.find_spec("transformer_engine") is not None and _version("transformer-engine") is not None


def fused_kernels() -> tuple[str, ...]:
    """The installed packages whose fused kernels Megatron-Core takes on a GPU, with what each is for.

    Its optimizer is Transformer Engine's where there is one, else Apex's, else torch's (optimizer/__init__.py).
    """
    found = []
    if has_transformer_engine():
        found.append(f"Transformer Engine {_version('transformer-engine')} (layers, attention, Adam)")
    if (flash := _version("flash-attn")) is not None:
        found.append(f"flash-attn {flash} (attention)")
    if util.find_spec("apex") is not None and not is_foreign_apex():
        found.append("Apex (gradient accumulation, norms)")
    return tuple(found) or ("no fused kernels",)


MEGATRON_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)
"""What megarl uses of Megatron-Core; they import the rest."""


def import_megatron(modules: Iterable[str] = MEGATRON_MODULES) -> None:
    """Import Megatron-Core's modules without their warnings about missing optional packages.

    On CPU, Transformer Engine, Apex and the rest are missing by design. Raises SetupError when Megatron-Core itself is
    missing or does not import.
    """
    check_optional_packages()
    # Some remarks are logged rather than warned.
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Of all packages: Megatron-Core's decorators make torch import parts of itself that it deprecates.
            warnings.simplefilter("ignore")
            for module in modules:
                importlib.import_module(module)
    except ImportError as error:
        raise SetupError(
            f"Megatron-Core does not import: {error}", fix="pip install 'megarl[cpu]' or 'megarl[gpu]'"
        ) from error
    finally:
        logging.disable(previous)
    # torch 2.13 deprecates collectives that Megatron-Core calls in every step, and warns in the name of its own module.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        category=FutureWarning,
    )
    # 0.19 logs at every construction that GPTModel is deprecated; 0.16 has nothing else.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@contextmanager
def megatron_quiet() -> Iterator[None]:
    """Within it, warnings that Megatron-Core itself gives are dropped; those of other packages are not.

    For constructing its objects: it warns about the defaults of options that megarl does not set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
