"""Installs loralib, the LoRA layers. The NLU fork has a setup of its own in NLU/."""

from setuptools import find_packages, setup

setup(
    name="loralib",
    version="0.2.0",
    description="LoRA layers for PyTorch: low-rank adaptation as its paper released it",
    license="MIT",
    packages=find_packages(include=["loralib", "loralib.*"]),
    python_requires=">=3.10",
    install_requires=["filelock", "numpy>=1.26", "safetensors>=0.7", "torch>=2.9"],
    extras_require={"hub": ["huggingface_hub>=1.33"]},
)
