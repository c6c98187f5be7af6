"""What a launcher notes of itself and of where it stands: versions, the git commit of the folder, variables.

It is noted as an attempt begins, on the thread that writes the record: nothing is started for it, and little is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from phalanx import __version__
from phalanx._base import files
from phalanx._base.secrets import is_secret_name, shown_text

MOST_VARIABLES = 200
"""Variables that are noted,"""

MOST_VALUE = 500
"""and characters of each."""

_KINDS = (
    *("CONDA_", "CUDA_", "CUBLAS_", "CUDNN_", "FI_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "I_MPI_", "JAX_", "KMP_"),
    *("LC_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "OMPI_", "OPENBLAS_", "PBS_", "PET_"),
    *("PHALANX_", "PYTHON", "PYTORCH_", "RCCL_", "ROCR_", "SLURM_", "TF_", "TOKENIZERS_", "TORCH", "TRITON_", "UCX_"),
    *("XLA_", "VIRTUAL_ENV", "TMPDIR", "LANG", "TZ"),
)
"""How the names of variables begin that change how programs run."""

_MOST_REF = 4096
_MOST_PACKED = 4 << 20
_DIGITS = (40, 64)  # of a commit: SHA-1, SHA-256
_PARENTS = 64


def versions() -> str:
    """Return those of Phalanx, Python and Linux.

    >>> versions().startswith(f"Phalanx {__version__}, Python 3.")
    True
    """
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Phalanx {__version__}, Python {python}, Linux {os.uname().release}"


def environment(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that change how programs run, as ``NAME=value``, without secrets: they go into a file.

    >>> environment({"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://me:pw@hub", "SHELL": "/bin/sh"})
    ['HF_ENDPOINT=http://(left out)@hub', 'NCCL_DEBUG=INFO']
    """
    names = sorted(name for name in environ if name.startswith(_KINDS) and not is_secret_name(name))
    return [f"{name[:MOST_VALUE]}={shown_text(environ[name])[:MOST_VALUE]}" for name in names[:MOST_VARIABLES]]


def commit(folder: str) -> str:
    """Return the git commit that is checked out in a folder, or above it, with its branch; "": none is found.

    The files of git are read as they are (gitrepository-layout(5)), for git itself would be a process. Whether there
    are changes since that commit is not known. Never raises.
    """
    for _ in range(_PARENTS):
        try:
            where = os.path.join(folder, ".git")
            if os.path.isfile(where):  # a worktree, or a submodule: "gitdir: PATH"
                where = os.path.join(folder, _text(where).partition("gitdir: ")[2])
            if os.path.exists(os.path.join(where, "HEAD")):
                return _head(where)
        except (OSError, ValueError):
            return ""
        parent = os.path.dirname(folder)
        if parent == folder:
            break
        folder = parent
    return ""


def _head(git: str) -> str:
    head = _text(os.path.join(git, "HEAD"))
    if not head.startswith("ref: "):
        return head if _is_commit(head) else ""
    ref = head.removeprefix("ref: ")
    branch = ref.removeprefix("refs/heads/")
    common = git
    if os.path.exists(shared := os.path.join(git, "commondir")):  # of a worktree: its branches are the repository's
        common = os.path.join(git, _text(shared))
    for place in (git, common):
        if os.path.exists(path := os.path.join(place, ref)):
            found = _text(path)
            return f"{found} ({branch})" if _is_commit(found) else ""
    for line in _text(os.path.join(common, "packed-refs"), _MOST_PACKED).split("\n"):
        found, _, name = line.partition(" ")
        if name == ref and _is_commit(found):
            return f"{found} ({branch})"
    return f"none yet ({branch})"


def _is_commit(text: str) -> bool:
    return len(text) in _DIGITS and all(digit in "0123456789abcdef" for digit in text)


def _text(path: str, most: int = _MOST_REF) -> str:
    return files.read(path, most).decode("utf-8", "backslashreplace").strip()
