"""Running ``kleash mismatch`` and ``kleash doctor``."""

from kleash.cli.formats import print_formatted
from kleash.cli.summary import print_summary
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob


def run_mismatch(job: MismatchJob) -> int:
    """Run ``kleash mismatch`` and return its exit code: that of the gate, or 0.

    Raises:
        KleashError: if the job fails.
    """
    from kleash.diagnosis import measure_mismatch

    record = measure_mismatch(job.rollouts, names=job.names, at_most=job.at_most)
    if job.output_format is not None:
        print_formatted(record, job.output_format)
    else:
        print_summary(record)
    return 0 if record.gate is None else record.gate.exit_code


def run_doctor(job: DoctorJob) -> int:
    """Run ``kleash doctor`` and return its exit code, 0.

    Raises:
        KleashError: if the job fails.
    """
    from kleash.diagnosis.doctor import diagnose_file

    diagnosis = diagnose_file(job)
    if job.output_format is not None:
        print_formatted(diagnosis, job.output_format)
    else:
        print_summary(diagnosis)
    return 0
