"""Installs what the notebooks need into a runtime that lacks it, such as Colab's or Kaggle's.

Command: python notebooks/install.py

A jax that the project runs with stays, with its plugin for the accelerator. Another is replaced: a
process that has imported it must be restarted.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
# With Python 3.12 flax, as requirements.txt asks for it, needs a newer jax than the oldest there.
OLDEST = (0, 11, 1) if sys.version_info >= (3, 12) else (0, 10, 2)
END = (0, 13)


def version(package: str) -> str | None:
    """Returns the installed version, if there is one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator() -> str:
    """Returns the extra of jax for this machine's devices; "" for a CPU."""
    nvidia = shutil.which("nvidia-smi")
    if nvidia and subprocess.run([nvidia], capture_output=True).returncode == 0:
        return "[cuda12]"  # CUDA 13 needs a driver of version 580, CUDA 12 runs with any
    return "[tpu]" if version("libtpu") else ""


def requirements() -> list[str]:
    """Returns the lines of requirements.txt, that of jax for this runtime."""
    lines = [x for x in REQUIREMENTS.read_text().splitlines() if x and x[0] not in "# "]
    there = version("jax")
    if there and OLDEST <= tuple(map(int, there.split(".")[:3])) < END:
        jax = f"jax=={there}"
    else:
        (jax,) = [x.replace("jax", f"jax{accelerator()}") for x in lines if x.startswith("jax>")]
    return [jax if x.startswith("jax>") else x for x in lines]


def main() -> None:
    is_jetstream = lambda line: line.startswith("google-jetstream")
    lines = requirements()
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *(x for x in lines if not is_jetstream(x))], check=True)
    # Its metadata asks for TensorFlow, which is not used.
    subprocess.run([*pip, "--no-deps", *filter(is_jetstream, lines)], check=True)


if __name__ == "__main__":
    main()
