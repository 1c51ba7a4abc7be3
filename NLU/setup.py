"""Installs the NLU fork as "transformers", the name that the release's scripts import."""

from setuptools import find_packages, setup

setup(
    name="transformers",
    version="4.4.2+lora.1",
    description="A slim fork of Transformers 4.4.2 with LoRA in RoBERTa and DeBERTa-v2",
    license="MIT",
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"": ["published/*.json"]},
    python_requires=">=3.10",
    install_requires=[
        "loralib>=0.2.0",
        "torch>=2.9",
        "datasets>=5.2",
        "filelock",
        "huggingface_hub>=1.33",
        "numpy>=1.26",
        "packaging",
        "regex",
        "safetensors>=0.7",
        "scikit-learn",
        "scipy",
        "sentencepiece>=0.2.3",
        # Those two cut texts differently, and lose what is cut off.
        "tokenizers>=0.22.2,!=0.23.1,!=0.23.2",
        "tqdm",
    ],
    extras_require={"tensorboard": ["tensorboard"], "optuna": ["optuna"]},
)
