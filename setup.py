"""Packaging of aiak-ext: three small packages beside a user's own Megatron and Energon."""

from pathlib import Path

from setuptools import find_packages, setup

DEMO = [
    "megatron-core>=0.16,<0.17",
    "click>=8",
    "matplotlib>=3.8",
    "pyyaml>=6",
    "scikit-image>=0.22",
    "scikit-learn>=1.4",
    "tensorboard>=2.15",
    "tokenizers>=0.20",
    "tqdm>=4.66",
    "transformers>=4.50",
]

setup(
    name="aiak-ext",
    version="0.1.0",
    description="Length-sorted pools, rank-aligned token-budget batches and load balance for Energon",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["aiak_ext*", "length_sort*", "data_balance*"]),
    package_data={name: ["py.typed"] for name in ("aiak_ext", "length_sort", "data_balance")},
    install_requires=[
        "megatron-energon>=7.2,<8",
        "numpy>=1.26",
        "scipy>=1.11",
        "torch>=2.4",
        "webdataset>=0.2.100",
    ],
    entry_points={"console_scripts": ["aiak-ext = aiak_ext.cli:main"]},
    extras_require={
        # An extra, so that a user's own Megatron checkout is never shadowed by the wheel.
        "megatron": ["megatron-core>=0.16,<0.17"],
        "metrics": ["tensorboard>=2.15"],
        "cli": ["click>=8", "matplotlib>=3.8", "pyyaml>=6", "tqdm>=4.66"],
        "demo": DEMO,
        "bench": ["click>=8", "matplotlib>=3.8", "tqdm>=4.66"],
        "test": [
            *DEMO,
            "hypothesis>=6.100",
            "mypy>=1.10",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "ruff>=0.6",
        ],
    },
)
