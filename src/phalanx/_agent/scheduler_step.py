"""Which step of a scheduler a process is in: so that a launcher in a worker knows that the step is its launcher's."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

STEP = "PHALANX_STEP"
"""The variable in which workers find the step that their launcher is in. ``sbatch`` and ``srun`` hand it on to jobs and
steps to which it does not belong, so it is compared with `step_of`."""


def step_of(environ: Mapping[str, str]) -> str:
    """Return the name of a step, from what a scheduler has put into an environment; "": there is none.

    >>> step_of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}), step_of({})
    ('slurm-7.0', '')
    """
    mpirun = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if mpirun and "OMPI_COMM_WORLD_RANK" in environ:
        return f"openmpi-{mpirun}"
    if {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"} <= environ.keys():
        return f"hydra-{environ['PMI_RANK']}-{environ['PMI_SIZE']}"
    if {"SLURM_JOB_ID", "SLURM_STEP_ID"} <= environ.keys():
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return ""
